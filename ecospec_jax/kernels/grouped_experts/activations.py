"""Gated activations between an expert's two projections."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Swiglu:
    """silu(gate) * up (Qwen, DeepSeek)."""

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        """Elementwise."""
        return jax.nn.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss: g sigmoid(alpha g) (u + 1), g clamped from above and u on both sides (docs/formats.md A.2)."""

    limit: float = 7.0
    alpha: float = 1.702

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        """Elementwise."""
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


Activation = Swiglu | ClampedSwiglu
