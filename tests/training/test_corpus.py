"""What a training sees of traces: a division by prompt, endless shuffled batches that can be taken up anywhere."""

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.errors import UserError
from ecospec_jax.training import corpus
from ecospec_jax.training.corpus import WINDOW, Corpus, is_held_out, shuffled_traces
from ecospec_jax.training.traces import Trace, read_manifest, read_shard
from tests.made_up_traces import make_trace, write_traces

SHARDS = 11  # more than two windows
# Two sequences a prompt, numbered by their length; data sets take turns.
GROUPS = [
    [
        make_trace(
            f"p{prompt}",
            40 * shard + 10 * (prompt - shard) + i + 1,
            prompt,
            data_set=("one", "two", "three")[shard % 3],
        )
        for prompt in range(shard, shard + 2 + shard % 2)
        for i in range(2)
    ]
    for shard in range(SHARDS)
]
ALL = [trace for group in GROUPS for trace in group]


def number(trace: Trace) -> int:
    return len(trace.tokens_T)


def numbers(traces: Iterable[Trace]) -> list[int]:
    return [number(trace) for trace in traces]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "traces"
    write_traces(folder, GROUPS)
    return folder


def make_corpus(folder: Path, **changes) -> Corpus:
    return replace(Corpus(folder, read_manifest(folder), share=0.4, left_out=(), seed=0), **changes)


def kept(data_set: str, prompt: str) -> bool:
    """Nothing of one data set, so some shards have nothing, and a part of the others."""
    return data_set != "two" and prompt != "p3"


def stream(folder: Path, seed: int = 0, first: int = 0) -> Iterator[int]:
    return map(number, shuffled_traces(folder, read_manifest(folder), keep=kept, seed=seed, first=first))


EXPECTED = [number(trace) for trace in ALL if kept(trace.data_set, trace.prompt)]


def test_every_trace_once_an_epoch(folder) -> None:
    """In another order each time and for each seed; neighbours in the stream come from several shards."""
    count = len(EXPECTED)
    assert len(set(EXPECTED)) == count > 20
    seen = list(islice(stream(folder), 3 * count))
    epochs = [seen[i * count : (i + 1) * count] for i in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(EXPECTED)] * 3
    assert len({tuple(epoch) for epoch in [*epochs, islice(stream(folder, seed=1), count)]}) == 4
    assert list(islice(stream(folder), count)) == epochs[0]
    shards = [each // 40 for each in epochs[0]]
    assert sum(a != b for a, b in zip(shards, shards[1:], strict=False)) > 2 * len(set(shards))


def test_taken_up_anywhere(folder, monkeypatch) -> None:
    """The same goes on, and at most a window is read before the first."""
    read = []
    monkeypatch.setattr(corpus, "read_shard", lambda *where: read.append(where) or read_shard(*where))
    whole = list(islice(stream(folder), 3 * len(EXPECTED)))
    for first in range(2 * len(EXPECTED)):
        read.clear()
        rest = stream(folder, first=first)
        assert next(rest) == whole[first] and len(read) <= WINDOW
        assert list(islice(rest, 5)) == whole[first + 1 : first + 6]


@pytest.mark.parametrize("first", [0, 5])
def test_no_more_than_a_window_is_held(folder, monkeypatch, first: int) -> None:
    """Traces that were handed out or passed over, and those of an earlier window, are gone."""
    alive: weakref.WeakSet[Trace] = weakref.WeakSet()
    monkeypatch.setattr(Trace, "__hash__", object.__hash__)
    read = []

    def watched(*where) -> Iterator[Trace]:
        read.append(where)
        for trace in read_shard(*where):
            alive.add(trace)
            yield trace

    monkeypatch.setattr(corpus, "read_shard", watched)
    counts = Counter(number(trace) // 40 for trace in ALL if kept(trace.data_set, trace.prompt))
    window, taken, passed_over = 0, 0, first
    upcoming = shuffled_traces(folder, read_manifest(folder), keep=kept, seed=0, first=first)
    for trace in islice(upcoming, 2 * len(EXPECTED)):
        if read:  # a new window
            window = sum(counts[int(shard.file[6:11])] for *_, shard in read)
            assert len(read) <= WINDOW
            read.clear()
            taken, passed_over = passed_over, 0
        taken += 1
        assert len(alive) <= window - taken + 2, "the one in hand, and perhaps the last one read"
        del trace


def test_division_is_by_hash() -> None:
    """Of seed, data set and prompt alone, written out once here so that it never changes unnoticed."""
    digest = hashlib.sha256(b'[7, "one", "p1"]').digest()
    part = int.from_bytes(digest[:8], "big") / 2**64
    assert is_held_out("one", "p1", share=part + 1e-9, seed=7) and not is_held_out(
        "one", "p1", share=part - 1e-9, seed=7
    )


@settings(deadline=None, max_examples=20)
@given(share=st.floats(0.05, 0.95), seed=st.integers(0, 2**32 - 1))
def test_the_asked_share_is_held_out(share: float, seed: int) -> None:
    """Within five standard deviations; not the same prompts of each data set."""
    apart = {
        name: {i for i in range(1000) if is_held_out(name, f"p{i}", share=share, seed=seed)} for name in ("one", "two")
    }
    for chosen in apart.values():
        assert abs(len(chosen) - 1000 * share) < 5 * np.sqrt(1000 * share * (1 - share))
    assert apart["one"] != apart["two"]


def test_nothing_is_lost_between_the_sides(folder) -> None:
    """No prompt is on both; a data set left out is on neither."""
    for seed, left_out in ((0, ()), (1, ("two",))):
        division = make_corpus(folder, seed=seed, left_out=left_out)
        learned, held_out = list(division.learned()), list(division.held_out())
        sides = [{(trace.data_set, trace.prompt) for trace in side} for side in (learned, held_out)]
        assert not sides[0] & sides[1]
        wanted = [trace for trace in ALL if trace.data_set not in left_out]
        assert sorted(numbers(learned + held_out)) == sorted(numbers(wanted))
        assert numbers(division.of("two")) == numbers(trace for trace in ALL if trace.data_set == "two")


def test_batches_and_sample(folder) -> None:
    """Batches are the shuffled stream in pieces, from any one on; the sample is of what is held out, each once."""
    division = make_corpus(folder)
    learned, held_out = numbers(division.learned()), numbers(division.held_out())
    seen = [numbers(batch) for batch in islice(division.batches(5, 0), 12)]
    assert all(len(batch) == 5 for batch in seen)
    assert sorted(sum(seen, [])[: len(learned)]) == sorted(learned)
    for first in (1, 3, 11):
        assert numbers(next(division.batches(5, first))) == seen[first]
    few, all_of_it = numbers(division.sample(3)), numbers(division.sample(1000))
    assert len(few) == 3 and few == all_of_it[:3]
    assert sorted(all_of_it) == sorted(held_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": 0.0}, "27 prompts are too few to hold some out"),
        ({"share": 1.0}, "27 prompts are too few to hold some out"),
        ({"left_out": ("one", "two", "three")}, "0 prompts are too few to hold some out"),
        ({"left_out": ("one", "four")}, "holds no data set 'four' to leave out"),
    ],
)
def test_no_division(folder, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^{folder}: {message}$"):
        make_corpus(folder, **changes)
