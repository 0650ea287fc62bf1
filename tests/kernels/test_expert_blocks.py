"""Grouping of (row, expert) pairs into blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.kernels.grouped_experts.groups import ExpertBlocks, expert_blocks
from tests.tiny import quick_compilation  # noqa: F401

# (rows, k, experts, size): one block or several for an expert, fewer and more pairs than experts, uneven sizes.
GROUPINGS = [
    (1, 1, 1, 1),
    (1, 4, 7, 2),
    (5, 3, 11, 1),
    (6, 8, 5, 4),
    (33, 1, 7, 64),
    (40, 2, 3, 16),
    (60, 3, 97, 5),
    (130, 3, 13, 128),
]
grouped = jax.jit(expert_blocks, static_argnums=(2, 3))


def check_blocks(ids_TK: np.ndarray, weights_TK: np.ndarray, experts: int, size: int) -> ExpertBlocks:
    """Every valid pair in exactly one place, in as few single-expert blocks as their size allows."""
    rows = len(ids_TK)
    blocks = jax.tree.map(np.asarray, grouped(ids_TK, weights_TK, experts, size))
    count = int(blocks.count)
    assert blocks.rows_NM.shape == blocks.weights_NM.shape == (len(blocks.expert_N), size)
    assert count <= len(blocks.expert_N)

    placed = []
    for expert, block_rows, block_weights in zip(blocks.expert_N, blocks.rows_NM, blocks.weights_NM, strict=True):
        assert (block_weights[block_rows == rows] == 0).all()
        pairs = zip(block_rows, block_weights, strict=True)
        placed.append([(int(row), int(expert), float(weight)) for row, weight in pairs if row != rows])
    assert all(placed[:count]) and not any(placed[count:])

    valid = (ids_TK >= 0) & (ids_TK < experts)
    pairs = [(row, int(ids_TK[row, j]), float(weights_TK[row, j])) for row, j in np.argwhere(valid)]
    assert sorted(itertools.chain.from_iterable(placed)) == sorted(pairs)
    load_E = np.bincount(ids_TK[valid], minlength=experts)
    assert count == sum(-(-load // size) for load in load_E)

    # A kernel that walks all blocks fetches no expert twice, and none for the unused blocks.
    assert (np.diff(blocks.expert_N) >= 0).all()
    np.testing.assert_array_equal(blocks.expert_N[count:], blocks.expert_N[count - 1] if count else 0)
    return blocks


@pytest.mark.parametrize(("rows", "k", "experts", "size"), GROUPINGS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_expert_blocks(rows: int, k: int, experts: int, size: int, data: st.DataObject) -> None:
    pool = data.draw(st.lists(st.integers(-2, experts + 2), min_size=1, max_size=12))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    ids_TK = random.choice(pool, (rows, k)).astype(np.int32)
    check_blocks(ids_TK, random.random((rows, k)).astype(np.float32), experts, size)


@pytest.mark.parametrize(("rows", "k", "experts", "size"), GROUPINGS)
def test_as_many_expert_blocks_as_possible(rows: int, k: int, experts: int, size: int) -> None:
    """Each expert but the last has one row; then the others."""
    ids_P = np.minimum(np.arange(rows * k, dtype=np.int32), experts - 1)
    check_blocks(ids_P.reshape(rows, k), np.ones((rows, k), np.float32), experts, size)


@pytest.mark.parametrize(("rows", "k", "experts", "size"), GROUPINGS)
def test_no_valid_id(rows: int, k: int, experts: int, size: int) -> None:
    ids_TK = np.where(np.arange(rows * k) % 2, -1, experts).reshape(rows, k).astype(np.int32)
    blocks = check_blocks(ids_TK, np.ones((rows, k), np.float32), experts, size)
    assert blocks.count == 0


@pytest.mark.parametrize(("rows", "k", "experts", "size"), GROUPINGS)
def test_gather_and_combine(rows: int, k: int, experts: int, size: int) -> None:
    """Out and back again with NaN in empty places; rows without a valid id come back as zero."""
    random = np.random.default_rng(rows)
    ids_TK = random.integers(-1, experts + 1, (rows, k)).astype(np.int32)
    ids_TK[rows // 2] = -1
    weights_TK, x_TD = random.random((rows, k)).astype(np.float32), random.normal(size=(rows, 3)).astype(np.float32)
    blocks = grouped(ids_TK, weights_TK, experts, size)
    gathered_NMD = blocks.gather(jnp.asarray(x_TD))
    empty_NM = np.asarray(blocks.rows_NM) == rows
    np.testing.assert_array_equal(np.asarray(gathered_NMD)[empty_NM], 0)
    factor_N = 1.0 + np.asarray(blocks.expert_N)
    y_NMD = np.where(empty_NM[..., None], np.nan, np.asarray(gathered_NMD) * factor_N[:, None, None])
    y_TD = blocks.combine(jnp.asarray(y_NMD), rows)
    valid = (ids_TK >= 0) & (ids_TK < experts)
    expected_TD = np.sum(np.where(valid, weights_TK * (1.0 + ids_TK), 0), axis=1)[:, None] * x_TD
    np.testing.assert_allclose(y_TD, expected_TD, rtol=1e-6, atol=1e-6 * np.abs(expected_TD).max())
    assert not np.asarray(y_TD)[rows // 2].any()


def test_combine_adds_in_float32() -> None:
    """256 ones in bfloat16, which stops at 256 if added in bfloat16."""
    blocks = grouped(jnp.zeros((1, 300), jnp.int32), jnp.ones((1, 300)), 1, 7)
    y_TD = blocks.combine(jnp.ones((*blocks.rows_NM.shape, 2), jnp.bfloat16), 1)
    assert y_TD.dtype == jnp.float32
    np.testing.assert_array_equal(y_TD, [[300, 300]])
