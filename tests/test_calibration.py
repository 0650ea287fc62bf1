"""Acceptance probabilities against plain Python and numpy: features, the logistic model, learning, free labels."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.calibration import (
    FEATURES,
    Calibration,
    Outcomes,
    calibrate,
    edge_features,
    edge_log_probs,
    learn,
    outcomes,
)
from ecospec_jax.config import SpecConfig
from ecospec_jax.tree import ROOT, CandidateTree, Selection, build_tree, verify_tree
from ecospec_jax.verification import accept_path
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]
BATCH, SPEC = 2, SpecConfig(depth=3, branch=2, budget=4)
NODES, LOGIT, BOUND = SPEC.pool_size, FEATURES.index("logit"), 12.0
DEPTHS = [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
VOCABULARY = 3
ROUNDING = 4 * float(np.finfo(np.float32).eps)  # a slope below float32's steps leaves only the rounding of log-sigmoid


def draw_tree(random: np.random.Generator, *, wild: bool = False) -> CandidateTree:
    """Pools as a drafter expands them; `wild` ones have edges of certain, impossible and undefined probability."""
    parents, log_probs, tokens = (np.zeros((BATCH, NODES)) for _ in range(3))
    for b in range(BATCH):
        level = np.sort(random.choice([2, 3, 4, 5], 2, replace=False))
        parents[b] = [ROOT, ROOT, 0, 0, 1, 1, *np.repeat(level, 2)]
        edges = -random.exponential(1.0, NODES)
        if wild:
            edges = random.choice([0.0, -1e-9, -1e-3, -1.0, -20.0, -np.inf, np.nan], NODES)
        for node in range(NODES):
            parent = int(parents[b, node])
            log_probs[b, node] = edges[node] + (0.0 if parent == ROOT else log_probs[b, parent])
        for node in range(0, NODES, 2):  # siblings come in pairs and differ
            tokens[b, node : node + 2] = random.choice(VOCABULARY, 2, replace=False)
    return build_tree(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(parents, jnp.int32),
        jnp.array(DEPTHS, jnp.int32),
        jnp.asarray(log_probs, jnp.float32),
    )


def features_reference(tree: CandidateTree, b: int) -> np.ndarray:
    parents, log_probs = np.asarray(tree.parents_BN[b]).tolist(), np.asarray(tree.log_probs_BN[b]).tolist()
    edges = []
    for node, parent in enumerate(parents):
        edge = log_probs[node] - (0.0 if parent == ROOT else log_probs[parent])
        edges.append(min(max(-BOUND if math.isnan(edge) else edge, -BOUND), -1e-6))
    rows = []
    for node, parent in enumerate(parents):
        siblings = [other for other in range(NODES) if parents[other] == parent and other != node]
        probability = math.exp(edges[node])
        logit = math.log(probability) - math.log(-math.expm1(edges[node]))
        rows.append(
            [
                1.0,
                min(max(logit, -BOUND), BOUND),
                DEPTHS[node] - 1,
                sum(other < node for other in siblings),
                max((edges[other] for other in siblings), default=-BOUND),
            ]
        )
    return np.array(rows)


seeds = st.integers(0, 2**32 - 1)
features_of = jax.jit(edge_features)
calibrated = jax.jit(calibrate)
learned = jax.jit(learn)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, wild=st.booleans())
def test_features_are_those_of_plain_python(seed: int, wild: bool) -> None:
    tree = draw_tree(np.random.default_rng(seed), wild=wild)
    features_BNF = np.asarray(features_of(tree))
    assert features_BNF.shape == (BATCH, NODES, len(FEATURES))
    for b in range(BATCH):
        # Differences of cumulative float32 log-probabilities; the logit of one near 1 magnifies them.
        np.testing.assert_allclose(features_BNF[b], features_reference(tree, b), rtol=2e-3, atol=2e-3)


def test_an_only_child_has_no_sibling() -> None:
    chain = build_tree(
        jnp.zeros((1, 3), jnp.int32), jnp.array([[ROOT, 0, 1]]), jnp.array([1, 2, 3]), jnp.array([[-0.5, -1.0, -3.0]])
    )
    np.testing.assert_array_equal(edge_features(chain)[0, :, 2:], [[0, 0, -BOUND], [1, 0, -BOUND], [2, 0, -BOUND]])


weights = st.lists(st.floats(-1e6, 1e6, width=32), min_size=len(FEATURES), max_size=len(FEATURES))


@settings(deadline=None, max_examples=80)
@given(seed=seeds, wild=st.booleans(), drawn=weights)
def test_probabilities_for_any_weights(seed: int, wild: bool, drawn: list[float]) -> None:
    """Those of edges lie in (0, 1) and rise with the drafter's; C is their product and never rises along a path."""
    tree = draw_tree(np.random.default_rng(seed), wild=wild)
    weights_F = jnp.array(drawn, jnp.float32).at[LOGIT].set(abs(drawn[LOGIT]))
    edges_BN = np.asarray(edge_log_probs(edge_features(tree), weights_F))
    assert ((edges_BN < 0) & np.isfinite(edges_BN)).all()
    after = calibrated(tree, Calibration(weights_F, jnp.eye(len(FEATURES))))
    log_c_BN = np.asarray(after.log_probs_BN)
    for b, parents in enumerate(np.asarray(tree.parents_BN).tolist()):
        for node, parent in enumerate(parents):
            above = 0.0 if parent == ROOT else log_c_BN[b, parent]
            assert log_c_BN[b, node] < above or edges_BN[b, node] > -1e-5  # rounding of a sum may hide the least
            assert log_c_BN[b, node] <= above
            np.testing.assert_allclose(log_c_BN[b, node], above + edges_BN[b, node], rtol=1e-5, atol=1e-6)
    for name in ("tokens_BN", "parents_BN", "depths_N", "ancestors_BNN"):
        np.testing.assert_array_equal(getattr(after, name), getattr(tree, name))
    logits = jnp.linspace(-BOUND, BOUND, 50)
    line_XF = jnp.broadcast_to(edge_features(tree)[0, 3], (50, len(FEATURES))).at[:, LOGIT].set(logits)
    line_X = np.asarray(edge_log_probs(line_XF[None], weights_F)[0])
    assert (np.diff(line_X) >= -ROUNDING * np.abs(line_X[:-1])).all()


def test_trusting_takes_the_drafter_at_its_word() -> None:
    tree = draw_tree(np.random.default_rng(3))
    np.testing.assert_allclose(
        calibrated(tree, Calibration.trusting()).log_probs_BN, tree.log_probs_BN, rtol=1e-3, atol=1e-4
    )


# ---------------------------------------------------------------------------------------------------------------------
# Learning


def newton(weights: np.ndarray, precision: np.ndarray, rows: np.ndarray, hits: np.ndarray) -> tuple:
    """One step over the known edges, in float64."""
    probability = 1 / (1 + np.exp(-np.clip(rows @ weights, -BOUND, BOUND)))
    precision = precision + (rows * (probability * (1 - probability))[:, None]).T @ rows
    step = np.clip(np.linalg.solve(precision, rows.T @ (hits - probability)), -1, 1)
    weights = weights + step
    weights[LOGIT] = max(weights[LOGIT], 0.0)
    return weights, precision


@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_learning_is_a_newton_step(seed: int) -> None:
    random = np.random.default_rng(seed)
    features_BNF = features_of(draw_tree(random))
    known = random.random((BATCH, NODES)) < 0.6
    seen = Outcomes(jnp.asarray(known), jnp.asarray(known & (random.random((BATCH, NODES)) < 0.4)))
    root = random.normal(size=(len(FEATURES), len(FEATURES)))
    weights, precision = np.abs(random.normal(size=len(FEATURES))), 4 * np.eye(len(FEATURES)) + root @ root.T
    before = Calibration(jnp.asarray(weights, jnp.float32), jnp.asarray(precision, jnp.float32))
    after = learned(before, features_BNF, seen)
    rows = np.asarray(features_BNF, np.float64)[known]
    weights, precision = newton(
        np.float64(before.weights_F), np.float64(before.precision_FF), rows, np.asarray(seen.accepted_BN)[known]
    )
    np.testing.assert_allclose(after.weights_F, weights, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(after.precision_FF, precision, rtol=1e-4, atol=1e-3)


def test_the_probability_never_falls_with_the_drafters() -> None:
    """Observations to the contrary push the weight of the logit to 0, not below."""
    tree = draw_tree(np.random.default_rng(0))
    likely_BN = features_of(tree)[..., LOGIT] > -0.5
    seen = Outcomes(jnp.ones_like(likely_BN), ~likely_BN)
    calibration, least = Calibration.trusting(), []
    for _ in range(30):
        calibration = learned(calibration, features_of(tree), seen)
        least.append(float(calibration.weights_F[LOGIT]))
    assert min(least) == 0 and all(weight >= 0 for weight in least)


def test_unknown_edges_change_nothing() -> None:
    features_BNF = features_of(draw_tree(np.random.default_rng(1)))
    nothing = jnp.zeros((BATCH, NODES), bool)
    before = Calibration(jnp.array([0.3, 0.7, -0.2, 0.1, 0.05]), 3 * jnp.eye(len(FEATURES)))
    after = learned(before, features_BNF, Outcomes(nothing, nothing))
    np.testing.assert_array_equal(after.weights_F, before.weights_F)
    np.testing.assert_array_equal(after.precision_FF, before.precision_FF)
    # Known edges are learned from alike, whatever is claimed of the unknown ones, whose features may be anything.
    known = nothing.at[:, :4].set(True)
    seen = Outcomes(known, nothing.at[:, 1].set(True))
    odd = features_BNF.at[:, 4:].set(7.0)
    np.testing.assert_array_equal(
        learned(before, features_BNF, seen).weights_F,
        learned(before, odd, Outcomes(known, seen.accepted_BN)).weights_F,
    )


@cache
def taught(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was learned from 1500 trees whose edges follow a logistic model, the model, and further features."""
    random = np.random.default_rng(seed)
    truth_F = np.array([0.6, 0.5, -0.3, -0.8, 0.1])
    calibration = Calibration.trusting()
    for _ in range(1500):
        features_BNF = features_of(draw_tree(random))
        probability = 1 / (1 + np.exp(-np.asarray(features_BNF) @ truth_F))
        known = random.random(probability.shape) < 0.5
        hit = known & (random.random(probability.shape) < probability)
        calibration = learned(calibration, features_BNF, Outcomes(jnp.asarray(known), jnp.asarray(hit)))
    return np.asarray(calibration.weights_F), truth_F, np.asarray(features_of(draw_tree(random)))


def test_learning_converges_to_the_truth() -> None:
    found_F, truth_F, features_BNF = taught(0)
    np.testing.assert_allclose(found_F, truth_F, atol=0.15)
    said = np.exp(np.asarray(edge_log_probs(jnp.asarray(features_BNF), jnp.asarray(found_F))))
    np.testing.assert_allclose(said, 1 / (1 + np.exp(-features_BNF @ truth_F)), atol=0.04)
    taught.cache_clear()
    np.testing.assert_array_equal(taught(0)[0], found_F)


# ---------------------------------------------------------------------------------------------------------------------
# Labels


@jax.jit
def revealed(tree: CandidateTree, selection: Selection, wanted_BN1: jax.Array, finished_B: jax.Array) -> Outcomes:
    """A verification whose target wants token `wanted_BN1[b, i]` behind pool row i."""
    one_B = jnp.ones(BATCH, jnp.int32)
    verify = verify_tree(tree, selection, one_B, one_B, finished_B)
    drawn_BR = jnp.take_along_axis(wanted_BN1, verify.pool_rows_BR, axis=1)
    path = accept_path(verify, drawn_BR, SPEC.max_emitted)
    return outcomes(tree, path, verify.pool_rows_BR, verify.rows.live_BR[:, 0])


def test_outcomes_are_those_of_a_walk() -> None:
    """Wherever the accepted path passes, every candidate child is known, verified or not; nothing else is."""
    random = np.random.default_rng(7)
    unverified, deepest, none = 0, 0, 0
    for _ in range(150):
        tree = draw_tree(random)
        wanted = random.integers(0, VOCABULARY, (BATCH, NODES + 1))
        finished = random.random(BATCH) < 0.2
        nodes, counts = np.full((BATCH, SPEC.budget), NODES - 1), random.integers(0, SPEC.budget + 1, BATCH)
        parents, tokens = np.asarray(tree.parents_BN), np.asarray(tree.tokens_BN)
        for b in range(BATCH):
            chosen: list[int] = []
            while len(chosen) < counts[b]:
                ready = [n for n in range(NODES) if n not in chosen and parents[b, n] in (ROOT, *chosen)]
                chosen.append(int(random.choice(ready)))
            nodes[b, : counts[b]] = sorted(chosen)
        selection = Selection(jnp.asarray(nodes), jnp.asarray(counts, jnp.int32))
        seen = jax.device_get(revealed(tree, selection, jnp.asarray(wanted, jnp.int32), jnp.asarray(finished)))
        for b in range(BATCH):
            known, accepted, at = set(), set(), ROOT
            while not finished[b]:
                children = [n for n in range(NODES) if parents[b, n] == at]
                known |= set(children)
                hits = [n for n in children if tokens[b, n] == wanted[b, at + 1]]
                accepted |= set(hits)
                verified = [n for n in hits if n in nodes[b, : counts[b]]]
                unverified += len(hits) - len(verified)
                if not verified:
                    break
                at = verified[0]
            deepest = max(deepest, 0 if at == ROOT else DEPTHS[at])
            none += not known
            assert set(np.flatnonzero(seen.known_BN[b]).tolist()) == known
            assert set(np.flatnonzero(seen.accepted_BN[b]).tolist()) == accepted
    assert unverified > 20 and deepest == 3 and none > 20


def test_a_plain_verification_tells_of_the_first_level() -> None:
    """Nothing was verified but the root: the drawn token says which of its children was right."""
    tree = draw_tree(np.random.default_rng(2))
    one_B = jnp.ones(BATCH, jnp.int32)
    nothing = Selection(jnp.zeros((BATCH, 0), jnp.int32), 0 * one_B)
    verify = verify_tree(tree, nothing, one_B, one_B, jnp.zeros(BATCH, bool))
    drawn_BR = tree.tokens_BN[:, 1:2]
    path = accept_path(verify, drawn_BR, 1)
    seen = outcomes(tree, path, verify.pool_rows_BR, jnp.ones(BATCH, bool))
    expected = np.zeros((BATCH, NODES), bool)
    expected[:, :2] = True
    np.testing.assert_array_equal(seen.known_BN, expected)
    expected[:, 0] = False
    np.testing.assert_array_equal(seen.accepted_BN, expected)
