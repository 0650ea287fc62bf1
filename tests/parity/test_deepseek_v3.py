"""The DeepSeek-V3 target against transformers, and FP8 against its definition (docs/formats.md A.3, B.2)."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from ecospec_jax.kernels import Fp8
from ecospec_jax.models.deepseek_v3 import DeepseekV3
from ecospec_jax.models.rope import attention_factor, cos_sin, inverse_frequencies, score_factor
from ecospec_jax.presets import PRESETS
from tests.parity.compare import Tree, assert_close, causal_rows, relative_error, tree_rows
from tests.parity.fp8 import CONFIG as FP8_CONFIG
from tests.parity.fp8 import random_fp8, widened
from tests.parity.target_parity import BATCH, CAPACITY, LONGEST, TargetParity, forward
from tests.parity.torch_deepseek_v3 import random_model, to_jax

F32 = jnp.dtype(jnp.float32)
YARN = {"rope_type": "yarn", "rope_theta": 900.0, "factor": 3.0, "original_max_position_embeddings": 24}
CONFIGS = {
    "plain": {},
    "no dense layer": {"first_k_dense_replace": 0},
    "one sparse layer, one shared expert": {"first_k_dense_replace": 3, "n_shared_experts": 1},
    "norm_topk_prob off": {"norm_topk_prob": False},
    "one group": {"n_group": 1, "topk_group": 1},
    "plain rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "mscales that differ": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "no mscale": {"rope_parameters": YARN},
    "tied head": {"tie_word_embeddings": True},
}


@functools.cache
def _models(name: str, *, expanded: bool = False) -> SimpleNamespace:
    torch_model = random_model(seed=list(CONFIGS).index(name), **CONFIGS[name])
    ours = to_jax(torch_model)
    if expanded:
        for layer in ours.layers:
            layer.attention.most_absorbed = 0
    return SimpleNamespace(torch=torch_model, jax=ours)


class TestAbsorbed(TargetParity):
    """Attention in the space of the latent."""

    @pytest.fixture(params=CONFIGS)
    def models(self, request):
        """A random transformers model and ours with the same weights."""
        return _models(request.param)


class TestExpanded(TargetParity):
    """Keys and values expanded, as for many rows."""

    @pytest.fixture(params=["plain", "mscales that differ"])
    def models(self, request):
        """The same, however few the rows."""
        return _models(request.param, expanded=True)


def _sorted_by_id(ids_TK, weights_TK) -> tuple[np.ndarray, np.ndarray]:
    order_TK = np.argsort(np.asarray(ids_TK), axis=1)
    return tuple(np.take_along_axis(np.asarray(value), order_TK, axis=1) for value in (ids_TK, weights_TK))


@pytest.mark.parametrize("bias", [-3.0, -0.5])
def test_choices_with_negative_biased_scores(bias: float) -> None:
    """Groups are masked with -inf: a mask of 0 would beat every negative score."""
    torch_model = random_model(seed=11)
    with torch.no_grad():
        for layer in torch_model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.add_(bias)
    ours = to_jax(torch_model)
    x_TD = np.random.default_rng(0).normal(size=(200, 40)).astype(np.float32)
    for mine, theirs in zip(ours.layers[1:], torch_model.model.layers[1:], strict=True):
        ids_TK, weights_TK = _sorted_by_id(*mine.moe.router(jnp.asarray(x_TD)))
        with torch.no_grad():
            _, their_weights_TK, their_ids_TK = theirs.mlp.gate(torch.tensor(x_TD))
        expected_ids_TK, expected_weights_TK = _sorted_by_id(their_ids_TK, their_weights_TK)
        np.testing.assert_array_equal(ids_TK, expected_ids_TK)
        assert_close(weights_TK, expected_weights_TK)


def test_groups_are_judged_by_their_two_best() -> None:
    """The best expert's group loses to groups of two good ones; the bias is not in the weights."""
    router = to_jax(random_model(seed=13)).layers[1].moe.router
    biases = np.full(12, -4.0, np.float32)
    biases[0] = 3.0  # group 0: one excellent expert
    biases[[3, 4, 6, 7, 9, 10]] = 2.0  # groups 1 to 3: two good ones each
    router.gate.weight.set_value(jnp.zeros_like(router.gate.weight[...]))
    router.bias.set_value(jnp.asarray(biases))
    ids_TK, weights_TK = router(jnp.ones((1, 40)))
    assert set(np.asarray(ids_TK)[0].tolist()) <= {3, 4, 6, 7, 9, 10}
    np.testing.assert_allclose(weights_TK, 1.7 / 4, rtol=1e-6)


def test_without_routed_experts_the_shared_one_remains() -> None:
    """It is neither scaled nor gated."""
    torch_model = random_model(seed=12)
    layer = to_jax(torch_model).layers[2].moe
    down = layer.experts.down.weight
    down.set_value(jnp.zeros_like(down[...]))
    x_BRD = np.random.default_rng(1).normal(size=(1, 5, 40)).astype(np.float32)
    y_BRD, _ = layer(jnp.asarray(x_BRD), jnp.ones((1, 5), bool))
    with torch.no_grad():
        shared = torch_model.model.layers[2].mlp.shared_experts(torch.tensor(x_BRD))
    assert_close(y_BRD, shared.numpy())


def _attend(model: DeepseekV3, rows: int = 7) -> np.ndarray:
    """One attention layer over rows and cached tokens, all random."""
    attention, random = model.layers[1].attention, np.random.default_rng(2)
    block = causal_rows(random.integers(0, 97, (2, rows)), context_B=[0, 3])
    x_BRD = jnp.asarray(random.normal(size=(2, rows, 40)).astype(np.float32))
    buffers = tuple(jnp.asarray(random.normal(size=(2, 1, 16, n)).astype(np.float32)) for n in (18, 6))
    angles = cos_sin(model.config.rope, model.config.rotary_dim, block.positions_BR)
    return np.asarray(attention(x_BRD, angles, buffers, block.slots(16))[0])


def test_absorbed_equals_expanded() -> None:
    absorbed, expanded = _attend(_models("plain").jax), _attend(_models("plain", expanded=True).jax)
    assert_close(absorbed, expanded, bound=1e-5)
    assert (absorbed != expanded).any()  # two ways, really


def test_latent_norms_keep_their_own_eps() -> None:
    """1e-6, though the config says 0.1; that eps in their place would be seen."""
    torch_model = random_model(seed=14, rms_norm_eps=0.1)
    ours = to_jax(torch_model)
    tokens = np.random.default_rng(5).integers(0, 97, (BATCH, LONGEST))
    with torch.no_grad():
        expected = torch_model(torch.tensor(tokens)).logits.numpy()

    def logits() -> np.ndarray:
        output, _ = forward(ours, causal_rows(tokens), ours.empty_cache(BATCH, CAPACITY), (0, 1))
        return np.asarray(ours.logits(output.hidden_BRD))

    assert_close(logits(), expected)
    for layer in ours.layers:
        layer.attention.q_a_norm.eps = layer.attention.kv_a_norm.eps = 0.1
    assert relative_error(logits(), expected) > 1e-3


def test_fp8_equals_its_widened_weights() -> None:
    """Ragged blocks, arbitrary factors, dense projections and experts; many rows, then a tree behind them."""
    quantised = random_fp8(lambda: DeepseekV3(FP8_CONFIG, dtype=F32, rngs=nnx.Rngs(0)))
    plain = widened(quantised)
    tokens = np.random.default_rng(6).integers(0, FP8_CONFIG.vocab_size, (BATCH, LONGEST))
    tree = Tree([-1, 0, 0, 1, 1, 2])
    results = []
    for model in (quantised, plain):
        output, cache = forward(model, causal_rows(tokens), model.empty_cache(BATCH, CAPACITY), (0, 1))
        drafted = tree_rows(tokens[:, :6], [tree] * BATCH, [LONGEST] * BATCH)
        after, _ = forward(model, drafted, cache, (0, 1))
        hidden_BRD = jnp.concatenate([output.hidden_BRD, after.hidden_BRD], axis=1)
        ids_LBRK = np.concatenate([output.expert_ids_LBRK, after.expert_ids_LBRK], axis=2)
        results.append((np.asarray(model.logits(hidden_BRD)), np.sort(ids_LBRK)))
    (logits, ids_LBRK), (expected, expected_ids_LBRK) = results
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(ids_LBRK, expected_ids_LBRK)
    assert_close(logits, expected)


def test_a_factor_holds_for_its_128_by_128_codes() -> None:
    """By the index formula; [192, 256] has blocks of 128 and of 64 rows, not two of 96."""
    random = np.random.default_rng(7)
    codes = random.normal(size=(192, 256)).astype(jnp.float8_e4m3fn)
    factors = random.uniform(0.1, 3, (2, 2)).astype(np.float32)
    row, column = np.indices(codes.shape)
    expected = codes.astype(np.float32) * factors[row // 128, column // 128]
    np.testing.assert_array_equal(Fp8(jnp.asarray(codes), jnp.asarray(factors)).widen(), expected)


def test_golden_numbers_of_the_published_config() -> None:
    """docs/formats.md A.3 and A.4."""
    config = PRESETS["deepseek-v3.1"]
    inverse = inverse_frequencies(config.rope, config.qk_rope_head_dim)
    golden = {0: 1.0, 1: 0.74989420, 9: 0.074989416, 10: 0.056234129, 16: 5.5000004e-3, 24: 2.5e-5, 31: 3.3338035e-6}
    np.testing.assert_allclose(inverse[list(golden)], list(golden.values()), rtol=1e-6)
    assert attention_factor(config.rope) == 1.0
    assert (128 + 64) ** -0.5 * score_factor(config.rope) == pytest.approx(0.1352337789, rel=1e-9)


def test_latent_cache_is_small() -> None:
    """The latent and one rotated key a token, whatever the number of heads."""
    cache = _models("plain").jax.empty_cache(BATCH, CAPACITY)
    assert {buffer.shape for buffer in cache.keys} == {(BATCH, 1, CAPACITY, 18)}
    assert {buffer.shape for buffer in cache.values} == {(BATCH, 1, CAPACITY, 6)}


def test_the_correction_bias_is_float32_in_a_bfloat16_model() -> None:
    model = nnx.eval_shape(lambda: DeepseekV3(FP8_CONFIG, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0)))
    router = model.layers[1].moe.router
    assert router.bias.get_value().dtype == jnp.float32
    assert router.gate.weight.get_value().dtype == jnp.bfloat16
