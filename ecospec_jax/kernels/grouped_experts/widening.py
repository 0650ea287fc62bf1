"""Decoding stored numbers by integer arithmetic, for kernels on devices that lack the conversions."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def e2m1(code: Int[Array, "..."]) -> Float[Array, "..."]:
    """Values of four-bit codes in int32."""
    magnitude = code & 7
    # As float32, the subnormal 1 and 0 are special; the others have an exponent and one bit of mantissa.
    bits = jnp.where(magnitude < 2, magnitude * (126 << 23), (magnitude << 22) + (126 << 23))
    return lax.bitcast_convert_type(bits | ((code & 8) << 28), jnp.float32)


def e4m3(code: Int[Array, "..."]) -> Float[Array, "..."]:
    """Values of eight-bit codes in int32."""
    magnitude = code & 0x7F
    normal = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == 0x7F, jnp.nan, value)
    return jnp.where(code >= 0x80, -value, value)


def e8m0(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """2^(exponent - 127), with 0 for the subnormal 2^-127; exponents in int32."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
