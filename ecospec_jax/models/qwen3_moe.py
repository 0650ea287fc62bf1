"""Qwen3-MoE target (docs/formats.md A.1; transformers `Qwen3MoeForCausalLM`)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import Buffer, KVCache, Rows, empty_cache
from ecospec_jax.config import Qwen3MoeConfig
from ecospec_jax.models.layers import Attention, DenseMLP, Embedding, Linear, RMSNorm
from ecospec_jax.models.moe import Experts, MoELayer, SoftmaxRouter
from ecospec_jax.models.rope import cos_sin
from ecospec_jax.models.target import TargetOutput, collect_output


class DecoderLayer(nnx.Module):
    """Attention and a sparse or dense MLP, each behind an RMSNorm and a residual connection."""

    def __init__(self, config: Qwen3MoeConfig, *, sparse: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """`sparse` layers have experts."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.attention = Attention(
            input_size=hidden,
            hidden_size=hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qk_norm_eps=eps,
            bias=config.attention_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(hidden, eps, dtype=dtype)
        if sparse:
            router = SoftmaxRouter(
                hidden,
                config.num_experts,
                config.experts_per_token,
                normalise=config.norm_topk_prob,
                dtype=dtype,
                rngs=rngs,
            )
            experts = Experts(config.num_experts, hidden, config.moe_intermediate_size, dtype=dtype, rngs=rngs)
            self.moe = MoELayer(router, experts)
            self.mlp = None
        else:
            self.moe = None
            self.mlp = DenseMLP(hidden, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x_BRD: Float[Array, "batch rows hidden"],
        cos_sin: tuple[Array, Array],
        buffers: tuple[Buffer, Buffer],
        start_B: Int[Array, " batch"],
        visible_BRS: Bool[Array, "batch rows slots"],
        live_BR: Bool[Array, "batch rows"],
    ) -> tuple[Float[Array, "batch rows hidden"], tuple[Buffer, Buffer], Int[Array, "batch rows k"] | None]:
        """Returns the new residual stream, the cache buffers, and the chosen experts (None in a dense layer)."""
        mixed, buffers = self.attention(self.attention_norm(x_BRD), cos_sin, buffers, start_B, visible_BRS)
        x_BRD = x_BRD + mixed
        normed = self.mlp_norm(x_BRD)
        if self.moe is not None:
            y_BRD, ids_BRK = self.moe(normed, live_BR)
            return x_BRD + y_BRD, buffers, ids_BRK
        assert self.mlp is not None
        return x_BRD + self.mlp(normed), buffers, None


class Qwen3Moe(nnx.Module):
    """The whole target. Layers are unrolled: a scan would make XLA copy each layer's experts (docs/design.md 4)."""

    def __init__(self, config: Qwen3MoeConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        sparse = set(config.moe_layers)
        self.layers = nnx.List(
            [DecoderLayer(config, sparse=i in sparse, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, ("vocab", "embed"), dtype=dtype, rngs=rngs)
        )

    @property
    def num_experts(self) -> int:
        """Experts of each MoE layer."""
        return self.config.num_experts

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` slots a sequence."""
        return empty_cache(self.config, layers=self.config.num_layers, batch=batch, capacity=capacity, dtype=self.dtype)

    def __call__(self, rows: Rows, cache: KVCache, boundaries: tuple[int, ...]) -> tuple[TargetOutput, KVCache]:
        """One forward pass of a block of rows; see `TargetOutput` for what comes out."""
        angles = cos_sin(self.config.rope, self.config.head_dim, rows.positions_BR)
        visible_BRS = rows.visible_BRS(cache.capacity)
        start_B = rows.context_B + rows.offset
        x_BRD = self.embedding(rows.tokens_BR)
        stream, keys, values, expert_ids = [x_BRD], [], [], []
        for layer, k, v in zip(self.layers, cache.keys, cache.values, strict=True):
            x_BRD, (k, v), ids_BRK = layer(x_BRD, angles, (k, v), start_B, visible_BRS, rows.live_BR)
            stream.append(x_BRD)
            keys.append(k)
            values.append(v)
            if ids_BRK is not None:
                expert_ids.append(ids_BRK)
        return collect_output(self.norm(x_BRD), stream, boundaries, expert_ids), KVCache(keys, values)

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """Head over the post-final-norm hidden state, float32."""
        if self.head is None:
            return self.embedding.logits(hidden).astype(jnp.float32)
        return self.head(hidden).astype(jnp.float32)
