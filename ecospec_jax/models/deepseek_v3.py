"""DeepSeek-V3 target (docs/formats.md A.3; transformers `DeepseekV3ForCausalLM`)."""

import jax.numpy as jnp
from flax import nnx

from ecospec_jax.config import DeepseekV3Config
from ecospec_jax.models.latent_attention import LatentAttention
from ecospec_jax.models.layers import DenseMLP, RMSNorm
from ecospec_jax.models.moe import Experts, MoELayer, router_of
from ecospec_jax.models.transformer import DecoderLayer, Transformer


def decoder_layer(config: DeepseekV3Config, *, sparse: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> DecoderLayer:
    """A layer of the target or of its MTP module; `sparse` layers have experts."""
    hidden, storage = config.hidden_size, config.storage
    if sparse:
        router = router_of(config, dtype=dtype, rngs=rngs)
        width = config.moe_intermediate_size
        experts = Experts(config.num_experts, hidden, width, storage=storage, dtype=dtype, rngs=rngs)
        shared = DenseMLP(hidden, config.shared_experts * width, storage=storage, dtype=dtype, rngs=rngs)
        feed_forward = MoELayer(router, experts, shared=shared)
    else:
        feed_forward = DenseMLP(hidden, config.intermediate_size, storage=storage, dtype=dtype, rngs=rngs)
    norms = [RMSNorm(hidden, config.rms_norm_eps, dtype=dtype) for _ in range(2)]
    return DecoderLayer(norms[0], LatentAttention(config, dtype=dtype, rngs=rngs), norms[1], feed_forward)


class DeepseekV3(Transformer):
    """The whole target, without its MTP module (`models/mtp.py`)."""

    def __init__(self, config: DeepseekV3Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        layers = [
            decoder_layer(config, sparse=i >= config.first_sparse_layer, dtype=dtype, rngs=rngs)
            for i in range(config.num_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        super().__init__(config, layers, norm, tie_embeddings=config.tie_embeddings, dtype=dtype, rngs=rngs)
