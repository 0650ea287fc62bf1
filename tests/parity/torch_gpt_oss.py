"""Random transformers gpt-oss models, and the same weights in our module (without `convert/`)."""

import jax.numpy as jnp
import torch
import transformers
from flax import nnx

from ecospec_jax.config import GptOssConfig
from ecospec_jax.models.gpt_oss import GptOss
from tests.parity.torch_targets import TorchWeights, put_common, rope_of

# No two dimensions are equal, nor are heads * head_dim (60), kv_heads * head_dim (20) or twice the expert width (56).
SIZES = dict(
    vocab_size=97,
    hidden_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=28,
    num_local_experts=11,
    num_experts_per_tok=4,
    sliding_window=5,
    max_position_embeddings=128,
    rms_norm_eps=1e-3,  # large enough to matter
    swiglu_limit=0.7,  # small enough to matter
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 700.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    tie_word_embeddings=False,
)


def random_model(seed: int = 0, **overrides) -> transformers.GptOssForCausalLM:
    """A float32 model in which every parameter matters: no constant norm weights, no vanishing layers or biases."""
    config = transformers.GptOssConfig(**(SIZES | overrides))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.GptOssForCausalLM(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "sinks" in name:
                parameter.copy_(noise)
            elif "bias" in name:
                parameter.copy_(0.3 * noise)
            elif "experts" in name:  # [E, in, out]
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_((2 if "router" in name else 1) * noise * parameter.shape[-1] ** -0.5)
    return model


def to_jax(model: transformers.GptOssForCausalLM) -> GptOss:
    """Our module with the same weights, float32."""
    config = config_of(model.config)
    ours = nnx.eval_shape(lambda: GptOss(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))
    weights = TorchWeights(model)
    put_common(weights, ours)
    for index, layer in enumerate(ours.layers):
        prefix = f"model.layers.{index}."
        weights.put(layer.attention.sinks, prefix + "self_attn.sinks")
        weights.put(layer.moe.router.gate.weight, prefix + "mlp.router.weight")
        weights.put(layer.moe.router.gate.bias, prefix + "mlp.router.bias")
        experts = layer.moe.experts
        for ours_matrix, name in ((experts.gate_up, "gate_up_proj"), (experts.down, "down_proj")):
            key = f"{prefix}mlp.experts.{name}"
            weights.unused[key] = weights.unused[key].mT  # stored as [in, out]
            weights.put(ours_matrix.weight, key)
        weights.put(experts.gate_up_bias, prefix + "mlp.experts.gate_up_proj_bias")
        weights.put(experts.down_bias, prefix + "mlp.experts.down_proj_bias")
    assert not weights.unused, sorted(weights.unused)
    return ours


def config_of(config: transformers.GptOssConfig) -> GptOssConfig:
    """Our form of a transformers config, spelled out here a second time."""
    return GptOssConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        moe_intermediate_size=config.intermediate_size,
        num_experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
        sliding_window=config.sliding_window,
        sliding_layers=tuple(i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"),
        swiglu_limit=config.swiglu_limit,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope_of(config),
        max_positions=config.max_position_embeddings,
        expert_storage="plain",
        tie_embeddings=config.tie_word_embeddings,
    )
