"""Candidate trees against an independent beam expansion, verify trees against their definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.cache import KVCache, Rows, write_rows
from ecospec_jax.config import SpecConfig
from ecospec_jax.models.eagle3 import Eagle3
from ecospec_jax.tree import ROOT, CandidateTree, Selection, build_tree, empty_tree, expand_tree, verify_tree
from tests import tiny
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]

CONTEXTS, VOCAB, BATCH, CAPACITY = 97, 11, 24, 40


def depths_of(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def ancestors_of(parents: Sequence[int], node: int) -> list[int]:
    """The node and its ancestors."""
    path = [node]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path


# ---------------------------------------------------------------------------------------------------------------------
# The candidate tree


class TableDrafter:
    """A drafter whose state is a context number and whose proposals are rows of a table.

    A drafted token's context comes from the tokens it can *see* (its cache holds token ids), its position and its
    parent's context, so a wrong mask, slot, position or parent leads to other proposals.
    """

    boundaries = ()

    def __init__(self, table_BCV: jax.Array, branch: int) -> None:
        self.table_BCV, self.branch = table_BCV, branch

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        # What is not written yet looks like a token too.
        return KVCache([jnp.full((batch, 1, capacity, 1), 7.0)], [])

    def catch_up(self, rows: Rows, features_BRF: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        raise NotImplementedError

    def extend(self, rows: Rows, state_BRH: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        tokens = rows.tokens_BR.astype(jnp.float32)[:, None, :, None]
        buffer = write_rows(cache.keys[0], tokens, rows.context_B + rows.offset)
        depth_BS = (jnp.arange(CAPACITY) - rows.context_B[:, None]) // self.branch + 1
        weight_BS = jnp.where(depth_BS > 0, 3 ** jnp.maximum(depth_BS, 0), 1)
        seen_BRS = rows.visible_BRS(CAPACITY) * ((buffer[:, 0, :, 0].astype(jnp.int32) + 1) * weight_BS)[:, None]
        context_BR = jnp.sum(seen_BRS, axis=2) + 5 * state_BRH[..., 1].astype(jnp.int32) + rows.positions_BR
        sequence_BR = state_BRH[..., 0].astype(jnp.int32)
        state = jnp.stack([sequence_BR, context_BR % CONTEXTS], axis=-1).astype(jnp.float32)
        return state, KVCache([buffer], [])

    def propose(self, state: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        log_probs, tokens = jax.lax.top_k(
            self.table_BCV[state[..., 0].astype(jnp.int32), state[..., 1].astype(jnp.int32)], k
        )
        return tokens, log_probs


@dataclass
class Node:
    token: int
    parent: int
    score: np.float32
    context: int = -1


def beam(table_CV: np.ndarray, root_context: int, committed: Sequence[int], spec: SpecConfig) -> list[Node]:
    """The pool of one sequence, written from the definition."""

    def children(context: int, parent: int, score: np.float32) -> list[Node]:
        order = np.argsort(-table_CV[context], kind="stable")[: spec.branch]
        return [Node(int(token), parent, np.float32(score + table_CV[context, token])) for token in order]

    pool = children(root_context, ROOT, np.float32(0))
    level = list(range(len(pool)))
    for depth in range(1, spec.depth):
        ranked = sorted(level, key=lambda index: (-pool[index].score, index))[: spec.branch]
        first = len(pool)
        for index in ranked:
            node = pool[index]
            path = [pool[i].token for i in reversed(ancestors_of([n.parent for n in pool], index))]
            seen = sum(token + 1 for token in committed) + sum((t + 1) * 3**d for d, t in enumerate(path, start=1))
            before = root_context if node.parent == ROOT else pool[node.parent].context
            node.context = (seen + 5 * before + len(committed) - 1 + depth) % CONTEXTS
            pool += children(node.context, index, node.score)
        level = list(range(first, len(pool)))
    return pool


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("depth", "branch"), [(1, 1), (1, 3), (2, 2), (3, 2), (3, 3), (5, 1), (4, 4)])
def test_expansion_equals_an_independent_beam(depth: int, branch: int, ties: bool) -> None:
    random = np.random.default_rng(depth * 10 + branch)
    logits = random.normal(size=(BATCH, CONTEXTS, VOCAB)) * 2
    table = np.asarray(jax.nn.log_softmax(logits.round() if ties else logits, axis=-1), np.float32)
    if ties:
        table = (table * 2).round() / 2  # sums of halves are exact, so scores tie too
    spec = SpecConfig(depth, branch, budget=0)
    lengths = random.integers(1, CAPACITY - depth * branch, BATCH)
    committed = random.integers(0, VOCAB, (BATCH, CAPACITY))
    roots = random.integers(0, CONTEXTS, BATCH)

    @jax.jit
    def expand(table: jax.Array, committed: jax.Array, roots: jax.Array, lengths: jax.Array) -> CandidateTree:
        drafter = TableDrafter(table, branch)
        cache = drafter.empty_cache(BATCH, CAPACITY)
        kept = jnp.where(jnp.arange(CAPACITY) < lengths[:, None], committed, 7).astype(jnp.float32)
        cache = KVCache([kept[:, None, :, None]], [])
        state = jnp.stack([jnp.arange(BATCH), roots], axis=-1).astype(jnp.float32)
        return expand_tree(drafter, cache, state, lengths, jnp.ones(BATCH, bool), spec)[0]

    tree = jax.tree.map(np.asarray, expand(table, committed, roots, lengths))
    assert tree.tokens_BN.shape == (BATCH, spec.pool_size) == (BATCH, branch + (depth - 1) * branch**2)
    for b in range(BATCH):
        pool = beam(table[b], int(roots[b]), committed[b, : lengths[b]].tolist(), spec)
        parents = [node.parent for node in pool]
        assert tree.tokens_BN[b].tolist() == [node.token for node in pool]
        assert tree.parents_BN[b].tolist() == parents
        assert tree.depths_N.tolist() == depths_of(parents)
        np.testing.assert_array_equal(tree.log_probs_BN[b], [node.score for node in pool])
        for node in range(len(pool)):
            assert np.flatnonzero(tree.ancestors_BNN[b, node]).tolist() == sorted(ancestors_of(parents, node))
    if depth > 2 and branch > 1:  # not always the first child is expanded, and both children of one node are
        assert len({tuple(row) for row in tree.parents_BN.tolist()}) >= 3


def test_scores_of_an_eagle_tree_equal_chains() -> None:
    """Each node's cumulative log-probability equals that of its path drafted alone, one token after the other."""
    drafter, spec, length = tiny.make_drafter(), SpecConfig(depth=4, branch=2, budget=0), 9
    random = np.random.default_rng(0)
    prefix = random.integers(0, drafter.config.vocab_size, length)
    features = random.normal(size=(length, len(drafter.boundaries) * drafter.config.target_hidden_size))
    graph, state = nnx.split(drafter)

    def caught_up(drafter: Eagle3, batch: int) -> tuple[jax.Array, KVCache]:
        spread = lambda value: jnp.broadcast_to(jnp.asarray(value), (batch, *np.shape(value)))  # noqa: E731
        rows = Rows(
            tokens_BR=spread(prefix),
            positions_BR=spread(np.arange(length)),
            live_BR=jnp.ones((batch, length), bool),
            context_B=jnp.zeros(batch, jnp.int32),
            mask_BRW=spread(np.tri(length, dtype=bool)),
        )
        states, cache = drafter.catch_up(rows, spread(features.astype(np.float32)), drafter.empty_cache(batch, 32))
        return states[:, -1], cache

    @jax.jit
    def expand(state: nnx.State) -> CandidateTree:
        drafter = nnx.merge(graph, state)
        root, cache = caught_up(drafter, 1)
        return expand_tree(drafter, cache, root, jnp.array([length]), jnp.array([True]), spec)[0]

    @jax.jit
    def chain(state: nnx.State, tokens_BD: jax.Array) -> jax.Array:
        """Log-probability of each token of the paths."""
        drafter = nnx.merge(graph, state)
        batch = tokens_BD.shape[0]
        hidden, cache = caught_up(drafter, batch)
        scores = []
        for depth in range(spec.depth):
            ids, log_probs = drafter.propose(hidden, drafter.config.draft_vocab_size)
            scores.append(jnp.sum(jnp.where(ids == tokens_BD[:, depth, None], log_probs, 0), axis=1))
            rows = Rows(
                tokens_BR=tokens_BD[:, depth, None],
                positions_BR=jnp.full((batch, 1), length + depth),
                live_BR=jnp.ones((batch, 1), bool),
                context_B=jnp.full(batch, length + depth),
                mask_BRW=jnp.ones((batch, 1, 1), bool),
            )
            states, cache = drafter.extend(rows, hidden[:, None], cache)
            hidden = states[:, 0]
        return jnp.stack(scores, axis=1)

    tree = jax.tree.map(np.asarray, expand(state))
    parents = tree.parents_BN[0].tolist()
    paths = [ancestors_of(parents, node)[::-1] for node in range(spec.pool_size)]
    tokens = np.zeros((spec.pool_size, spec.depth), np.int32)
    for row, path in zip(tokens, paths, strict=True):
        row[: len(path)] = tree.tokens_BN[0, path]
    scores = np.asarray(chain(state, jnp.asarray(tokens)))
    expected = [row[: len(path)].sum() for row, path in zip(scores, paths, strict=True)]
    np.testing.assert_allclose(tree.log_probs_BN[0], expected, atol=1e-5)
    assert np.isin(tree.tokens_BN, drafter.target_ids[...]).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_ancestors_in_any_tree(data: st.DataObject) -> None:
    """Chains and stars included."""
    nodes = 13
    reach = data.draw(st.sampled_from([1, 3, nodes]))
    parents = [data.draw(st.integers(max(ROOT, node - reach), node - 1)) for node in range(nodes)]
    row = jnp.array([parents], jnp.int32)
    tree = jax.jit(build_tree)(row, row, jnp.array(depths_of(parents)), jnp.zeros((1, nodes)))
    for node in range(nodes):
        assert np.flatnonzero(tree.ancestors_BNN[0, node]).tolist() == sorted(ancestors_of(parents, node))


def test_nan_counts_as_impossible() -> None:
    """Policies compare log-probabilities, so a drafter's NaN must not reach them."""
    row = jnp.array([[0, 1]])
    tree = build_tree(row, jnp.array([[ROOT, 0]]), jnp.array([1, 2]), jnp.array([[-1.0, jnp.nan]]))
    assert tree.log_probs_BN.tolist() == [[-1.0, -np.inf]]


# ---------------------------------------------------------------------------------------------------------------------
# The verify tree


@jax.jit
def laid_out(tokens, parents, depths, nodes, count, root, length, finished):
    tree = build_tree(tokens, parents, depths, jnp.zeros(tokens.shape))
    return verify_tree(tree, Selection(nodes, count), root, length, finished)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_verify_tree_from_its_definition(data: st.DataObject) -> None:
    """Random trees of one layout, closed selections of any size within the budget, anything in the unused slots."""
    spec = SpecConfig(depth=3, branch=2, budget=5)
    batch, pool, budget = 4, spec.pool_size, spec.budget
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    expanded = [(random.permutation(2), 2 + random.permutation(4)[:2]) for _ in range(batch)]
    parents = np.array([[ROOT] * 2 + np.repeat(np.concatenate(both), 2).tolist() for both in expanded])
    depths = np.array(depths_of(parents[0].tolist()))
    tokens = random.integers(0, 50, (batch, pool))
    chosen: list[list[int]] = []
    for row in parents.tolist():
        closed: list[int] = []
        for _ in range(data.draw(st.integers(0, budget))):
            allowed = [n for n in range(pool) if n not in closed and (row[n] == ROOT or row[n] in closed)]
            closed.append(int(random.choice(allowed)))
        chosen.append(sorted(closed))
    nodes = random.integers(0, pool, (batch, budget))
    for row, closed in zip(nodes, chosen, strict=True):
        row[: len(closed)] = closed
    root, length = random.integers(0, 50, batch), random.integers(1, 30, batch)
    finished = random.random(batch) < 0.2

    result = laid_out(tokens, parents, depths, nodes, np.array([len(c) for c in chosen]), root, length, finished)
    rows, parent_rows = jax.tree.map(np.asarray, result.rows), np.asarray(result.parent_rows_BR)
    assert rows.offset == 0
    np.testing.assert_array_equal(rows.context_B, length)
    for b, closed in enumerate(chosen):
        live = len(closed) + 1
        assert rows.live_BR[b].tolist() == [not finished[b]] * live + [False] * (budget + 1 - live)
        assert rows.tokens_BR[b, :live].tolist() == [root[b], *tokens[b, closed]]
        assert rows.positions_BR[b, :live].tolist() == [length[b], *(length[b] + depths[closed])]
        place = {ROOT: 0} | {node: 1 + slot for slot, node in enumerate(closed)}
        assert parent_rows[b, :live].tolist() == [0, *(place[parents[b, node]] for node in closed)]
        for row, node in enumerate([ROOT, *closed]):
            path = [] if node == ROOT else ancestors_of(parents[b].tolist(), node)
            assert np.flatnonzero(rows.mask_BRW[b, row]).tolist() == sorted([0, *(place[n] for n in path)])
        for row in range(live, budget + 1):  # sees something, or its softmax would be NaN; never another unused slot
            assert np.flatnonzero(rows.mask_BRW[b, row]).tolist() == [0, row]


def test_parent_rows_where_siblings_are_skipped() -> None:
    """Pool 0 1 | 2 3 (of 0) 4 5 (of 1); nodes 1, 4, 5 chosen: the second sibling is row 1 and the others hang on it."""
    one = lambda *values: jnp.array([values])  # noqa: E731
    tree = build_tree(
        one(10, 11, 12, 13, 14, 15), one(-1, -1, 0, 0, 1, 1), jnp.array([1, 1, 2, 2, 2, 2]), jnp.zeros((1, 6))
    )
    result = verify_tree(
        tree, Selection(one(1, 4, 5), jnp.array([3])), jnp.array([9]), jnp.array([20]), jnp.array([False])
    )
    assert result.rows.tokens_BR.tolist() == [[9, 11, 14, 15]]
    assert result.parent_rows_BR.tolist() == [[0, 0, 1, 1]]
    assert result.rows.positions_BR.tolist() == [[20, 21, 22, 22]]
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert result.rows.mask_BRW[0].astype(int).tolist() == expected


@pytest.mark.parametrize("finished", [False, True])
def test_the_root_alone(finished: bool) -> None:
    """Plain decoding verifies an empty tree."""
    nothing = Selection(jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32))
    result = verify_tree(empty_tree(2), nothing, jnp.array([4, 5]), jnp.array([8, 3]), jnp.array([finished, False]))
    assert result.rows.tokens_BR.tolist() == [[4], [5]]
    assert result.rows.positions_BR.tolist() == [[8], [3]]
    assert result.rows.live_BR.tolist() == [[not finished], [True]]
    assert result.rows.mask_BRW.tolist() == [[[True]], [[True]]]
    assert result.parent_rows_BR.tolist() == [[0], [0]]
