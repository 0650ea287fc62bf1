"""Published target shapes by name, for building and timing models without a download."""

from ecospec_jax.config import Eagle3Config, ModelConfig, Qwen3MoeConfig, RopeConfig
from ecospec_jax.errors import UserError

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
}


def get_preset(name: str) -> ModelConfig:
    """Looks a preset up; an unknown name is a `UserError`."""
    if name not in PRESETS:
        raise UserError(f"unknown config '{name}'; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def eagle3_for(target: ModelConfig) -> Eagle3Config:
    """An EAGLE-3 head of the published proportions: three boundaries, MLP six times as wide (docs/formats.md C.1)."""
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
