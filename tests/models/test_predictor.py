"""Expert predictors: what each says, and that a tree of candidates is judged path by path."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ecospec_jax import expert_bits
from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.config import RoutingShape
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.predictor import Evidence, Oracle, Previous, top_experts
from tests import tiny_predictors
from tests.parity.compare import Tree, assert_close, causal_rows, tree_rows
from tests.tiny import quick_compilation
from tests.tiny_predictors import PREDICTOR, ROUTING, TARGET, random_ids, sets_of

__all__ = ["quick_compilation"]
CONTEXT, CAPACITY = [4, 7], 24
TREES = [Tree([-1, 0, 0, 1, 1, 2, 3]), Tree([-1, 0, 1, 0, 3, 4, 4])]
NODES = len(TREES[0].parents)

_logits = nnx.jit(lambda model, rows, cache: model.logits(rows, cache))


def logits(model: BackbonePredictor, rows: Rows, cache: KVCache) -> tuple[np.ndarray, KVCache]:
    logits_BRLE, cache = _logits(model, rows, cache)
    return np.asarray(logits_BRLE), cache


def committed(tokens: list[np.ndarray], model: BackbonePredictor) -> KVCache:
    """The cache after whole sequences, right-padded to one length."""
    padded = np.stack([np.pad(t, (0, max(CONTEXT) - len(t)), constant_values=1) for t in tokens])
    return logits(model, causal_rows(padded, CONTEXT), model.empty_cache(len(tokens), CAPACITY))[1]


def test_tree_attention_equals_path_by_path() -> None:
    """Every node's logits are those of its path as a plain sequence, computed without any cache."""
    random = np.random.default_rng(0)
    model = tiny_predictors.make_backbone()
    before = [random.integers(0, PREDICTOR.vocab_size, length) for length in CONTEXT]
    nodes_BN = random.integers(0, PREDICTOR.vocab_size, (2, NODES))
    tree_BNLE, cache = logits(model, tree_rows(nodes_BN, TREES, CONTEXT), committed(before, model))

    paths = [(b, node) for b, tree in enumerate(TREES) for node in range(NODES) if node in tree.leaves]
    length = max(CONTEXT) + 4
    plain = np.ones((len(paths), length), int)
    for row, (b, node) in zip(plain, paths, strict=True):
        text = [*before[b], *nodes_BN[b, TREES[b].paths[node]]]
        row[: len(text)] = text
    fresh = model.empty_cache(len(paths), length)
    plain_BRLE = logits(model, causal_rows(plain), fresh)[0]
    for row, (b, leaf) in enumerate(paths):
        for depth, node in enumerate(TREES[b].paths[leaf]):
            assert_close(tree_BNLE[b, node], plain_BRLE[row, CONTEXT[b] + depth], what=f"sequence {b}, node {node}")
    # Siblings differ, and so do nodes of one token at other places: the comparison is not of constants.
    assert np.abs(np.diff(tree_BNLE, axis=1)).max() > 0.1
    assert cache.capacity == CAPACITY


def test_call_names_the_best_k_of_each_layer() -> None:
    model = tiny_predictors.make_backbone()
    rows = causal_rows(np.arange(2 * NODES).reshape(2, NODES))
    cache = model.empty_cache(2, CAPACITY)
    logits_BRLE = logits(model, rows, cache)[0]
    evidence = Evidence(jnp.zeros((2, ROUTING.layers, 2), jnp.uint32), lambda rows: None)
    sets_BRLW, after = nnx.jit(lambda model, rows, cache: model(rows, cache, evidence))(model, rows, cache)
    sets_BRLW = np.asarray(sets_BRLW)
    for b, row in np.ndindex(2, NODES):
        best = np.argsort(-logits_BRLE[b, row], axis=-1)[:, : ROUTING.k]
        assert sets_of(sets_BRLW[b, row]) == {(layer, e) for layer in range(ROUTING.layers) for e in best[layer]}
    assert all(np.asarray(keys)[:, :, :NODES].any() for keys in after.keys)
    chances = nnx.jit(lambda model, rows, cache: model.probabilities(rows, cache, evidence))(model, rows, cache)
    assert_close(np.asarray(chances), 1 / (1 + np.exp(-logits_BRLE)), what="probabilities")


def test_ties_go_to_the_lower_id() -> None:
    scores = jnp.array([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]])
    assert sets_of(top_experts(scores, RoutingShape(1, 6, 3))) == {(0, 0), (0, 1), (0, 4)}


def test_predictors_without_memory() -> None:
    """Table by token, frequency by layer, previous by sequence, oracle as the target would."""
    tokens_BR = np.array([[3, 0, 3, 28], [1, 2, 3, 4]])
    rows = causal_rows(tokens_BR)
    table_VLK = random_ids((TARGET.vocab_size, ROUTING.layers), ROUTING, 0)
    prior_LK = random_ids((ROUTING.layers,), ROUTING, 1)
    last_BLK = random_ids((2, ROUTING.layers), ROUTING, 2)
    true_BRLW = jax.random.bits(jax.random.key(0), (2, 4, ROUTING.layers, 2), jnp.uint32)
    asked = []
    last_BLW = expert_bits.from_ids(jnp.asarray(last_BLK), ROUTING.experts)
    evidence = Evidence(last_BLW, lambda rows: asked.append(rows) or true_BRLW)

    def pairs(ids_LK: np.ndarray) -> set[tuple[int, int]]:
        return {(layer, e) for layer, ids in enumerate(ids_LK.tolist()) for e in ids}

    predictors = {
        "table": tiny_predictors.make_table(table_VLK),
        "frequency": tiny_predictors.make_frequency(prior_LK),
        "previous": Previous(),
        "oracle": Oracle(),
    }
    said = {}
    for name, predictor in predictors.items():
        assert predictor.empty_cache(2, CAPACITY) is None
        said[name], cache = predictor(rows, None, evidence)
        said[name] = np.asarray(said[name])
        assert cache is None and said[name].shape == (2, 4, ROUTING.layers, 2) and said[name].dtype == np.uint32
    for b, r in np.ndindex(2, 4):
        assert sets_of(said["table"][b, r]) == pairs(table_VLK[tokens_BR[b, r]])
        assert sets_of(said["frequency"][b, r]) == pairs(prior_LK)
        assert sets_of(said["previous"][b, r]) == pairs(last_BLK[b])
    np.testing.assert_array_equal(said["oracle"], true_BRLW)
    assert len(asked) == 1 and asked[0] is rows  # nobody but the oracle asks for the truth
