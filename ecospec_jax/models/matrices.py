"""Parameters: arrays with the logical names of their dimensions, and weight matrices in the formats that kernels read.

Each parameter carries `logical_axes`, one name per dimension; `sharding.py` alone maps these to mesh axes.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ecospec_jax.kernels import Fp8, Mxfp4, Plain
from ecospec_jax.kernels.formats import FP8_BLOCK, MXFP4_BLOCK

_CODE_DEVIATION = 2.9  # of uniformly random E2M1 codes
_SCALE_BIAS = 127


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, scale: float | None = None
) -> nnx.Param:
    """A normally distributed parameter (standard deviation `scale`, default 1/sqrt of the last dimension)."""
    assert len(shape) == len(axes)
    deviation = shape[-1] ** -0.5 if scale is None else scale
    value = deviation * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value.astype(dtype), logical_axes=axes)


class PlainMatrix(nnx.Module):
    """`[..., out, in]` in the model's dtype."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """`axes` are the logical names of the dimensions."""
        self.weight = parameter(rngs, shape, axes, dtype)

    def arranged(self, take: Callable[[nnx.Variable], Any]) -> Plain:
        """What `take` makes of each parameter, as kernels take the values."""
        return Plain(take(self.weight))


class Mxfp4Matrix(nnx.Module):
    """The same in blocks of four-bit numbers (docs/formats.md B.1), whatever the model's dtype."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """The last dimension must be a multiple of 32."""
        del dtype
        groups = (*shape[:-1], shape[-1] // MXFP4_BLOCK)
        exponent = _SCALE_BIAS + round(math.log2(shape[-1] ** -0.5 / _CODE_DEVIATION))
        codes = jax.random.bits(rngs.params(), (*groups, MXFP4_BLOCK // 2), jnp.uint8)
        self.blocks = nnx.Variable(codes, logical_axes=(*axes, "packed"))
        self.scales = nnx.Variable(jnp.full(groups, exponent, jnp.uint8), logical_axes=axes)

    def arranged(self, take: Callable[[nnx.Variable], Any]) -> Mxfp4:
        """What `take` makes of each parameter, as kernels take the values."""
        return Mxfp4(take(self.blocks), take(self.scales))


class Fp8Matrix(nnx.Module):
    """The same as e4m3 codes with a factor for each 128 x 128 of them (docs/formats.md B.2), whatever the dtype."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random values of deviation 1 / sqrt of the last dimension."""
        del dtype
        *lead, outputs, inputs = shape
        grid = (*lead, -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        codes = jax.random.normal(rngs.params(), shape, jnp.float32).astype(jnp.float8_e4m3fn)
        self.weight = nnx.Variable(codes, logical_axes=axes)
        self.scales = nnx.Variable(jnp.full(grid, inputs**-0.5, jnp.float32), logical_axes=axes)

    def arranged(self, take: Callable[[nnx.Variable], Any]) -> Fp8:
        """What `take` makes of each parameter, as kernels take the values."""
        return Fp8(take(self.weight), take(self.scales))


Storage = Literal["plain", "mxfp4", "fp8"]
MATRICES = {"plain": PlainMatrix, "mxfp4": Mxfp4Matrix, "fp8": Fp8Matrix}
