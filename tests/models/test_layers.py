"""RMSNorm, router and expert layer on their own."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

from ecospec_jax.models.layers import RMSNorm
from ecospec_jax.models.moe import Experts, MoELayer, SoftmaxRouter

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
EXPERTS, HIDDEN, FFN, K = 9, 14, 22, 3


@pytest.mark.parametrize("theirs", [Qwen3MoeRMSNorm, DeepseekV3RMSNorm, GptOssRMSNorm])
def test_rms_norm_is_bitwise_transformers_in_bfloat16(theirs: type[torch.nn.Module]) -> None:
    """Normalise in float32; then round and multiply, but gpt-oss multiplies first.

    Inputs have few bits, so that no order of summation matters.
    """
    random = np.random.default_rng(0)
    x = random.integers(-63, 64, (40, 64)) / 16
    weight = 1 + random.integers(-100, 100, 64) / 128
    reference = theirs(64, 1e-6).to(torch.bfloat16)
    with torch.no_grad():
        reference.weight.copy_(torch.tensor(weight))
        expected = reference(torch.tensor(x).to(torch.bfloat16)).float().numpy()

    def ours(scale_in_float32: bool) -> np.ndarray:
        norm = RMSNorm(64, 1e-6, dtype=BF16, scale_in_float32=scale_in_float32)
        norm.weight.set_value(jnp.asarray(weight, BF16))
        y = norm(jnp.asarray(x, BF16))
        assert y.dtype == BF16
        return np.asarray(y, np.float32)

    first = theirs is GptOssRMSNorm
    np.testing.assert_array_equal(ours(scale_in_float32=first), expected)
    assert (ours(scale_in_float32=not first) != expected).any(), "the inputs do not tell the two orders apart"


@pytest.mark.parametrize("normalise", [True, False])
def test_router_equals_transformers(normalise: bool) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=K, norm_topk_prob=normalise
    )
    random = np.random.default_rng(1)
    x_TD = random.normal(size=(20, HIDDEN)).astype(np.float32)
    weight = 0.5 * random.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)
    reference = Qwen3MoeTopKRouter(config)
    with torch.no_grad():
        reference.weight.copy_(torch.tensor(weight))
        logits, weights_TK, ids_TK = reference(torch.tensor(x_TD))
    ranked = np.sort(torch.softmax(logits, -1).numpy())[:, ::-1]
    assert (ranked[:, :K] - ranked[:, 1 : K + 1]).min() > 1e-4, "a near-tie decides: choose another seed"

    router = SoftmaxRouter(HIDDEN, EXPERTS, K, normalise=normalise, dtype=F32, rngs=nnx.Rngs(0))
    router.gate.weight.set_value(jnp.asarray(weight))
    ours_ids, ours_weights = router(jnp.asarray(x_TD))
    np.testing.assert_array_equal(ours_ids, ids_TK.numpy())
    np.testing.assert_allclose(ours_weights, weights_TK.numpy(), rtol=1e-5)
    sums = np.asarray(ours_weights).sum(-1)
    assert np.allclose(sums, 1, atol=1e-6) if normalise else (sums < 0.99).all()


def test_router_breaks_ties_to_the_lower_expert() -> None:
    router = SoftmaxRouter(HIDDEN, EXPERTS, K, normalise=True, dtype=F32, rngs=nnx.Rngs(0))
    router.gate.weight.set_value(jnp.zeros((EXPERTS, HIDDEN)))
    assert router(jnp.ones((2, HIDDEN)))[0].tolist() == [[0, 1, 2]] * 2


def test_dead_rows_route_nowhere() -> None:
    """F.29: id E, output zero; what they hold, and NaN in experts that only they would choose, change no live row."""
    apply = nnx.jit(lambda layer, x_BRD, live_BR: layer(x_BRD, live_BR))
    layer = MoELayer(
        SoftmaxRouter(HIDDEN, EXPERTS, K, normalise=True, dtype=F32, rngs=nnx.Rngs(0)),
        Experts(EXPERTS, HIDDEN, FFN, dtype=F32, rngs=nnx.Rngs(1)),
    )
    random = np.random.default_rng(2)
    x_BRD = random.normal(size=(2, 4, HIDDEN)).astype(np.float32)
    live_BR = np.array([[True, False, True, False], [False, True, False, False]])
    y_BRD, ids_BRK = apply(layer, x_BRD, live_BR)
    all_ids = np.asarray(apply(layer, x_BRD, np.ones((2, 4), bool))[1])
    np.testing.assert_array_equal(np.asarray(ids_BRK)[live_BR], all_ids[live_BR])
    assert (np.asarray(ids_BRK)[~live_BR] == EXPERTS).all()
    assert (np.asarray(y_BRD)[~live_BR] == 0).all()

    only_dead = sorted(set(all_ids[~live_BR].ravel()) - set(all_ids[live_BR].ravel()))
    assert only_dead, "every expert has a live row: choose another seed"
    for parameter in (layer.experts.gate.weight, layer.experts.up.weight, layer.experts.down.weight):
        parameter.set_value(parameter[...].at[jnp.array(only_dead)].set(jnp.nan))
    x_BRD[~live_BR] = random.normal(size=x_BRD[~live_BR].shape) * 100
    again_BRD, _ = apply(layer, x_BRD, live_BR)
    np.testing.assert_array_equal(again_BRD, y_BRD)
