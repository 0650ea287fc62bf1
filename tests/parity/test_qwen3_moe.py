"""The Qwen3-MoE target against transformers."""

import functools
from types import SimpleNamespace

import pytest

from tests.parity.target_parity import TargetParity
from tests.parity.torch_qwen3_moe import random_model, to_jax

CONFIGS = {
    "plain": {},
    "norm_topk_prob off": {"norm_topk_prob": False},
    "dense layers listed": {"mlp_only_layers": [1]},
    "every second layer sparse": {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4},
    "tied head": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "one kv head": {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 14},
    "no grouping": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 18},
    "one expert per token": {"num_experts_per_tok": 1},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 700.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@functools.cache
def _models(name: str) -> SimpleNamespace:
    torch_model = random_model(seed=list(CONFIGS).index(name), **CONFIGS[name])
    return SimpleNamespace(torch=torch_model, jax=to_jax(torch_model))


@pytest.fixture(params=CONFIGS)
def models(request):
    """A random transformers model and ours with the same weights."""
    return _models(request.param)


class TestQwen3Moe(TargetParity):
    """Every check of `TargetParity` on every config."""
