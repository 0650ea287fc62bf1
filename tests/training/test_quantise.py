"""Rounding to MXFP4 and FP8: nearest codes, ties, exact values, scales, straight-through gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.checkpoint import parameters
from ecospec_jax.kernels.formats import E2M1, check_matrix
from ecospec_jax.training.quantise import published, straight_through, to_fp8, to_mxfp4
from tests.tiny import quick_compilation
from tests.training.models import GPT_OSS, make_gpt_oss, stored

__all__ = ["quick_compilation"]
MAGNITUDES = E2M1[:8].astype(np.float64)


def brute_force(block: np.ndarray) -> np.ndarray:
    """The documented rounding of one block, number by number, with its errors measured in float64."""
    largest = np.abs(block).max()
    if largest == 0:
        return np.zeros_like(block)
    first = int(np.floor(np.log2(largest))) - 2

    def nearest(size: float) -> float:
        distance = np.abs(MAGNITUDES - size)
        candidates = np.flatnonzero(distance == distance.min())
        return MAGNITUDES[candidates[0] if candidates[0] % 2 == 0 else candidates[-1]]

    attempts = [
        np.array([np.sign(x) * nearest(abs(x) / scale) * scale for x in block])
        for scale in (2.0**first, 2.0 ** (first + 1))
    ]
    errors = [np.square(attempt - block).sum() for attempt in attempts]
    return attempts[int(errors[1] < errors[0])]


def test_against_brute_force() -> None:
    """Random blocks of many magnitudes, among them blocks for which either scale is the better one."""
    random = np.random.default_rng(0)
    blocks = random.normal(size=(3, 40, 2, 32)) * 2.0 ** random.integers(-20, 20, (3, 40, 2, 1))
    blocks = blocks.astype(np.float32).astype(np.float64)
    result = to_mxfp4(jnp.asarray(blocks.reshape(3, 40, 64), jnp.float32))
    check_matrix(result, "result")
    expected = np.array([brute_force(block) for block in blocks.reshape(-1, 32)])
    np.testing.assert_array_equal(np.asarray(result.widen()).reshape(-1, 32), expected)
    first = np.floor(np.log2(np.abs(blocks).max(axis=-1))) - 2
    assert set((np.asarray(result.scales) - 127.0 - first).reshape(-1)) == {0, 1}


def test_numbers_in_the_middle_go_to_the_even_code() -> None:
    """6 fixes the scale at 1, where it saturates nothing and all else is exact."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES)]
    block = np.zeros(32, np.float32)
    block[: len(middles)], block[8 : 8 + len(middles)] = middles, np.negative(middles)
    block[16:] = 6
    rounded = np.asarray(to_mxfp4(jnp.asarray(block)[None]).widen())[0]
    assert rounded[:7].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert rounded[8:15].tolist() == [0, -1, -1, -2, -2, -4, -4]


@pytest.mark.parametrize("exponent", [-120, -3, 0, 100])
def test_representable_values_stay(exponent: int) -> None:
    """Every code, whatever the block's largest magnitude, at small and large scales."""
    largest = np.repeat(np.arange(1, 8), 4)
    random = np.random.default_rng(1)
    magnitudes = np.array([np.r_[top, random.integers(0, top + 1, 31)] for top in largest])
    values = np.ldexp(E2M1[magnitudes | 8 * random.integers(0, 2, magnitudes.shape)], exponent).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(to_mxfp4(jnp.asarray(values)).widen()), values)


def test_extremes() -> None:
    """Zero blocks, the largest and the smallest numbers give finite results, and no scale is the code for NaN."""
    values = np.zeros((4, 32), np.float32)
    values[1], values[2, 3], values[3] = np.finfo(np.float32).max, 1e-38, -1e-45
    result = to_mxfp4(jnp.asarray(values))
    widened = np.asarray(result.widen())
    assert np.isfinite(widened).all() and (np.asarray(result.scales) < 255).all()
    assert (widened[0] == 0).all() and (widened[1] > 0.5 * values[1]).all() and (np.abs(widened[2:]) < 1e-37).all()


def test_straight_through_computes_rounded_and_differentiates_exact() -> None:
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(5, 64)), jnp.float32)
    slope = jnp.arange(5 * 64, dtype=jnp.float32).reshape(5, 64)
    value, gradient = jax.value_and_grad(lambda w: jnp.sum(slope * straight_through(w)))(weight)
    np.testing.assert_allclose(value, jnp.sum(slope * to_mxfp4(weight).widen()), rtol=1e-6)
    np.testing.assert_array_equal(gradient, slope)


def test_fp8_against_brute_force() -> None:
    """Ragged blocks of many magnitudes: the least power of two under which nothing saturates, and the nearest codes."""
    random = np.random.default_rng(3)
    weight = random.normal(size=(2, 200, 300)) * 2.0 ** random.integers(-30, 30, (2, 200, 300))
    weight[0, :128, 128:256] = 448 * 2.0**-5  # the largest code exactly, which needs no larger scale
    weight = weight.astype(np.float32)
    result = to_fp8(jnp.asarray(weight))
    check_matrix(result, "result")
    every_code = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    values, codes = np.unique(every_code[np.isfinite(every_code)]), np.asarray(result.weight).astype(np.float64)
    for block in np.ndindex(2, 2, 3):
        matrix, rows, columns = block[0], *(slice(128 * at, 128 * at + 128) for at in block[1:])
        exact = weight[matrix, rows, columns].astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(np.abs(exact).max() / 448))
        assert float(result.scales[block]) == scale
        distance = np.abs(codes[matrix, rows, columns] - exact / scale)
        right = np.minimum(np.searchsorted(values, exact / scale), len(values) - 1)
        nearest = np.minimum(np.abs(values[right] - exact / scale), np.abs(values[right - 1] - exact / scale))
        np.testing.assert_array_equal(distance, nearest)
    assert float(result.scales[0, 0, 1]) == 2.0**-5 and (codes[0, :128, 128:256] == 448).all()


def test_fp8_extremes_and_ties() -> None:
    """A block of zeros, the smallest and the largest numbers; numbers in the middle go to the even code."""
    weight = np.zeros((4, 128, 128), np.float32)
    weight[1], weight[2] = 1e-45, 3e38
    weight[3, 0, :4] = 448, 1.0625, 1.1875, -1.0625  # codes near 1 are 0.125 apart
    result = to_fp8(jnp.asarray(weight))
    widened = np.asarray(result.widen())
    assert np.isfinite(widened).all() and (np.asarray(result.scales) > 0).all()
    assert (widened[0] == 0).all() and (np.abs(widened[1]) < 1e-37).all()
    np.testing.assert_allclose(widened[2], weight[2], rtol=0.07)
    assert widened[3, 0, :4].tolist() == [448, 1.0, 1.25, -1.0]


def test_published_model() -> None:
    """Experts become blocks that mean their rounded values; all else is bfloat16 numbers in the model's dtype."""
    model = make_gpt_oss()
    result = published(model, stored(GPT_OSS))
    exact, rounded = parameters(model), parameters(result)
    assert result.config.expert_storage == "mxfp4"
    for path, variable in rounded.items():
        matrix, _, part = path.rpartition(".")
        if part in ("blocks", "scales"):
            whole = to_mxfp4(exact[f"{matrix}.weight"].get_value())
            np.testing.assert_array_equal(variable.get_value(), getattr(whole, part))
        else:
            value = exact[path].get_value()
            assert variable.get_value().dtype == jnp.float32
            np.testing.assert_array_equal(variable.get_value(), value.astype(jnp.bfloat16).astype(jnp.float32))
    assert sum(path.endswith(".blocks") for path in rounded) == 2 * GPT_OSS.num_layers
