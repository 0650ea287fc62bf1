"""Dense causal transformer of the Qwen3 or Qwen2 architecture: the backbone of a trained expert predictor."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import KVCache, Slots, empty_cache
from ecospec_jax.models.layers import Attention, DenseMLP, RMSNorm
from ecospec_jax.models.rope import cos_sin
from ecospec_jax.models.transformer import DecoderLayer
from ecospec_jax.predictor_config import BackboneConfig


def _layer(config: BackboneConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> DecoderLayer:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    qwen2 = config.family == "qwen2"
    attention = Attention(config, qk_norm_eps=None if qwen2 else eps, bias=qwen2, dtype=dtype, rngs=rngs)
    norms = [RMSNorm(hidden, eps, dtype=dtype) for _ in range(2)]
    mlp = DenseMLP(hidden, config.intermediate_size, dtype=dtype, rngs=rngs)
    return DecoderLayer(norms[0], attention, norms[1], mlp)


class Backbone(nnx.Module):
    """Layers and final norm; token embedding and heads belong to the user of it."""

    def __init__(self, config: BackboneConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.layers = nnx.List([_layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` slots a sequence."""
        shapes = [layer.attention.cached for layer in self.layers]
        return empty_cache(shapes, slots=[capacity] * len(shapes), batch=batch, dtype=self.dtype)

    def __call__(
        self,
        x_BRD: Float[Array, "batch rows hidden"],
        positions_BR: Int[Array, "batch rows"],
        live_BR: Bool[Array, "batch rows"],
        slots: Slots,
        cache: KVCache,
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """Hidden states after the final norm; `x_BRD` are the rows' embeddings; the others are as of `Rows`."""
        angles = cos_sin(self.config.rope, self.config.head_dim, positions_BR)
        keys, values = [], []
        for layer, k, v in zip(self.layers, cache.keys, cache.values, strict=True):
            x_BRD, (k, v), _ = layer(x_BRD, angles, (k, v), slots, live_BR)
            keys.append(k)
            values.append(v)
        return self.norm(x_BRD), KVCache(keys, values)
