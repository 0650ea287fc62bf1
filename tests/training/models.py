"""Tiny gpt-oss models for training, with unequal dimensions."""

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx

from ecospec_jax.config import GptOssConfig, RopeConfig
from ecospec_jax.models.gpt_oss import GptOss
from tests import tiny

GPT_OSS = GptOssConfig(
    vocab_size=29,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    moe_intermediate_size=64,
    num_experts=5,
    experts_per_token=3,
    sliding_window=7,
    sliding_layers=(0,),
    swiglu_limit=7.0,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=20, truncate=False),
    max_positions=80,
    expert_storage="plain",
)


def make_gpt_oss(seed: int = 3) -> GptOss:
    return tiny.randomised(lambda: GptOss(GPT_OSS, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)), seed)


def stored(config: GptOssConfig) -> GptOssConfig:
    """As it is published."""
    return replace(config, expert_storage="mxfp4")
