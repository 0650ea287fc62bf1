"""Rotary position embedding, half-split layout, with the published context extensions (docs/formats.md A.4)."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ecospec_jax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each channel pair, float32 `[head_dim / 2]`."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float64)
    inverse = 1.0 / rope.theta ** (pairs / head_dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(inverse, rope)
    elif rope.kind == "yarn":
        inverse = _yarn(inverse, rope, head_dim)
    return inverse.astype(np.float32)


def attention_factor(rope: RopeConfig) -> float:
    """Scale of cos and sin (yarn's concentration factor); 1 for the other kinds."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope, rope.mscale) / _magnitude(rope, rope.mscale_all_dim)
    return _magnitude(rope, 1.0)


def score_factor(rope: RopeConfig) -> float:
    """Factor that DeepSeek's attention scores have beyond that of cos and sin, without rope's channels too."""
    return _magnitude(rope, rope.mscale_all_dim) ** 2 if rope.kind == "yarn" and rope.mscale_all_dim else 1.0


def _magnitude(rope: RopeConfig, mscale: float) -> float:
    return 0.1 * mscale * math.log(rope.factor) + 1.0


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    assert rope.original_max_positions is not None
    wavelength = 2 * math.pi / inverse
    keep = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    keep = np.clip(keep, 0.0, 1.0)
    return inverse * (keep + (1 - keep) / rope.factor)


def _yarn(inverse: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    assert rope.original_max_positions is not None
    trained = rope.original_max_positions

    def dimension_for(rotations: float) -> float:
        turns = trained / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_for(rope.beta_fast), dimension_for(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inverse * ((1 - ramp) + ramp / rope.factor)


def cos_sin(
    rope: RopeConfig, head_dim: int, positions_BR: Int[Array, "batch rows"]
) -> tuple[Float[Array, "batch 1 rows pairs"], Float[Array, "batch 1 rows pairs"]]:
    """Cosines and sines of the rotation angles, float32, broadcast over heads."""
    angles = positions_BR[:, None, :, None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    scale = attention_factor(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x_BNRH: Float[Array, "batch heads rows channels"],
    cos: Float[Array, "batch 1 rows pairs"],
    sin: Float[Array, "batch 1 rows pairs"],
) -> Float[Array, "batch heads rows channels"]:
    """Rotates channel j with channel j + H/2; the tables are cast to the input's dtype first, as transformers does."""
    cos, sin = cos.astype(x_BNRH.dtype), sin.astype(x_BNRH.dtype)
    first, second = jnp.split(x_BNRH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotate_pairs(
    x_BNRH: Float[Array, "batch heads rows channels"],
    cos: Float[Array, "batch 1 rows pairs"],
    sin: Float[Array, "batch 1 rows pairs"],
) -> Float[Array, "batch heads rows channels"]:
    """Rotates channel 2j with channel 2j + 1. The result holds all first channels, then all second ones.

    Scores do not depend on that order, as long as queries and keys have the same.
    """
    cos, sin = cos.astype(x_BNRH.dtype), sin.astype(x_BNRH.dtype)
    first, second = x_BNRH[..., 0::2], x_BNRH[..., 1::2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
