"""Random transformers Qwen3-MoE models, and the same weights in our module (without `convert/`)."""

import jax.numpy as jnp
import torch
import transformers
from flax import nnx

from ecospec_jax.config import Qwen3MoeConfig
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from tests.parity.torch_targets import TorchWeights, put_common, put_experts, rope_of

# No two dimensions are equal, nor are heads * head_dim (60), kv_heads * head_dim (20) or twice the expert width (56).
SIZES = dict(
    vocab_size=97,
    hidden_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=36,
    moe_intermediate_size=28,
    num_experts=11,
    num_experts_per_tok=4,
    max_position_embeddings=128,
    norm_topk_prob=True,
    rms_norm_eps=1e-3,  # large enough to matter
    rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    tie_word_embeddings=False,
)


def random_model(seed: int = 0, **overrides) -> transformers.Qwen3MoeForCausalLM:
    """A float32 model in which every parameter matters: no constant norm weights, no vanishing layers or biases."""
    config = transformers.Qwen3MoeConfig(**(SIZES | overrides))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "mlp.gate.weight" in name:
                parameter.copy_(2 * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def to_jax(model: transformers.Qwen3MoeForCausalLM) -> Qwen3Moe:
    """Our module with the same weights, float32."""
    config = config_of(model.config)
    ours = nnx.eval_shape(lambda: Qwen3Moe(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))
    weights = TorchWeights(model)
    put, unused = weights.put, weights.unused
    put_common(weights, ours)
    for index, layer in enumerate(ours.layers):
        prefix = f"model.layers.{index}."
        put(layer.attention.q_norm.weight, prefix + "self_attn.q_norm.weight")
        put(layer.attention.k_norm.weight, prefix + "self_attn.k_norm.weight")
        if layer.moe is None:
            for name in ("gate", "up", "down"):
                put(getattr(layer.mlp, name).weight, f"{prefix}mlp.{name}_proj.weight")
        else:
            put(layer.moe.router.gate.weight, prefix + "mlp.gate.weight")
            put_experts(weights, layer.moe.experts, prefix + "mlp.experts.")
    assert not unused, sorted(unused)
    return ours


def config_of(config: transformers.Qwen3MoeConfig) -> Qwen3MoeConfig:
    """Our form of a transformers config, spelled out here a second time."""
    layers = range(config.num_hidden_layers)
    return Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope_of(config),
        max_positions=config.max_position_embeddings,
        dense_layers=tuple(
            i for i in layers if i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step != 0
        ),
        tie_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
    )
