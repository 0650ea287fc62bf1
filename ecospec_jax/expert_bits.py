"""Sets of experts as bit words: union is OR, size is popcount, and a set of 128 experts is four words.

An expert id e of a layer is bit `e % 32` of word `e // 32`; arrays end in `[..., layers, words]`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

WORD = 32


def words(experts: int) -> int:
    """Words that hold one bit per expert."""
    return -(-experts // WORD)


def from_ids(ids: Int[Array, "... k"], experts: int) -> UInt32[Array, "... words"]:
    """The set of the given ids; ids outside `0 .. experts-1` (dead rows) are left out."""
    index = ids[..., None, :]
    mine = (index // WORD == jnp.arange(words(experts))[:, None]) & (index >= 0) & (index < experts)
    bits = jnp.where(mine, jnp.uint32(1) << (index % WORD).astype(jnp.uint32), jnp.uint32(0))
    return union(bits, axis=-1)


def union(bits: UInt32[Array, "..."], axis: int | Sequence[int]) -> UInt32[Array, "..."]:
    """Union over an axis, or over several."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    return lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, tuple(a % bits.ndim for a in axes))


def count(bits: UInt32[Array, "... words"]) -> Int[Array, "..."]:
    """Size of each set."""
    return jnp.sum(lax.population_count(bits), axis=-1, dtype=jnp.int32)
