"""Policies choose prefix-closed sets of the right size."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.config import SpecConfig
from ecospec_jax.selection import likelihood
from ecospec_jax.tree import ROOT, CandidateTree, build_tree
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]

SPEC, BATCH = SpecConfig(depth=3, branch=3, budget=0), 8
# Certain tokens, negative zeros, equal steps whose sums tie, impossible tokens, a broken drafter.
EDGES = [0.0, -0.0, -0.25, -0.5, -1.0, -1e-30, -40.0, -np.inf, np.nan]


@partial(jax.jit, static_argnums=1)
def choose(tree: CandidateTree, budget: int) -> tuple[jax.Array, jax.Array]:
    selection = likelihood(tree, None, replace(SPEC, budget=budget))
    return selection.nodes_BM, selection.count_B


def random_tree(random: np.random.Generator) -> CandidateTree:
    """Pools in which any two to three nodes of a level were expanded."""
    k, pool = SPEC.branch, SPEC.pool_size
    parents, scores = np.full((BATCH, pool), ROOT), np.zeros((BATCH, pool), np.float32)
    edges = random.choice(random.choice(EDGES, 4), (BATCH, pool)).astype(np.float32)
    for b in range(BATCH):
        parents[b, k : k + k * k] = np.repeat(random.permutation(k), k)
        parents[b, k + k * k :] = np.repeat(k + random.permutation(k * k)[:k], k)
        for node in range(pool):
            above = np.float32(0) if parents[b, node] == ROOT else scores[b, parents[b, node]]
            scores[b, node] = above + edges[b, node]
    depths = np.repeat([1, 2, 3], [k, k * k, k * k])
    return jax.jit(build_tree)(np.zeros((BATCH, pool), np.int32), parents, depths, scores)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), budget=st.sampled_from([0, 1, 2, 4, 7, 20, 21]))
def test_likelihood_takes_the_likeliest_and_is_prefix_closed(seed: int, budget: int) -> None:
    tree = random_tree(np.random.default_rng(seed))
    nodes_BM, count_B = jax.tree.map(np.asarray, choose(tree, budget))
    assert nodes_BM.shape == (BATCH, budget) and (count_B == budget).all()
    parents, scores = np.asarray(tree.parents_BN), np.asarray(tree.log_probs_BN)
    for nodes, parent, score in zip(nodes_BM.tolist(), parents, scores, strict=True):
        assert nodes == sorted(set(nodes))
        assert all(parent[node] == ROOT or parent[node] in nodes for node in nodes)
        best = sorted(range(SPEC.pool_size), key=lambda node: (-score[node], node))[:budget]
        assert nodes == sorted(best)


@pytest.mark.parametrize("budget", range(5))
def test_a_certain_chain_is_taken_from_the_top(budget: int) -> None:
    """All log-probabilities 0: ties go to the shallower node."""
    row = jnp.arange(4)[None]
    tree = build_tree(row, row - 1, jnp.arange(4) + 1, jnp.zeros((1, 4)))
    assert choose(tree, budget)[0].tolist() == [list(range(budget))]
