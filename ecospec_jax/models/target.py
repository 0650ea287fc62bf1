"""What every target family gives the decoding step."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.config import FINAL, ModelConfig
from ecospec_jax.models.layers import Embedding


@jax.tree_util.register_dataclass
@dataclass
class TargetOutput:
    """Result of one forward pass.

    Attributes:
        hidden_BRD: after the final norm; `Target.logits` turns it into logits where they are wanted.
        features_BRF: the residual stream at the asked boundaries, concatenated low to high. Boundary b is the stream
            entering layer b; b = L is the stream after the last layer, before the final norm (docs/formats.md 0).
            `config.FINAL` stands for `hidden_BRD`.
        expert_ids_LBRK: experts chosen in each MoE layer; E for dead rows.
    """

    hidden_BRD: Float[Array, "batch rows hidden"]
    features_BRF: Float[Array, "batch rows features"]
    expert_ids_LBRK: Int[Array, "moe_layers batch rows k"]


def collect_output(
    hidden_BRD: Float[Array, "batch rows hidden"],
    stream: list[Float[Array, "batch rows hidden"]],
    boundaries: tuple[int, ...],
    expert_ids: list[Int[Array, "batch rows k"]],
) -> TargetOutput:
    """Assembles a `TargetOutput` from the residual stream at boundaries 0..L and the experts of each MoE layer."""
    batch, rows, _ = hidden_BRD.shape
    states = dict(enumerate(stream)) | {FINAL: hidden_BRD}
    features = [states[boundary] for boundary in boundaries] or [jnp.zeros((batch, rows, 0), hidden_BRD.dtype)]
    ids = jnp.stack(expert_ids) if expert_ids else jnp.zeros((0, batch, rows, 0), jnp.int32)
    return TargetOutput(hidden_BRD, jnp.concatenate(features, axis=-1), ids)


class Target(Protocol):
    """A target family (`models/qwen3_moe.py` is the model to follow)."""

    config: ModelConfig
    dtype: jnp.dtype
    embedding: Embedding

    @property
    def num_experts(self) -> int:
        """Experts of each MoE layer; the id of dead rows."""
        ...

    def empty_cache(self, batch: int, capacity: int, rows: int | None = None) -> KVCache:
        """A cache of `capacity` slots a sequence; fewer where a layer can do with them if later passes have `rows`."""
        ...

    def __call__(self, rows: Rows, cache: KVCache, boundaries: tuple[int, ...]) -> tuple[TargetOutput, KVCache]:
        """One forward pass."""
        ...

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """Logits of hidden states, float32."""
        ...
