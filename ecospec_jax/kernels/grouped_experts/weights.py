"""Storage of one layer's experts."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass
class ExpertWeights:
    """Weights of all experts of a layer in the checkpoint's layout: contraction dimension last."""

    gate_EFD: Float[Array, "experts ffn hidden"]
    up_EFD: Float[Array, "experts ffn hidden"]
    down_EDF: Float[Array, "experts hidden ffn"]

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.gate_EFD.shape[0]
