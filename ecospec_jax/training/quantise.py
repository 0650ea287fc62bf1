"""Rounding of matrices to MXFP4 and FP8 for storage, and to MXFP4 for training that knows of it.

MXFP4: a block of 32 numbers with largest magnitude m gets, of the scales 2^e and 2^(e+1) with e = floor(log2 m) - 2,
the one with the smaller squared error (the first on a tie). The first is the OCP specification's, under which numbers
above 6 x 2^e saturate; the second never does. Scaled numbers are rounded to the nearest E2M1 value, ties to the even
code.

FP8: a block of 128 x 128 numbers gets the least power of two as scale with which none saturates, and at least the least
normal float32 number; scaled numbers are rounded to the nearest e4m3 value, ties to the even code.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ecospec_jax.checkpoint import parameters, published_dtypes
from ecospec_jax.config import DrafterConfig, ModelConfig
from ecospec_jax.kernels import Fp8, Mxfp4
from ecospec_jax.kernels.formats import E2M1, FP8_BLOCK, MXFP4_BLOCK
from ecospec_jax.models import abstract

_MAGNITUDES = E2M1[:8]
_MIDDLES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_LARGEST_EXPONENT = 2  # of a magnitude: 6 is 1.5 x 2^2
_BIAS = 127
_LEAST, _MOST = -125, 125  # exponents whose products with all magnitudes are normal float32 numbers
_E4M3 = jnp.float8_e4m3fn
_LARGEST_E4M3 = 448.0  # 1.75 x 2^8
_LEAST_FP8 = -126  # exponent of the least normal float32 number


def to_mxfp4(weight: Float[Array, "... out in"]) -> Mxfp4:
    """The nearest matrix in MXFP4 blocks along `in`, a multiple of 32."""
    blocks = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, MXFP4_BLOCK)
    exponents, magnitudes = _rounded(blocks)
    codes = jnp.where(blocks < 0, magnitudes | 8, magnitudes).astype(jnp.uint8)
    return Mxfp4(codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + _BIAS).astype(jnp.uint8))


def to_fp8(weight: Float[Array, "... out in"]) -> Fp8:
    """The nearest matrix of e4m3 codes with powers of two as scales."""
    *lead, outputs, inputs = weight.shape
    rows, columns = -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)
    ragged = ((0, rows * FP8_BLOCK - outputs), (0, columns * FP8_BLOCK - inputs))
    sizes = jnp.pad(jnp.abs(weight.astype(jnp.float32)), (*((0, 0) for _ in lead), *ragged))
    largest = jnp.max(sizes.reshape(*lead, rows, FP8_BLOCK, columns, FP8_BLOCK), axis=(-3, -1))
    fraction, exponent = jnp.frexp(largest / _LARGEST_E4M3)  # largest / 448 = f 2^exponent with f in [1/2, 1)
    exponent = jnp.maximum(jnp.where(fraction == 0.5, exponent - 1, exponent), _LEAST_FP8)
    scales = jnp.ldexp(jnp.ones_like(largest), exponent)
    factors = Fp8(jnp.ones(weight.shape, _E4M3), scales).widen()
    return Fp8((weight.astype(jnp.float32) / factors).astype(_E4M3), scales)


@jax.custom_jvp
def straight_through(weight: Float[Array, "... out in"]) -> Float[Array, "... out in"]:
    """What `to_mxfp4` makes of a matrix, in float32; its derivative is taken to be the identity."""
    return to_mxfp4(weight).widen()


@straight_through.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return straight_through(primals[0]), tangents[0]


def published(model: Any, config: ModelConfig | DrafterConfig) -> Any:
    """A target or drafter with the numbers it is published with: bfloat16, and matrices in the storage of `config`.

    Its other parameters keep their dtype.
    """
    module = abstract(config, model.dtype)
    exact = {path: variable.get_value() for path, variable in parameters(model).items()}
    stored, dtypes = parameters(module), published_dtypes(config)
    for path, variable in stored.items():
        matrix, _, part = path.rpartition(".")
        if f"{matrix}.blocks" in stored:
            value = getattr(to_mxfp4(exact[f"{matrix}.weight"]), part)
        elif f"{matrix}.scales" in stored:
            value = getattr(to_fp8(exact[f"{matrix}.weight"]), part)
        else:
            value = exact[path].astype(dtypes[path]).astype(exact[path].dtype)
        variable.set_value(value)
    return module


def _rounded(
    blocks: Float[Array, "... groups 32"],
) -> tuple[Int[Array, "... groups"], Int[Array, "... groups 32"]]:
    """Exponent of each block's scale, and the E2M1 codes of the scaled magnitudes."""
    sizes = jnp.abs(blocks)
    _, exponent = jnp.frexp(jnp.max(sizes, axis=-1))  # m = f 2^exponent with f in [1/2, 1)
    first = jnp.clip(exponent - 1 - _LARGEST_EXPONENT, _LEAST, _MOST)

    def attempt(exponents: Array) -> tuple[Array, Array]:
        codes = _nearest(jnp.ldexp(sizes, -exponents[..., None]))
        error = sizes - jnp.ldexp(jnp.asarray(_MAGNITUDES)[codes], exponents[..., None])
        return codes, jnp.sum(error * error, axis=-1)

    second = jnp.minimum(first + 1, _MOST)
    (codes, error), (other_codes, other_error) = attempt(first), attempt(second)
    better = other_error < error
    return jnp.where(better, second, first), jnp.where(better[..., None], other_codes, codes)


def _nearest(sizes: Float[Array, "..."]) -> Int[Array, "..."]:
    """Code of the nearest E2M1 magnitude; a number in the middle of two goes to the even code."""
    code = jnp.zeros(sizes.shape, jnp.int32)
    for index, middle in enumerate(_MIDDLES.tolist()):
        code += (sizes >= middle) if index % 2 else (sizes > middle)
    return code
