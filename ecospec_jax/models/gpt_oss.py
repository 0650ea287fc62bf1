"""gpt-oss target (docs/formats.md A.2; transformers `GptOssForCausalLM`)."""

import jax.numpy as jnp
from flax import nnx

from ecospec_jax.config import GptOssConfig
from ecospec_jax.kernels import ClampedSwiglu
from ecospec_jax.models.layers import Attention, RMSNorm
from ecospec_jax.models.moe import InterleavedExperts, MoELayer, router_of
from ecospec_jax.models.transformer import DecoderLayer, Transformer


def _layer(config: GptOssConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> DecoderLayer:
    hidden = config.hidden_size
    attention = Attention(config, bias=True, output_bias=True, sinks=True, dtype=dtype, rngs=rngs)
    router = router_of(config, dtype=dtype, rngs=rngs)
    experts = InterleavedExperts(
        config.num_experts,
        hidden,
        config.moe_intermediate_size,
        storage=config.expert_storage,
        dtype=dtype,
        rngs=rngs,
    )
    moe = MoELayer(router, experts, ClampedSwiglu(limit=config.swiglu_limit))
    return DecoderLayer(_norm(config, dtype), attention, _norm(config, dtype), moe)


def _norm(config: GptOssConfig, dtype: jnp.dtype) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, scale_in_float32=True)


class GptOss(Transformer):
    """The whole target. Layers alternate between a sliding window and everything."""

    def __init__(self, config: GptOssConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        layers = [_layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        windows = [config.sliding_window if i in config.sliding_layers else None for i in range(config.num_layers)]
        super().__init__(
            config,
            layers,
            _norm(config, dtype),
            tie_embeddings=config.tie_embeddings,
            dtype=dtype,
            rngs=rngs,
            windows=windows,
        )
