"""Every backend of the expert layer against a float64 loop, and the grouping of rows into blocks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax.kernels import ExpertWeights, grouped_experts
from ecospec_jax.kernels.grouped_experts.groups import expert_blocks

BACKENDS = ["reference", "xla"]
EXPERTS, HIDDEN, FFN = 8, 21, 146  # no size is a power of two but E


def make_weights(random: np.random.Generator, experts: int, hidden: int, ffn: int, dtype=jnp.float32) -> ExpertWeights:
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) * shape[-1] ** -0.5, dtype)  # noqa: E731
    return ExpertWeights(
        gate_EFD=draw(experts, ffn, hidden), up_EFD=draw(experts, ffn, hidden), down_EDF=draw(experts, hidden, ffn)
    )


def float64_loop(x_TD, ids_TK, weights_TK, experts: ExpertWeights) -> np.ndarray:
    """The definition, one pair at a time."""
    x_TD, weights_TK = np.asarray(x_TD, np.float64), np.asarray(weights_TK, np.float64)
    gate, up, down = (np.asarray(w, np.float64) for w in (experts.gate_EFD, experts.up_EFD, experts.down_EDF))
    y_TD = np.zeros_like(x_TD)
    for row, (ids, weights) in enumerate(zip(np.asarray(ids_TK), weights_TK, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < len(gate):
                g = gate[expert] @ x_TD[row]
                y_TD[row] += weight * (down[expert] @ (g / (1 + np.exp(-g)) * (up[expert] @ x_TD[row])))
    return y_TD


def poison(experts: ExpertWeights, used) -> ExpertWeights:
    """NaN in every weight of the experts that are not in `used`."""
    unused = jnp.asarray([expert not in set(used) for expert in range(experts.count)])[:, None, None]
    return jax.tree.map(lambda weight: jnp.where(unused, jnp.nan, weight), experts)


def assert_close(ours, reference, bound: float) -> None:
    ours = np.asarray(ours, np.float64)
    assert np.isfinite(ours).all()
    assert np.abs(ours - reference).max() <= bound * max(np.abs(reference).max(), 1e-30)
    np.testing.assert_array_equal(ours[~reference.any(axis=1)], 0)


@pytest.mark.parametrize("backend", BACKENDS)
class TestBackend:
    """What each backend must do; a new one joins `BACKENDS`."""

    @pytest.fixture
    def apply(self, backend):
        return jax.jit(functools.partial(grouped_experts, backend=backend))

    def test_every_pattern_of_used_experts(self, apply) -> None:
        """All subsets of the experts, the empty one included; the others' weights are NaN."""
        random = np.random.default_rng(0)
        experts = make_weights(random, EXPERTS, HIDDEN, FFN)
        for bits in itertools.product([False, True], repeat=EXPERTS):
            used = np.flatnonzero(bits)
            pool = used if len(used) else [EXPERTS]
            ids_TK = random.permutation(np.resize(pool, 5 * 3)).reshape(5, 3)
            x_TD, weights_TK = random.normal(size=(5, HIDDEN)), random.random((5, 3))
            arguments = jnp.float32(x_TD), jnp.int32(ids_TK), jnp.float32(weights_TK)
            y_TD = apply(*arguments, poison(experts, used))
            assert_close(y_TD, float64_loop(*arguments, experts), 2e-6)

    @pytest.mark.parametrize("rows", [1, 2, 5, 9, 16, 33, 130])
    @pytest.mark.parametrize("k", [1, 3, 8])
    @pytest.mark.parametrize("stored", ["float32", "bfloat16"])
    def test_sizes(self, apply, rows: int, k: int, stored: str) -> None:
        """Odd sizes; duplicate ids add up; ids out of range and rows without any valid id are skipped."""
        random = np.random.default_rng(rows * 10 + k)
        experts = make_weights(random, EXPERTS, HIDDEN, FFN, stored)
        ids_TK = random.choice([-1, 0, 1, 3, 4, 6, 7, EXPERTS, EXPERTS + 5], (rows, k))  # never 2 or 5
        ids_TK[rows // 2] = [-1, EXPERTS, EXPERTS + 5][k % 3]
        x_TD, weights_TK = random.normal(size=(rows, HIDDEN)), random.random((rows, k)) + 0.1
        arguments = jnp.float32(x_TD), jnp.int32(ids_TK), jnp.float32(weights_TK)
        y_TD = apply(*arguments, poison(experts, set(ids_TK.ravel())))
        assert_close(y_TD, float64_loop(*arguments, experts), 2e-6)

    def test_bfloat16_rows(self, apply) -> None:
        """The output has the dtype of the rows."""
        random = np.random.default_rng(4)
        experts = make_weights(random, EXPERTS, HIDDEN, FFN, jnp.bfloat16)
        x_TD, weights_TK = (jnp.asarray(random.random(shape), jnp.bfloat16) for shape in ((9, HIDDEN), (9, 3)))
        ids_TK = random.integers(0, EXPERTS, (9, 3))
        y_TD = apply(x_TD, jnp.int32(ids_TK), weights_TK, experts)
        assert y_TD.dtype == jnp.bfloat16
        assert_close(y_TD, float64_loop(x_TD, ids_TK, weights_TK, experts), 2e-2)

    def test_one_expert_many_times_in_a_row(self, apply) -> None:
        random = np.random.default_rng(3)
        experts = make_weights(random, EXPERTS, HIDDEN, FFN)
        ids_TK = np.full((40, 3), 6)
        x_TD, weights_TK = jnp.float32(random.normal(size=(40, HIDDEN))), jnp.float32(random.random((40, 3)))
        y_TD = apply(x_TD, jnp.int32(ids_TK), weights_TK, poison(experts, [6]))
        assert_close(y_TD, float64_loop(x_TD, ids_TK, weights_TK, experts), 2e-6)


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_copies_no_expert_weights(dtype: str, rows: int) -> None:
    """Temporaries stay far below the experts' bytes: nothing is widened, transposed or gathered outside the loop."""
    hidden, ffn, count, k = 256, 96, 64, 4
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    experts = ExpertWeights(shape(count, ffn, hidden), shape(count, ffn, hidden), shape(count, hidden, ffn))
    compiled = (
        jax.jit(functools.partial(grouped_experts, backend="xla"))
        .lower(shape(rows, hidden), jax.ShapeDtypeStruct((rows, k), jnp.int32), shape(rows, k), experts)
        .compile()
    )
    weight_bytes = 3 * count * ffn * hidden * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < weight_bytes / 10


# (rows, k, experts): one block or several for an expert, fewer and more pairs than experts.
GROUPINGS = [(1, 1, 1), (1, 4, 7), (5, 3, 11), (6, 8, 5), (33, 1, 7), (40, 2, 3), (60, 3, 97), (130, 3, 13)]
grouped = jax.jit(expert_blocks, static_argnums=2)


def check_blocks(ids_TK: np.ndarray, weights_TK: np.ndarray, experts: int) -> None:
    """Every valid pair in exactly one place, in as few single-expert blocks as their size allows."""
    rows = len(ids_TK)
    blocks = jax.tree.map(np.asarray, grouped(ids_TK, weights_TK, experts))
    count, size = int(blocks.count), blocks.rows_NM.shape[1]
    assert 1 <= size <= rows and count <= len(blocks.expert_N)

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


@pytest.mark.parametrize(("rows", "k", "experts"), GROUPINGS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_expert_blocks(rows: int, k: int, experts: int, data) -> None:
    pool = data.draw(st.lists(st.integers(-2, experts + 2), min_size=1, max_size=12))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check_blocks(random.choice(pool, (rows, k)).astype(np.int32), random.random((rows, k)).astype(np.float32), experts)


@pytest.mark.parametrize(("rows", "k", "experts"), GROUPINGS)
def test_as_many_expert_blocks_as_possible(rows: int, k: int, experts: int) -> None:
    """Each expert but the last has one row; then the others."""
    ids_P = np.minimum(np.arange(rows * k, dtype=np.int32), experts - 1)
    check_blocks(ids_P.reshape(rows, k), np.ones((rows, k), np.float32), experts)
