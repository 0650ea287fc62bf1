"""Routing traces on disk, their split by prompt, and the tables that are counted on them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.config import RoutingShape
from ecospec_jax.errors import UserError
from ecospec_jax.training.tables import PRIOR_WEIGHT, best_experts, expert_counts, layer_prior, token_scores
from ecospec_jax.training.traces import (
    FORMAT,
    MANIFEST,
    Shard,
    Trace,
    TraceManifest,
    read_manifest,
    read_traces,
    split_by_prompt,
    write_manifest,
    write_shard,
)

VOCAB, ROUTING = 23, RoutingShape(layers=3, experts=70, k=2)


def make_trace(prompt: str, length: int, seed: int) -> Trace:
    random = np.random.default_rng(seed)
    experts = np.argsort(random.random((length, ROUTING.layers, ROUTING.experts)))[..., : ROUTING.k]
    return Trace(prompt, 1, random.integers(0, VOCAB, length).astype(np.int32), experts.astype(np.uint16))


GROUPS = [
    [make_trace("p0", 5, 0), make_trace("p0", 1, 1), make_trace("ü 1", 9, 2)],
    [make_trace("p2", 4, 3)],
    [make_trace("p3", 7, 4), make_trace("p3", 7, 5)],
]


def write(folder: Path, groups: list[list[Trace]]) -> TraceManifest:
    folder.mkdir()
    manifest = TraceManifest(FORMAT, "ab" * 32, VOCAB, ROUTING, {"seed": "0"})
    for index, group in enumerate(groups):
        shard = write_shard(folder, index, group)
        manifest = replace(manifest, shards=(*manifest.shards, shard))
        write_manifest(folder, manifest)
    return manifest


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "traces"
    write(folder, GROUPS)
    return folder


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "traces"))


def test_round_trip(tmp_path) -> None:
    """Values, dtypes and order; the manifest says what is there, and no temporary file stays."""
    manifest = write(tmp_path / "traces", GROUPS)
    assert read_manifest(tmp_path / "traces") == manifest
    assert manifest.prompts == {"p0", "ü 1", "p2", "p3"}
    assert [shard.prompts for shard in manifest.shards] == [("p0", "ü 1"), ("p2",), ("p3",)]
    assert [shard.tokens for shard in manifest.shards] == [15, 4, 14]
    names = {"manifest.json", *(f"shard-0000{i}.npz" for i in range(3))}
    assert {file.name for file in (tmp_path / "traces").iterdir()} == names

    found = list(read_traces(tmp_path / "traces", manifest))
    expected = [trace for group in GROUPS for trace in group]
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.prompt, ours.prompt_length) == (wanted.prompt, wanted.prompt_length)
        assert (ours.tokens_T.dtype, ours.experts_TLK.dtype) == (np.int32, np.uint16)
        np.testing.assert_array_equal(ours.tokens_T, wanted.tokens_T)
        np.testing.assert_array_equal(ours.experts_TLK, wanted.experts_TLK)


def test_shards_are_the_same_bytes_each_time(tmp_path, pristine) -> None:
    """So that a resumed collection can equal an uninterrupted one."""
    assert write(tmp_path / "again", GROUPS) == read_manifest(pristine)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES = {
    "flipped bit": flip_a_bit,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "empty": lambda file: file.write_bytes(b""),
    "another shard": lambda file: shutil.copy(file.with_name("shard-00000.npz"), file),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named(folder, damage: str) -> None:
    """The traces before it can be read."""
    file = folder / "shard-00001.npz"
    DAMAGES[damage](file)
    found = read_traces(folder, read_manifest(folder))
    for _ in GROUPS[0]:
        next(found)
    with pytest.raises(UserError, match=f"^{file}: (the shard was changed or damaged|cannot be read)") as error:
        next(found)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1} is not {FORMAT}"),
        ({"routing": {"layers": 3, "experts": 70}}, "routing.k: "),
        ({"shards": [{"file": "shard-00000.npz"}]}, "shards.0.sha256: "),
        ({"target_hash": None}, "target_hash: "),
    ],
)
def test_a_bad_manifest_is_named(folder, edit: dict, message: str) -> None:
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    with pytest.raises(UserError, match=f"^{file}: {message}"):
        read_manifest(folder)


def test_an_unreadable_manifest_is_named(folder) -> None:
    for content in ("{", "[]", "\xff"):
        (folder / MANIFEST).write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=f"^{folder / MANIFEST}: "):
            read_manifest(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(UserError, match=f"^{folder / MANIFEST}: cannot be read"):
        read_manifest(folder)


@settings(deadline=None)
@given(
    prompts=st.lists(st.text("ab", max_size=3), min_size=1, max_size=30),
    held_out=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_split_shares_no_prompt(prompts: list[str], held_out: float, seed: int) -> None:
    """Each trace on one side, in order; the asked share of prompts held out; the same split every time."""
    traces = [
        Trace(prompt, i, np.zeros(1, np.int32), np.zeros((1, 3, 2), np.uint16)) for i, prompt in enumerate(prompts)
    ]
    train, apart = split_by_prompt(traces, held_out, seed)
    assert not {t.prompt for t in train} & {t.prompt for t in apart}
    for side in (train, apart):
        assert [t.prompt_length for t in side] == sorted(t.prompt_length for t in side)
    assert sorted(t.prompt_length for t in train + apart) == list(range(len(prompts)))
    assert len({t.prompt for t in apart}) == round(held_out * len(set(prompts)))
    again = split_by_prompt(traces, held_out, seed)
    assert [[t.prompt_length for t in side] for side in again] == [[t.prompt_length for t in s] for s in (train, apart)]


def test_split_follows_the_seed_not_the_order() -> None:
    traces = [make_trace(f"p{i}", 1, i) for i in range(20)]
    held = [{t.prompt for t in split_by_prompt(traces, 0.5, seed)[1]} for seed in range(4)]
    assert len({frozenset(h) for h in held}) > 1
    assert {t.prompt for t in split_by_prompt(traces[::-1], 0.5, 0)[1]} == held[0]


def test_tables_count() -> None:
    """Counts, prior and scores against plain loops."""
    traces = [trace for group in GROUPS for trace in group]
    counts = np.zeros((VOCAB, ROUTING.layers, ROUTING.experts))
    for trace in traces:
        for token, experts_LK in zip(trace.tokens_T, trace.experts_TLK, strict=True):
            for layer, experts in enumerate(experts_LK):
                for expert in experts:
                    counts[token, layer, expert] += 1
    ours = expert_counts(traces, VOCAB, ROUTING)
    np.testing.assert_array_equal(ours, counts)
    prior = counts.sum(0) / (33 * ROUTING.k)
    np.testing.assert_allclose(layer_prior(ours), prior, rtol=1e-6)
    np.testing.assert_allclose(token_scores(ours), counts + PRIOR_WEIGHT * prior, rtol=1e-6)
    ranked = best_experts(token_scores(ours), ROUTING.k)
    assert ranked.shape == (VOCAB, ROUTING.layers, ROUTING.k)
    for token, layer in np.ndindex(VOCAB, ROUTING.layers):
        scores = counts[token, layer] + PRIOR_WEIGHT * prior[layer]
        best = sorted(range(ROUTING.experts), key=lambda expert: (-np.float32(scores[expert]), expert))
        assert ranked[token, layer].tolist() == best[: ROUTING.k]


def test_rare_tokens_fall_back_to_the_layers_favourites() -> None:
    """An unseen id gets the prior's experts; one observation is enough to prefer what was observed."""
    common = Trace("a", 1, np.zeros(50, np.int32), np.broadcast_to([[[7, 9]] * 3], (50, 3, 2)).astype(np.uint16))
    rare = Trace("b", 1, np.array([1], np.int32), np.full((1, 3, 2), [[3, 60]], np.uint16))
    ranked = best_experts(token_scores(expert_counts([common, rare], VOCAB, ROUTING)), ROUTING.k)
    assert (ranked[0] == [7, 9]).all() and (ranked[1] == [3, 60]).all() and (ranked[2:] == [7, 9]).all()


def test_no_traces_give_empty_tables() -> None:
    counts = expert_counts([], VOCAB, ROUTING)
    assert not counts.any() and not layer_prior(counts).any()
    assert (best_experts(layer_prior(counts), ROUTING.k) == [0, 1]).all()


def test_shard_index_is_its_name(tmp_path) -> None:
    assert isinstance(shard := write_shard(tmp_path, 12, GROUPS[1]), Shard) and shard.file == "shard-00012.npz"
