"""The gpt-oss target against transformers; sequences are longer than two windows, trees cross the window's edge."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecospec_jax.models.rope import attention_factor, cos_sin, inverse_frequencies
from ecospec_jax.presets import PRESETS
from tests.parity.compare import assert_close, causal_rows
from tests.parity.target_parity import BATCH, CAPACITY, LONGEST, TargetParity, forward
from tests.parity.torch_gpt_oss import random_model, to_jax

CONFIGS = {
    "plain": {},
    "full attention first": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "window of one": {"sliding_window": 1},
    "truncated yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 900.0,
            "factor": 3.0,
            "truncate": True,
            "original_max_position_embeddings": 24,
        }
    },
    "tied head": {"tie_word_embeddings": True},
    "no grouping, one expert": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 18,
        "num_experts_per_tok": 1,
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


class TestRings(TargetParity):
    """Sliding layers keep their window and the rows of the largest tree."""

    rows = 7


class TestWholeCache(TargetParity):
    """Sliding layers keep everything."""


def test_rings_do_not_grow_with_the_context() -> None:
    """Half of the layers keep window + rows slots, whatever the capacity."""
    model = _models("plain").jax
    for capacity in (CAPACITY, 100 * CAPACITY):
        cache = model.empty_cache(BATCH, capacity, 7)
        assert [keys.shape[2] for keys in cache.keys] == [5 + 7, capacity, 5 + 7]
        assert cache.capacity == capacity
    assert {keys.shape[2] for keys in model.empty_cache(BATCH, 9, 7).keys} == {9}


@pytest.mark.parametrize("sink", [20.0, float("-inf")])
def test_sinks_at_the_extremes(sink: float) -> None:
    """A sink of +20 takes all the attention; one of -inf leaves plain softmax (which transformers computes as well)."""
    torch_model = random_model(seed=9)
    with torch.no_grad():
        for layer in torch_model.model.layers:
            layer.self_attn.sinks.fill_(sink)
    ours = to_jax(torch_model)
    tokens = np.random.default_rng(3).integers(0, 97, (BATCH, LONGEST))
    output, _ = forward(ours, causal_rows(tokens), ours.empty_cache(BATCH, CAPACITY, 1), (0, 1))
    with torch.no_grad():
        reference = torch_model(torch.tensor(tokens)).logits.numpy()
    assert_close(ours.logits(output.hidden_BRD), reference, what="logits")
    if sink > 0:  # the first layer's attention adds its output bias alone
        attention = ours.layers[0].attention
        x = ours.layers[0].attention_norm(ours.embedding(tokens))
        assert np.abs(attention.v(x)).max() > 0.5
        rows = causal_rows(tokens)
        cache = ours.empty_cache(BATCH, CAPACITY)
        angles = cos_sin(ours.config.rope, ours.config.head_dim, rows.positions_BR)
        mixed, _ = attention(x, angles, (cache.keys[0], cache.values[0]), rows.slots(CAPACITY))
        np.testing.assert_allclose(mixed, np.broadcast_to(attention.o.bias[...], mixed.shape), atol=1e-5)


def test_golden_yarn_numbers() -> None:
    """Of the published config (docs/formats.md A.4)."""
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        rope = PRESETS[name].rope
        inverse = inverse_frequencies(rope, PRESETS[name].head_dim)
        golden = {0: 1.0, 1: 0.68904430, 9: 0.031705696, 10: 0.019335000, 16: 4.5648392e-4, 24: 4.0999785e-6}
        golden[31] = 3.0235114e-7
        np.testing.assert_allclose(inverse[list(golden)], list(golden.values()), rtol=1e-6)
        assert attention_factor(rope) == pytest.approx(1.3465735902799727, rel=1e-15)
