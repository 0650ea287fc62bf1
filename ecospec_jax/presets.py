"""Published target shapes by name, for building and timing models without a download."""

from dataclasses import replace

from ecospec_jax.config import (
    DeepseekV3Config,
    DrafterConfig,
    Eagle3Config,
    GptOssConfig,
    ModelConfig,
    MtpConfig,
    Qwen3MoeConfig,
    RopeConfig,
)
from ecospec_jax.errors import UserError


def _gpt_oss(layers: int, experts: int) -> GptOssConfig:
    return GptOssConfig(
        vocab_size=201088,
        hidden_size=2880,
        num_layers=layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        moe_intermediate_size=2880,
        num_experts=experts,
        experts_per_token=4,
        sliding_window=128,
        sliding_layers=tuple(range(0, layers, 2)),
        swiglu_limit=7.0,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=150000.0,
            kind="yarn",
            factor=32.0,
            original_max_positions=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
        max_positions=131072,
        expert_storage="mxfp4",
    )


PRESETS: dict[str, ModelConfig] = {
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        experts_per_token=8,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_positions=40960,
    ),
    "qwen3-235b-a22b": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_experts=128,
        experts_per_token=8,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_positions=40960,
    ),
    "deepseek-v3.1": DeepseekV3Config(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_experts=256,
        experts_per_token=8,
        shared_experts=1,
        groups=8,
        groups_per_token=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_sparse_layer=3,
        rms_norm_eps=1e-6,
        rope=RopeConfig(
            theta=1e4,
            kind="yarn",
            factor=40.0,
            original_max_positions=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        max_positions=163840,
        storage="fp8",
    ),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
}


def get_preset(name: str, layers: int | None = None) -> ModelConfig:
    """Looks a preset up, or one with its first layers only; an unknown name is a `UserError`."""
    if name not in PRESETS:
        raise UserError(f"unknown config '{name}'; known: {', '.join(PRESETS)}")
    config = PRESETS[name]
    if layers is None:
        return config
    if isinstance(config, GptOssConfig):
        config = replace(config, sliding_layers=tuple(layer for layer in config.sliding_layers if layer < layers))
    return replace(config, num_layers=layers)


def drafter_for(target: ModelConfig) -> DrafterConfig:
    """DeepSeek's own MTP module; for others an EAGLE-3 head of the published proportions (docs/formats.md C.1).

    Such a head takes three boundaries and has an MLP six times as wide.
    """
    if isinstance(target, DeepseekV3Config):
        return MtpConfig(target)
    layers = target.num_layers
    return Eagle3Config(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=6 * target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(32000, target.vocab_size),
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=1e4),
        boundaries=tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)})),
    )
