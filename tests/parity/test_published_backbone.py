"""Published Qwen3 and Qwen2 folders as backbones: hidden states of transformers in float32, through every bridge."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

from convert.bridge import BridgeKind, published_predictor
from ecospec_jax.cache import KVCache, Rows, commit_path
from ecospec_jax.config import Qwen3MoeConfig
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.predictor_config import Retokenise
from ecospec_jax.tokenizer import Tokenizer
from tests import tiny
from tests.hf_backbones import FAMILIES, hidden_states, write_backbone, write_bpe
from tests.hf_models import edit_json
from tests.parity.compare import Tree, assert_close, causal_rows, relative_error, tree_rows
from tests.tiny_predictors import TARGET, write_tokenizer

F32 = jnp.dtype(jnp.float32)
TWO_BYTES = "\u00e5\u00a5"  # of the three of a character
TARGET_MERGES = ["th", "the", "thi", "an", "and", "\u0120b", TWO_BYTES]
BACKBONE_MERGES = ["he", "nd", "\u0120b", TWO_BYTES]
MARK = "<|mark|>"
TEXT = "and the bath the thin andante" + MARK + " bathe \u597d!"

_states = nnx.jit(lambda model, rows, cache: model.states(rows, cache))


def states(model: BackbonePredictor, rows: Rows, cache: KVCache) -> tuple[np.ndarray, KVCache]:
    hidden_BRD, cache = _states(model, rows, cache)
    return np.asarray(hidden_BRD), cache


def open_predictor(
    folder: Path, kind: BridgeKind, tokenizer: Tokenizer | None = None, target: Qwen3MoeConfig = TARGET
) -> BackbonePredictor:
    return published_predictor(folder, kind, tiny.make_target(target), tokenizer, dtype=F32, rngs=nnx.Rngs(0))


def as_on_the_hub(folder: Path) -> None:
    """The older spelling of the config, and a redundant copy of the tied head."""
    old = {"torch_dtype": "float32", "rope_theta": 300.0, "rope_scaling": None, "use_mrope": False}
    edit_json(folder / "config.json", rope_parameters=..., dtype=..., layer_types=..., **old)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)


LAYOUTS = {
    "tied": ({}, None),
    "untied": ({"tied": False}, None),
    "sharded": ({"tied": False, "shard_size": "8KB"}, None),
    "as on the Hub": ({}, as_on_the_hub),
    "fewer rows than the target": ({"vocab_size": 26}, None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_published_layouts(family: str, layout: str, tmp_path) -> None:
    """Every layout is read; with a shared vocabulary the states are those of transformers for the same ids."""
    options, edit = LAYOUTS[layout]
    theirs = write_backbone(tmp_path, family, **options)
    write_tokenizer(tmp_path)
    if edit is not None:
        edit(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (layout == "sharded")
    model = open_predictor(tmp_path, "shared", Tokenizer.load(tmp_path))
    assert model.config.backbone.family == family and model.embedding.weight[...].shape[0] == TARGET.vocab_size
    tokens_BR = np.random.default_rng(0).integers(0, 25, (2, 11))
    ours, _ = states(model, causal_rows(tokens_BR), model.empty_cache(2, 16))
    for b, ids in enumerate(tokens_BR):
        assert_close(ours[b], hidden_states(theirs, ids), what=f"sequence {b}")
    without_token, _ = states(model, causal_rows([[28, 3]]), model.empty_cache(1, 16))
    assert np.isfinite(without_token).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_target_embedding(family: str, tmp_path) -> None:
    """The target's embedding through the projection; no tokenizer is needed."""
    theirs = write_backbone(tmp_path, family)
    model = open_predictor(tmp_path, "target_embedding")
    assert model.projection is not None
    tokens_R = np.random.default_rng(1).integers(0, TARGET.vocab_size, 11)
    ours, _ = states(model, causal_rows(tokens_R[None]), model.empty_cache(1, 16))
    table_VD = np.asarray(tiny.make_target(TARGET).embedding.weight[...])
    embedded_RD = torch.tensor(table_VD[tokens_R] @ np.asarray(model.projection.weight[...]).T)
    with torch.no_grad():
        expected = theirs.model(inputs_embeds=embedded_RD[None]).last_hidden_state[0].numpy()
    assert_close(ours[0], expected)


@pytest.fixture(params=FAMILIES, scope="module")
def world(request, tmp_path_factory) -> SimpleNamespace:
    """A published model and a target whose tokenizer differs."""
    folder = tmp_path_factory.mktemp(request.param)
    write_bpe(folder / "target", TARGET_MERGES, seed=1, special=[MARK])
    write_bpe(folder / "published", BACKBONE_MERGES, seed=2)
    theirs = write_backbone(folder / "published", request.param, vocab_size=268)
    target, own = Tokenizer.load(folder / "target"), Tokenizer.load(folder / "published")
    ours = open_predictor(folder / "published", "retokenise", target, replace(TARGET, vocab_size=272))
    assert ours.config.bridge == Retokenise(268, 4)
    return SimpleNamespace(torch=theirs, jax=ours, target=target, own=own)


def read_as(world: SimpleNamespace, ids: Sequence[int]) -> list[list[int]]:
    """Each token's sub-tokens: its text, or the bytes of a part of a character one merge at a time."""
    own, blocks = {token: i for i, token in world.own.vocabulary.items()}, []
    for token in (world.target.vocabulary[i] for i in ids):
        text = token.replace("\u0120", " ")
        blocks.append(world.own.encode(text)[-4:] if text.isascii() else [own[token]])
    return blocks


def expected_states(world: SimpleNamespace, ids: Sequence[int]) -> np.ndarray:
    """Theirs at the last sub-token of each token of a plain sequence."""
    blocks = read_as(world, ids)
    ends = np.cumsum([len(block) for block in blocks]) - 1
    return hidden_states(world.torch, sum(blocks, []))[ends]


def test_retokenised_text(world: SimpleNamespace) -> None:
    """Where boundaries coincide, the states are those of the text, tokenised by the backbone in one go."""
    ids = world.target.encode(TEXT)
    assert {len(block) for block in read_as(world, ids)} == {1, 2, 3, 4}
    cut = ids.index(*world.target.encode(MARK))
    parts = [ids[:cut], ids[cut + 1 :]]
    padded = [part + [0] * (cut - len(part)) for part in parts]
    ours, _ = states(world.jax, causal_rows(padded, [len(part) for part in parts]), world.jax.empty_cache(2, 32))
    for b, part in enumerate(parts):
        whole = world.own.encode(world.target.decode(part))
        assert sum(read_as(world, part), []) == whole and len(whole) > len(part)
        assert_close(ours[b, : len(part)], expected_states(world, part), what=f"part {b}")
        theirs = hidden_states(world.torch, whole)
        assert_close(ours[b, len(part) - 1], theirs[-1], what=f"end of part {b}")
        assert relative_error(ours[b, : len(part)], theirs[: len(part)]) > 0.1
    with_mark, _ = states(world.jax, causal_rows([ids]), world.jax.empty_cache(1, 32))
    assert_close(with_mark[0], expected_states(world, ids), what="with a mark that only the target knows")


def test_retokenised_trees(world: SimpleNamespace) -> None:
    """Every path of a tree behind unequal contexts; then the accepted path is committed, and decoding goes on."""
    random = np.random.default_rng(3)
    known = world.target.encode(TEXT)
    trees, context = [Tree([-1, 0, 0, 1, 2, 3, 3, 0]), Tree([-1, 0, 1, 1, 0, 4, 5, 6])], [5, 8]
    before = [random.choice(known, length).tolist() for length in context]
    nodes_BN = random.choice(known, (2, 8))
    padded = [tokens + [0] * (8 - len(tokens)) for tokens in before]
    _, cache = states(world.jax, causal_rows(padded, context), world.jax.empty_cache(2, 24))
    ours, cache = states(world.jax, tree_rows(nodes_BN, trees, context), cache)
    for b, tree in enumerate(trees):
        for leaf in tree.leaves:
            path = tree.paths[leaf]
            theirs = expected_states(world, [*before[b], *nodes_BN[b, path]])
            assert_close(ours[b, path], theirs[context[b] :], what=f"sequence {b}, path to {leaf}")

    paths = [trees[0].paths[6], trees[1].paths[7]]  # of unequal depth; entries past the shorter one are never seen
    longest = max(map(len, paths))
    path_BP = np.array([path + [7] * (longest - len(path)) for path in paths])
    cache = commit_path(cache, jnp.array(context), jnp.array(path_BP))
    length = [c + len(path) for c, path in zip(context, paths, strict=True)]
    more_BR = random.choice(known, (2, 8))
    ours, _ = states(world.jax, causal_rows(more_BR, context_B=length), cache)
    for b, path in enumerate(paths):
        theirs = expected_states(world, [*before[b], *nodes_BN[b, path], *more_BR[b]])
        assert_close(ours[b], theirs[length[b] :], what=f"sequence {b} goes on")
