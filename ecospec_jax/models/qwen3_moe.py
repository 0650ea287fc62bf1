"""Qwen3-MoE target (docs/formats.md A.1; transformers `Qwen3MoeForCausalLM`)."""

import jax.numpy as jnp
from flax import nnx

from ecospec_jax.config import Qwen3MoeConfig
from ecospec_jax.models.layers import Attention, DenseMLP, RMSNorm
from ecospec_jax.models.moe import Experts, MoELayer, router_of
from ecospec_jax.models.transformer import DecoderLayer, Transformer


def _layer(config: Qwen3MoeConfig, *, sparse: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> DecoderLayer:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    biased = config.attention_bias
    attention = Attention(config, qk_norm_eps=eps, bias=biased, output_bias=biased, dtype=dtype, rngs=rngs)
    if sparse:
        router = router_of(config, dtype=dtype, rngs=rngs)
        experts = Experts(config.num_experts, hidden, config.moe_intermediate_size, dtype=dtype, rngs=rngs)
        feed_forward = MoELayer(router, experts)
    else:
        feed_forward = DenseMLP(hidden, config.intermediate_size, dtype=dtype, rngs=rngs)
    norms = [RMSNorm(hidden, eps, dtype=dtype) for _ in range(2)]
    return DecoderLayer(norms[0], attention, norms[1], feed_forward)


class Qwen3Moe(Transformer):
    """The whole target."""

    def __init__(self, config: Qwen3MoeConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        sparse = set(config.moe_layers)
        layers = [_layer(config, sparse=i in sparse, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        super().__init__(config, layers, norm, tie_embeddings=config.tie_embeddings, dtype=dtype, rngs=rngs)
