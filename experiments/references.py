"""Small models that `train_reference` can train, each with its drafter and its way of writing conversations."""

from dataclasses import dataclass, replace

from ecospec_jax.config import DrafterConfig, Eagle3Config, GptOssConfig, ModelConfig, RopeConfig
from experiments.reference_tokenizer import HARMONY, ChatFormat


@dataclass(frozen=True)
class Reference:
    """A model to train.

    Attributes:
        target: with plain expert matrices.
        published: the same as it is published, which may store them otherwise.
        drafter: a drafter for it.
        chat: special tokens and chat template.
    """

    target: ModelConfig
    published: ModelConfig
    drafter: DrafterConfig
    chat: ChatFormat


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
REFERENCES = {
    "tiny-gpt-oss": Reference(
        target=_GPT_OSS,
        published=replace(_GPT_OSS, expert_storage="mxfp4"),
        drafter=Eagle3Config(
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
        ),
        chat=HARMONY,
    ),
}
