"""What is special about the Triton backend; `test_grouped_experts.py` has what all backends must do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Fp8, Swiglu
from ecospec_jax.kernels.grouped_experts import triton
from tests.kernels.expert_cases import STORAGES, assert_close, definition, poison, random_experts

SWIGLU = Swiglu()


def check(
    experts: ExpertWeights,
    ids_TK: np.ndarray,
    activation: Swiglu | ClampedSwiglu = SWIGLU,
    dtype: str = "float32",
    bound: float = 2e-6,
) -> np.ndarray:
    """Compares with the definition, with NaN in all unused experts."""
    random = np.random.default_rng(0)
    x_TD = random.normal(size=(len(ids_TK), experts.hidden)).astype(jnp.dtype(dtype))
    weights_TK = random.random(ids_TK.shape).astype(np.float32) + 0.1
    call = jax.jit(lambda *args: triton.grouped_experts(*args, activation, interpret=True))
    y_TD = call(x_TD, ids_TK, weights_TK, poison(experts, set(ids_TK.ravel().tolist())))
    assert_close(y_TD, definition(x_TD, ids_TK, weights_TK, experts, activation), bound)
    return np.asarray(y_TD)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("split", "dtype", "bound"), [(True, "float32", 2e-6), (False, "bfloat16", 1e-2)])
def test_several_tiles(storage: str, split: bool, dtype: str, bound: float) -> None:
    """Of inputs and of outputs, the last of them ragged; bfloat16 has other tiles."""
    experts = random_experts(np.random.default_rng(1), storage, 160, 96, experts=4, split=split, biases=True, layers=2)
    ids_TK = np.array([[0, 3, -1], [3, 3, 7], [-1, 9, 4]], np.int32)
    check(experts, ids_TK, ClampedSwiglu(limit=1.25), dtype, bound)


@pytest.mark.parametrize("storage", ["float32", "mxfp4"])
def test_more_rows_than_a_block(storage: str) -> None:
    """An expert has several blocks; unused blocks hold anything."""
    experts = random_experts(np.random.default_rng(2), storage, 64, 96, experts=5, biases=True)
    ids_TK = np.where(np.arange(80)[:, None] < 70, [[1, 2]], [[2, -1]]).astype(np.int32)
    ids_TK[7] = -1
    y_TD = check(experts, ids_TK)
    np.testing.assert_array_equal(y_TD[7], 0)


@pytest.mark.parametrize("storage", STORAGES)
def test_no_expert_at_all(storage: str) -> None:
    experts = random_experts(np.random.default_rng(3), storage, 64, 96, experts=4, biases=True)
    np.testing.assert_array_equal(check(experts, np.array([[-1, 4], [7, -9]], np.int32)), 0)


@pytest.mark.parametrize(("experts", "refused"), [(256, True), (128, False), (512, False)])
def test_arrays_that_offsets_do_not_reach(experts: int, refused: bool) -> None:
    """From 2^31 to 2^32 numbers of one byte; arrays beyond have 64-bit offsets."""

    def matrix(out: int, inputs: int) -> Fp8:
        grid = (experts, -(-out // 128), -(-inputs // 128))
        return Fp8(
            jax.ShapeDtypeStruct((experts, out, inputs), jnp.float8_e4m3fn), jax.ShapeDtypeStruct(grid, jnp.float32)
        )

    weights = ExpertWeights((matrix(2048, 7168),) * 2, matrix(7168, 2048))
    choices = (1, 8)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 7168), choices)]

    def call(x_TD: jax.Array, weights_TK: jax.Array, weights: ExpertWeights) -> jax.Array:
        return triton.grouped_experts(x_TD, jnp.zeros(choices, jnp.int32), weights_TK, weights, Swiglu())

    if refused:
        with pytest.raises(ValueError, match=r"cannot address float8_e4m3fn\[256, 2048, 7168\]"):
            jax.eval_shape(call, *args, weights)
    else:
        jax.eval_shape(call, *args, weights)
