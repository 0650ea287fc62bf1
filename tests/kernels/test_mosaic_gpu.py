"""What is special about the Mosaic GPU backend; `test_grouped_experts.py` has what all backends must do.

Kernels run in the interpreter, in which multiplication, loads of vectors and the unpacking of mxfp4 are plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Swiglu
from ecospec_jax.kernels.grouped_experts import mosaic_gpu
from tests.kernels.expert_cases import E2M1, assert_close, definition, poison, random_experts

BOUND = 1e-2  # rows are bfloat16 before, between and after the projections


@functools.cache
def compiled(activation: Swiglu | ClampedSwiglu):
    return jax.jit(lambda *args: mosaic_gpu.grouped_experts(*args, activation, interpret=True))


def check(
    experts: ExpertWeights, ids_TK: np.ndarray, activation: Swiglu | ClampedSwiglu, dtype: str = "bfloat16"
) -> np.ndarray:
    """Compares with the definition, with NaN in all unused experts."""
    random = np.random.default_rng(0)
    x_TD = random.normal(size=(len(ids_TK), experts.hidden)).astype(jnp.dtype(dtype))
    weights_TK = random.random(ids_TK.shape).astype(np.float32) + 0.1
    poisoned = poison(experts, set(ids_TK.ravel().tolist()))
    y_TD = compiled(activation)(x_TD, ids_TK, weights_TK, poisoned)
    assert y_TD.dtype == x_TD.dtype
    assert_close(y_TD, definition(x_TD, ids_TK, weights_TK, experts, activation), BOUND)
    return np.asarray(y_TD)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("storage", "hidden", "ffn"),
    [
        ("bfloat16", 192, 64),
        ("fp8", 192, 128),  # steps of 64 inputs, then of 128; the last scale of 192 inputs covers 64
        ("fp8", 256, 192),
        ("mxfp4", 192, 320),  # steps of 192 inputs, then of 64
    ],
)
def test_storages_and_sizes(storage: str, hidden: int, ffn: int, split: bool) -> None:
    experts = random_experts(
        np.random.default_rng(1), storage, hidden, ffn, experts=5, split=split, biases=not split, layers=3
    )
    ids_TK = np.array([[0, 3, -1], [4, 4, 7], [-1, 9, 5], [3, 1, 0]], np.int32)
    activation = Swiglu() if split else ClampedSwiglu(limit=1.25)
    y_TD = check(experts, ids_TK, activation)
    np.testing.assert_array_equal(y_TD[2], 0)


def test_more_rows_than_a_block_has_places() -> None:
    experts = random_experts(np.random.default_rng(2), "bfloat16", 64, 128, experts=3)
    ids_TK = np.where(np.arange(70)[:, None] < 66, [[1, 2]], [[2, -1]]).astype(np.int32)
    check(experts, ids_TK, Swiglu(), "float32")


@pytest.mark.parametrize("storage", ["bfloat16", "fp8", "mxfp4"])
def test_no_expert_at_all(storage: str) -> None:
    """All weights are NaN, and none is read."""
    experts = random_experts(np.random.default_rng(3), storage, 64, 128, experts=4, biases=True)
    ids_TK = np.array([[-1, 4], [7, -9]], np.int32)
    y_TD = compiled(Swiglu())(np.ones((2, 64), np.float32), ids_TK, np.ones((2, 2), np.float32), poison(experts, ()))
    np.testing.assert_array_equal(y_TD, np.zeros((2, 64)))


@pytest.mark.parametrize(("rows", "k"), [(0, 2), (3, 0)])
def test_nothing_to_do(rows: int, k: int) -> None:
    experts = random_experts(np.random.default_rng(4), "bfloat16", 64, 128, experts=2)
    x_TD, ids_TK = jnp.ones((rows, 64)), jnp.zeros((rows, k), jnp.int32)
    y_TD = mosaic_gpu.grouped_experts(x_TD, ids_TK, jnp.ones((rows, k)), experts, Swiglu(), interpret=True)
    np.testing.assert_array_equal(y_TD, np.zeros((rows, 64)))


@pytest.mark.parametrize(
    ("storage", "hidden", "ffn", "message"),
    [
        ("bfloat16", 96, 64, "hidden must be a multiple of 64, got 96"),
        ("mxfp4", 64, 160, "expert width must be a multiple of 64, got 160"),
        ("float32", 64, 64, "does not support experts stored as float32"),
    ],
)
def test_refusals(storage: str, hidden: int, ffn: int, message: str) -> None:
    experts = random_experts(np.random.default_rng(5), storage, hidden, ffn, experts=2)
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.grouped_experts(jnp.ones((1, hidden)), jnp.zeros((1, 1), int), jnp.ones((1, 1)), experts, Swiglu())


def test_pairs_of_codes() -> None:
    """The unpacking that GPUs do: integer arithmetic on words, then a product with 2^126, gives the table."""
    words = np.random.default_rng(6).integers(0, 2**32, 1000).astype(np.uint32)
    table = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    for nibble in range(4):
        numbers = mosaic_gpu._pair(words, nibble).astype(np.uint32).view(ml_dtypes.bfloat16).astype(np.float32)
        codes = np.stack([words >> 4 * nibble & 15, words >> 4 * nibble + 16 & 15], axis=-1)
        np.testing.assert_array_equal(numbers.reshape(-1, 2) * np.float32(2.0**126), table[codes])


@pytest.mark.parametrize("storage", ["bfloat16", "fp8", "mxfp4"])
@pytest.mark.parametrize("split", [True, False])
def test_lowers_for_cuda(storage: str, split: bool) -> None:
    """Without a GPU: layouts are inferred, the copy engine's limits hold."""
    experts = random_experts(np.random.default_rng(7), storage, 192, 320, experts=2, split=split, biases=True, layers=2)
    args = jnp.ones((5, 192), jnp.bfloat16), jnp.zeros((5, 2), jnp.int32), jnp.ones((5, 2)), experts
    traced = jax.jit(lambda *args: mosaic_gpu.grouped_experts(*args, ClampedSwiglu())).trace(*args)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 2
