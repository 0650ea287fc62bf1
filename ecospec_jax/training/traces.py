"""Routing traces: token ids and the experts the target chose for each, in compressed shards with a manifest.

    FOLDER/manifest.json          what was traced, and the shards with their hashes; rewritten after each shard
    FOLDER/shard-00000.npz        sequences of some prompts

The routing of a token is recorded at the token that is processed, so it is the label of that very token.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pydantic

from ecospec_jax.config import STRICT, RoutingShape, from_json, to_json
from ecospec_jax.errors import UserError, reported_as_user_error

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Trace:
    """One traced sequence.

    Attributes:
        prompt: id of the prompt; all sequences of a prompt share it.
        prompt_length: tokens of the prompt.
        tokens_T: int32, prompt and answer.
        experts_TLK: uint16, chosen experts of each token and MoE layer, best first.
    """

    prompt: str
    prompt_length: int
    tokens_T: np.ndarray
    experts_TLK: np.ndarray


@dataclass(frozen=True)
class Shard:
    """A file of traces."""

    file: str
    sha256: str
    prompts: tuple[str, ...]
    tokens: int
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class TraceManifest:
    """What a folder of traces holds.

    Attributes:
        format: version of this layout.
        target_hash: of the target that was traced (`Manifest.target_hash`).
        vocab_size: the target's.
        routing: shape of the labels.
        recipe: how sequences were generated; a run with another recipe does not continue this one.
        shards: complete ones.
    """

    format: int
    target_hash: str
    vocab_size: int
    routing: RoutingShape
    recipe: dict[str, str]
    shards: tuple[Shard, ...] = ()
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    @property
    def prompts(self) -> set[str]:
        """Ids of the prompts that are done."""
        return {prompt for shard in self.shards for prompt in shard.prompts}


def read_manifest(folder: Path) -> TraceManifest:
    """Reads `manifest.json`."""
    file = folder / MANIFEST
    with reported_as_user_error(f"{file}: cannot be read", OSError, ValueError):
        values = json.loads(file.read_text())
    manifest = from_json(TraceManifest, values, str(file))
    if manifest.format != FORMAT:
        raise UserError(f"{file}: format {manifest.format} is not {FORMAT}; collect the traces again")
    return manifest


def write_manifest(folder: Path, manifest: TraceManifest) -> None:
    """Writes `manifest.json` at once and complete."""
    new = folder / f"{MANIFEST}.new"
    new.write_text(json.dumps(to_json(manifest), indent=1) + "\n")
    new.replace(folder / MANIFEST)


def write_shard(folder: Path, index: int, traces: Sequence[Trace]) -> Shard:
    """Writes one shard at once and complete."""
    file = folder / f"shard-{index:05d}.npz"
    new = file.with_suffix(".new")
    with new.open("wb") as stream:
        np.savez_compressed(
            stream,
            prompts=np.array([trace.prompt for trace in traces]),
            prompt_lengths=np.array([trace.prompt_length for trace in traces], np.int32),
            lengths=np.array([len(trace.tokens_T) for trace in traces], np.int32),
            tokens=np.concatenate([trace.tokens_T for trace in traces]).astype(np.int32),
            experts=np.concatenate([trace.experts_TLK for trace in traces]).astype(np.uint16),
        )
    sha256 = hashlib.sha256(new.read_bytes()).hexdigest()
    new.replace(file)
    prompts = tuple(dict.fromkeys(trace.prompt for trace in traces))
    return Shard(file.name, sha256, prompts, sum(len(trace.tokens_T) for trace in traces))


def read_traces(folder: Path, manifest: TraceManifest) -> Iterator[Trace]:
    """All traces in the order they were written; a damaged shard is a `UserError` that names it."""
    for shard in manifest.shards:
        file = folder / shard.file
        with reported_as_user_error(f"{file}: cannot be read", OSError):
            intact = hashlib.sha256(file.read_bytes()).hexdigest() == shard.sha256
        if not intact:
            raise UserError(f"{file}: the shard was changed or damaged after it was written; collect the traces again")
        with np.load(file) as arrays:
            ends = np.cumsum(arrays["lengths"])
            tokens, experts = arrays["tokens"], arrays["experts"]
            for prompt, prompt_length, length, end in zip(
                arrays["prompts"], arrays["prompt_lengths"], arrays["lengths"], ends, strict=True
            ):
                part = slice(end - length, end)
                yield Trace(str(prompt), int(prompt_length), tokens[part], experts[part])


def split_by_prompt(traces: Sequence[Trace], held_out: float, seed: int) -> tuple[list[Trace], list[Trace]]:
    """Training and held-out traces that share no prompt; `held_out` is the share of prompts kept apart."""
    prompts = sorted({trace.prompt for trace in traces})
    np.random.default_rng(seed).shuffle(prompts)
    apart = set(prompts[: round(held_out * len(prompts))])
    return [t for t in traces if t.prompt not in apart], [t for t in traces if t.prompt in apart]
