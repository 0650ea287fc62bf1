"""What trainings see of a folder of traces: held-out prompts apart, the rest shuffled without end, some at a time."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from ecospec_jax.errors import UserError
from ecospec_jax.training.traces import Shard, Trace, TraceManifest, read_shard, read_traces

WINDOW = 4  # shards whose sequences are shuffled together, and held


def is_held_out(data_set: str, prompt: str, *, share: float, seed: int) -> bool:
    """Whether a prompt is kept apart. It depends on nothing else, so other prompts stay where they are if more come."""
    key = json.dumps([seed, data_set, prompt]).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) < share * 2**64


def shuffled_traces(
    folder: Path, manifest: TraceManifest, *, keep: Callable[[str, str], bool], seed: int, first: int = 0
) -> Iterator[Trace]:
    """Endless traces, each once an epoch; shards in random order, sequences shuffled within `WINDOW` of them.

    Args:
        folder: where the shards are.
        manifest: which there are; what comes depends on it alone, `keep` and `seed`.
        keep: whether to take a prompt, from its data set and id; it must take one at least.
        seed: of the order.
        first: how many sequences to pass over. Only the window in which the next one lies is read.
    """
    counts = [_kept(shard, keep) for shard in manifest.shards]
    shards = np.flatnonzero(counts)
    epoch, first = divmod(first, sum(counts))
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(shards)
        for start in range(0, len(order), WINDOW):
            window = order[start : start + WINDOW]
            count = sum(counts[shard] for shard in window)
            if first >= count:
                first -= count
                continue
            places = np.random.default_rng((seed, epoch, start)).permutation(count).tolist()
            traces = (trace for shard in window for trace in read_shard(folder, manifest, manifest.shards[shard]))
            taken = (trace for trace in traces if keep(trace.data_set, trace.prompt))
            held = {place: trace for place, trace in zip(places, taken, strict=True) if place >= first}
            for place in range(first, count):
                yield held.pop(place)
            first = 0
        epoch += 1


def _kept(shard: Shard, keep: Callable[[str, str], bool]) -> int:
    return sum(count for prompt, count in shard.sequences.items() if keep(shard.data_set, prompt))


@dataclass(frozen=True)
class Corpus:
    """Traces of one target, divided into those to learn from and those to judge by.

    Attributes:
        folder: where they are.
        manifest: what is there.
        share: of the prompts, held out for judging.
        left_out: data sets of which nothing is learned; each is judged apart.
        seed: of the division and the order.
    """

    folder: Path
    manifest: TraceManifest
    share: float
    left_out: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        """Refuses a division that leaves nothing on one side."""
        prompts = self.manifest.prompts
        for name in self.left_out:
            if name not in {data_set for data_set, _ in prompts}:
                raise UserError(f"{self.folder}: holds no data set '{name}' to leave out")
        if not all(any(side(*prompt) for prompt in prompts) for side in (self.learns, self.holds_out)):
            usable = sum(data_set not in self.left_out for data_set, _ in prompts)
            raise UserError(f"{self.folder}: {usable} prompts are too few to hold some out")

    def learns(self, data_set: str, prompt: str) -> bool:
        """Whether a prompt is for training."""
        return data_set not in self.left_out and not self._apart(data_set, prompt)

    def holds_out(self, data_set: str, prompt: str) -> bool:
        """Whether a prompt is for judging what was learned from others of its data set."""
        return data_set not in self.left_out and self._apart(data_set, prompt)

    def _apart(self, data_set: str, prompt: str) -> bool:
        return is_held_out(data_set, prompt, share=self.share, seed=self.seed)

    def learned(self) -> Iterator[Trace]:
        """What is for training, once, in order."""
        return (trace for trace in read_traces(self.folder, self.manifest) if self.learns(trace.data_set, trace.prompt))

    def batches(self, size: int, first: int) -> Iterator[list[Trace]]:
        """What is for training, shuffled, in endless batches from number `first` on."""
        traces = self._shuffled(self.learns, first * size)
        while True:
            yield list(islice(traces, size))

    def held_out(self) -> Iterator[Trace]:
        """What is held out, once, in order."""
        traces = read_traces(self.folder, self.manifest)
        return (trace for trace in traces if self.holds_out(trace.data_set, trace.prompt))

    def sample(self, most: int) -> list[Trace]:
        """Some of what is held out, always the same, from shards at random."""
        count = sum(_kept(shard, self.holds_out) for shard in self.manifest.shards)
        return list(islice(self._shuffled(self.holds_out, 0), min(most, count)))

    def of(self, data_set: str) -> Iterator[Trace]:
        """Everything of a data set, once, in order."""
        return read_traces(self.folder, self.manifest, data_sets=(data_set,))

    def _shuffled(self, keep: Callable[[str, str], bool], first: int) -> Iterator[Trace]:
        return shuffled_traces(self.folder, self.manifest, keep=keep, seed=self.seed, first=first)
