"""Rotary embedding: golden values of docs/formats.md A.4, and transformers' own functions."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, apply_rotary_pos_emb

from ecospec_jax.config import RopeConfig
from ecospec_jax.models.rope import attention_factor, cos_sin, inverse_frequencies, rotate

GPT_OSS = RopeConfig(theta=150000.0, kind="yarn", factor=32.0, original_max_positions=4096, truncate=False)
DEEPSEEK = RopeConfig(
    theta=10000.0, kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0
)
GOLDEN = {
    "gpt-oss": (
        GPT_OSS,
        1.3465735902799727,
        {
            0: 1.0,
            1: 0.68904430,
            9: 0.031705696,
            10: 0.019335000,
            16: 4.5648392e-4,
            24: 4.0999785e-6,
            31: 3.0235114e-7,
        },
    ),
    "deepseek": (
        DEEPSEEK,
        1.0,
        {0: 1.0, 1: 0.74989420, 9: 0.074989416, 10: 0.056234129, 16: 5.5000004e-3, 24: 2.5e-5, 31: 3.3338035e-6},
    ),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3 other factors": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 16.0},
    "yarn": YARN,
    "yarn untruncated": YARN | {"truncate": False},
    "yarn betas": YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn attention factor": YARN | {"attention_factor": 0.7},
    "yarn mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn one mscale": YARN | {"mscale": 0.7},
    "yarn factor 1": YARN | {"factor": 1.0},
    "yarn low below zero": YARN | {"original_max_position_embeddings": 128},
}
HEAD_DIM = 20


def _published(name: str) -> tuple[RopeConfig, Qwen3MoeRotaryEmbedding]:
    """Our config, and transformers' module for the same Hugging Face values."""
    fields = {"rope_theta": 7000.0} | PUBLISHED[name]
    config = transformers.Qwen3MoeConfig(head_dim=HEAD_DIM, rope_parameters=fields, max_position_embeddings=16384)
    renamed = {
        "rope_theta": "theta",
        "rope_type": "kind",
        "original_max_position_embeddings": "original_max_positions",
    }
    return RopeConfig(**{renamed.get(key, key): value for key, value in fields.items()}), Qwen3MoeRotaryEmbedding(
        config
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name: str) -> None:
    rope, factor, frequencies = GOLDEN[name]
    inverse = inverse_frequencies(rope, 64)
    assert inverse.shape == (32,) and inverse.dtype == np.float32
    for pair, value in frequencies.items():
        assert inverse[pair] == pytest.approx(value, rel=2e-7), f"pair {pair}"
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_transformers(name: str) -> None:
    rope, module = _published(name)
    np.testing.assert_allclose(inverse_frequencies(rope, HEAD_DIM), module.inv_freq.numpy(), rtol=2e-6)
    assert attention_factor(rope) == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_equals_transformers(dtype: str) -> None:
    """Unequal positions in a batch; in bfloat16 the tables are rounded first, as transformers does."""
    rope, module = _published("yarn")
    random = np.random.default_rng(0)
    x_BNRH = random.normal(size=(2, 3, 5, HEAD_DIM)).astype(np.float32)
    positions_BR = random.integers(0, 400, (2, 5))
    ours = rotate(jnp.asarray(x_BNRH, dtype), *cos_sin(rope, HEAD_DIM, jnp.asarray(positions_BR)))
    x = torch.tensor(x_BNRH).to(getattr(torch, dtype))
    theirs, _ = apply_rotary_pos_emb(x, x, *module(x, torch.tensor(positions_BR)))
    assert ours.dtype == jnp.dtype(dtype)
    bound = 2e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(np.asarray(ours, np.float32), theirs.float().numpy(), atol=bound * np.abs(x_BNRH).max())
