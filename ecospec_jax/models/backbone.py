"""Dense causal transformer of the Qwen3 architecture: the backbone of a trained expert predictor."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import Buffer, KVCache, Rows, empty_cache
from ecospec_jax.config import BackboneConfig
from ecospec_jax.models.layers import Attention, DenseMLP, RMSNorm
from ecospec_jax.models.rope import cos_sin


class DenseLayer(nnx.Module):
    """Attention and SwiGLU, each behind an RMSNorm and a residual connection."""

    def __init__(self, config: BackboneConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Per-head q/k norms, no biases."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.attention = Attention(
            input_size=hidden,
            hidden_size=hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qk_norm_eps=eps,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.mlp = DenseMLP(hidden, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x_BRD: Float[Array, "batch rows hidden"],
        cos_sin: tuple[Array, Array],
        buffers: tuple[Buffer, Buffer],
        start_B: Int[Array, " batch"],
        visible_BRS: Bool[Array, "batch rows slots"],
    ) -> tuple[Float[Array, "batch rows hidden"], tuple[Buffer, Buffer]]:
        """Returns the new residual stream and the cache buffers."""
        mixed, buffers = self.attention(self.attention_norm(x_BRD), cos_sin, buffers, start_B, visible_BRS)
        x_BRD = x_BRD + mixed
        return x_BRD + self.mlp(self.mlp_norm(x_BRD)), buffers


class Backbone(nnx.Module):
    """Layers and final norm; token embedding and heads belong to the user of it."""

    def __init__(self, config: BackboneConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.layers = nnx.List([DenseLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` slots a sequence."""
        return empty_cache(self.config, layers=self.config.num_layers, batch=batch, capacity=capacity, dtype=self.dtype)

    def __call__(
        self, x_BRD: Float[Array, "batch rows hidden"], rows: Rows, cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """Hidden states after the final norm; `x_BRD` are the rows' embeddings."""
        angles = cos_sin(self.config.rope, self.config.head_dim, rows.positions_BR)
        visible_BRS = rows.visible_BRS(cache.capacity)
        start_B = rows.context_B + rows.offset
        keys, values = [], []
        for layer, k, v in zip(self.layers, cache.keys, cache.values, strict=True):
            x_BRD, (k, v) = layer(x_BRD, angles, (k, v), start_B, visible_BRS)
            keys.append(k)
            values.append(v)
        return self.norm(x_BRD), KVCache(keys, values)
