"""The byte model against published figures and against the parameter counts of transformers."""

import pytest
import torch
from transformers import Qwen3MoeConfig as PublishedConfig
from transformers import Qwen3MoeForCausalLM

from ecospec_jax.config import Qwen3MoeConfig, RopeConfig
from ecospec_jax.cost import byte_model
from ecospec_jax.presets import PRESETS


def test_published_figures_of_qwen3_235b() -> None:
    """docs/design.md section 4: bf16; the paper's bytes per verification at its two U."""
    model = byte_model(PRESETS["qwen3-235b-a22b"], 2)
    assert model.per_expert == 3 * 1536 * 4096 * 2 == pytest.approx(37.7e6, rel=2e-3)
    assert model.fixed == pytest.approx(14.7e9, rel=5e-3)
    assert model.moe_layers == 94
    assert model.step(23.7) == pytest.approx(99.3e9, rel=0.01)
    assert model.step(20.5) == pytest.approx(88.1e9, rel=0.01)
    assert model.step(0) == model.fixed


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dense", [(), (0, 2)])
def test_bytes_of_all_weights_equal_the_parameter_count(tied: bool, bias: bool, dense: tuple[int, ...]) -> None:
    """Fixed bytes, every expert once, and the embedding, of which a pass reads rows only."""
    ours = Qwen3MoeConfig(
        vocab_size=101,
        hidden_size=24,
        num_layers=5,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=34,
        moe_intermediate_size=14,
        num_experts=9,
        experts_per_token=3,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
        max_positions=64,
        dense_layers=dense,
        tie_embeddings=tied,
        attention_bias=bias,
    )
    published = PublishedConfig(
        vocab_size=101,
        hidden_size=24,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        intermediate_size=34,
        moe_intermediate_size=14,
        num_experts=9,
        num_experts_per_tok=3,
        mlp_only_layers=list(dense),
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Qwen3MoeForCausalLM(published).parameters())
    model = byte_model(ours, 3)
    embedding = 0 if tied else 101 * 24
    assert model.fixed + model.moe_layers * 9 * model.per_expert + 3 * embedding == 3 * parameters
    assert model.step(2) - model.step(1) == (5 - len(dense)) * model.per_expert
