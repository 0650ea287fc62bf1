"""Random transformers DeepSeek-V3 models, and the same weights in our module (without `convert/`)."""

import jax.numpy as jnp
import torch
import transformers

from ecospec_jax.config import DeepseekV3Config
from ecospec_jax.models import abstract
from ecospec_jax.models.deepseek_v3 import DeepseekV3
from ecospec_jax.models.transformer import DecoderLayer
from tests.parity.torch_targets import TorchWeights, put_ends, put_experts, rope_of

# No two dimensions are equal, nor heads * value channels, latent + rope channels, or twice the expert width.
SIZES = dict(
    vocab_size=97,
    hidden_size=40,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=3,
    q_lora_rank=22,
    kv_lora_rank=18,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    intermediate_size=34,
    moe_intermediate_size=26,
    n_routed_experts=12,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=3,
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
    first_k_dense_replace=1,
    max_position_embeddings=128,
    rms_norm_eps=1e-2,  # large enough to matter; the latent norms do not follow it
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 700.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
    tie_word_embeddings=False,
)


def randomise(module: torch.nn.Module, seed: int, bias: float = 0.3) -> None:
    """Every parameter matters: no constant norm weights, no vanishing layers; `bias` is the biases' deviation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in (*module.named_parameters(), *module.named_buffers()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "e_score_correction_bias" in name:
                parameter.copy_(bias * noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim > 1:
                parameter.copy_((2 if "gate.weight" in name else 1) * noise * parameter.shape[-1] ** -0.5)


def random_model(seed: int = 0, **overrides) -> transformers.DeepseekV3ForCausalLM:
    """A float32 model."""
    config = transformers.DeepseekV3Config(**(SIZES | overrides))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.DeepseekV3ForCausalLM(config).to(torch.float32).eval()
    randomise(model, seed)
    return model


def to_jax(model: transformers.DeepseekV3ForCausalLM) -> DeepseekV3:
    """Our module with the same weights, float32."""
    ours = abstract(config_of(model.config), jnp.dtype(jnp.float32))
    weights = TorchWeights(model)
    put_ends(weights, ours)
    for index, layer in enumerate(ours.layers):
        put_layer(weights, layer, f"model.layers.{index}.")
    assert not weights.unused, sorted(weights.unused)
    return ours


def put_layer(weights: TorchWeights, layer: DecoderLayer, prefix: str) -> None:
    """A decoder layer of the target or of an MTP module."""
    put, attention = weights.put, layer.attention
    put(layer.attention_norm.weight, prefix + "input_layernorm.weight")
    put(layer.mlp_norm.weight, prefix + "post_attention_layernorm.weight")
    for mine, theirs in (
        (attention.q_a, "q_a_proj"),
        (attention.q_a_norm, "q_a_layernorm"),
        (attention.q_b, "q_b_proj"),
        (attention.kv_a, "kv_a_proj_with_mqa"),
        (attention.kv_a_norm, "kv_a_layernorm"),
        (attention.kv_b, "kv_b_proj"),
        (attention.o, "o_proj"),
    ):
        put(mine.weight, f"{prefix}self_attn.{theirs}.weight")
    mlp = layer.mlp if layer.moe is None else layer.moe.shared
    for name in ("gate", "up", "down"):
        inner = "" if layer.moe is None else "shared_experts."
        put(getattr(mlp, name).weight, f"{prefix}mlp.{inner}{name}_proj.weight")
    if layer.moe is not None:
        put(layer.moe.router.gate.weight, prefix + "mlp.gate.weight")
        put(layer.moe.router.bias, prefix + "mlp.gate.e_score_correction_bias")
        put_experts(weights, layer.moe.experts, prefix + "mlp.experts.")


def config_of(config: transformers.DeepseekV3Config) -> DeepseekV3Config:
    """Our form of a transformers config, spelled out here a second time."""
    return DeepseekV3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        shared_experts=config.n_shared_experts,
        groups=config.n_group,
        groups_per_token=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
        first_sparse_layer=config.first_k_dense_replace,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope_of(config),
        max_positions=config.max_position_embeddings,
        storage="plain",
        tie_embeddings=config.tie_word_embeddings,
    )
