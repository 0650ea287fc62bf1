"""Small models that `train_reference` can train, each with its drafter and its way of writing conversations."""

from dataclasses import dataclass, replace

from ecospec_jax.config import (
    DeepseekV3Config,
    DrafterConfig,
    Eagle3Config,
    GptOssConfig,
    ModelConfig,
    MtpConfig,
    RopeConfig,
)
from experiments.reference_tokenizer import DEEPSEEK, HARMONY, ChatFormat


@dataclass(frozen=True)
class Reference:
    """A model to train.

    Attributes:
        target, drafter: with plain matrices.
        published, published_drafter: the same as they are published, which may store matrices otherwise.
        chat: special tokens and chat template.
        rounded_share: share of the target's training, its last, in which experts compute with the MXFP4 numbers that
            they will be stored as. Formats of eight bits cost too little to train for.
    """

    target: ModelConfig
    published: ModelConfig
    drafter: DrafterConfig
    published_drafter: DrafterConfig
    chat: ChatFormat
    rounded_share: float = 0.0


_GPT_OSS = GptOssConfig(
    vocab_size=4096,
    hidden_size=160,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    moe_intermediate_size=96,
    num_experts=32,
    experts_per_token=4,
    sliding_window=64,
    sliding_layers=(0, 2),
    swiglu_limit=7.0,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=150000.0, kind="yarn", factor=8.0, original_max_positions=256, truncate=False),
    max_positions=2048,
    expert_storage="plain",
)
_GPT_OSS_DRAFTER = Eagle3Config(
    hidden_size=160,
    target_hidden_size=160,
    intermediate_size=384,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    vocab_size=4096,
    draft_vocab_size=2048,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    boundaries=(1, 2, 4),
    norm_before_fc=True,
)
# Every dimension of a matrix is at most one FP8 block or whole blocks: transformers' own loading is right for no other.
_DEEPSEEK = DeepseekV3Config(
    vocab_size=4096,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    q_lora_rank=112,
    kv_lora_rank=96,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=96,
    intermediate_size=384,
    moe_intermediate_size=96,
    num_experts=32,
    experts_per_token=4,
    shared_experts=1,
    groups=4,
    groups_per_token=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_sparse_layer=1,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0, kind="yarn", factor=8.0, original_max_positions=256, mscale=1.0, mscale_all_dim=1.0),
    max_positions=2048,
    storage="plain",
)
_DEEPSEEK_FP8 = replace(_DEEPSEEK, storage="fp8")
REFERENCES = {
    "tiny-gpt-oss": Reference(
        target=_GPT_OSS,
        published=replace(_GPT_OSS, expert_storage="mxfp4"),
        drafter=_GPT_OSS_DRAFTER,
        published_drafter=_GPT_OSS_DRAFTER,
        chat=HARMONY,
        rounded_share=0.4,
    ),
    "tiny-deepseek-v3": Reference(
        target=_DEEPSEEK,
        published=_DEEPSEEK_FP8,
        drafter=MtpConfig(_DEEPSEEK),
        published_drafter=MtpConfig(_DEEPSEEK_FP8),
        chat=DEEPSEEK,
    ),
}
