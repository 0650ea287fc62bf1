"""Padded experts: the same function, real weights, and the byte model's size."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder, SpecConfig, UserError, padding
from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import Qwen3MoeConfig
from ecospec_jax.cost import byte_model
from ecospec_jax.kernels import ExpertWeights, grouped_experts, native
from ecospec_jax.models import abstract
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.padding import pad_experts
from ecospec_jax.presets import PRESETS
from ecospec_jax.sharding import Placement
from tests import tiny
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]

UNITS = 21
CONFIG = replace(tiny.TARGET, num_layers=3, dense_layers=(1,))
DTYPES = ("float32", "bfloat16")
needs_native = pytest.mark.skipif(
    jax.default_backend() != "cpu" or native.unavailable() is not None, reason="bits are kept by the CPU routine"
)


def target_in(dtype: str, config: Qwen3MoeConfig = CONFIG) -> Qwen3Moe:
    """A model of its own, since padding changes it in place."""
    return tiny.randomised(lambda: Qwen3Moe(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)), 0)


def experts_of(target: Qwen3Moe) -> dict[str, np.ndarray]:
    found = {path: variable.get_value() for path, variable in parameters(target).items() if ".experts." in path}
    return {path: np.asarray(value.astype(jnp.float32)) for path, value in found.items()}


def first_experts(target: Qwen3Moe) -> ExpertWeights:
    layer = target.layers[0].moe
    assert layer is not None
    return layer.experts.weights


def decoder_of(target: Qwen3Moe) -> Decoder:
    return Decoder(target, tiny.make_drafter(), eos_ids=())


@pytest.mark.parametrize("dtype", DTYPES)
@needs_native
def test_logits_and_routing_keep_their_bits(dtype: str) -> None:
    plain, padded = decoder_of(target_in(dtype)), decoder_of(pad_experts(target_in(dtype), UNITS))
    for length in (1, 5, 40):
        ids = tiny.prompt(length, seed=length)
        np.testing.assert_array_equal(padded.next_token_logits(ids), plain.next_token_logits(ids))
        np.testing.assert_array_equal(padded.routing([ids])[0], plain.routing([ids])[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["ar", "likelihood"])
@needs_native
def test_tokens_and_counters_are_those_of_the_unpadded_model(dtype: str, method: str) -> None:
    plain, padded = (
        decoder_of(target).generate(tiny.PROMPTS, method=method, spec=SpecConfig(), max_new_tokens=24, batch_size=3)
        for target in (target_in(dtype), pad_experts(target_in(dtype), UNITS))
    )
    assert padded.generations == plain.generations
    assert (padded.stats.tau, padded.stats.u) == (plain.stats.tau, plain.stats.u)


def test_other_backends_differ_by_rounding_at_most() -> None:
    config = replace(CONFIG, moe_intermediate_size=48)
    x_TD = np.random.default_rng(0).normal(size=(24, config.hidden_size)).astype(np.float32)
    ids_TK = np.random.default_rng(1).integers(0, config.num_experts, (24, 3))
    plain, padded = (
        np.asarray(grouped_experts(x_TD, ids_TK, np.ones((24, 3), np.float32), first_experts(target), backend="xla"))
        for target in (target_in("float32", config), pad_experts(target_in("float32", config), 200))
    )
    np.testing.assert_allclose(padded, plain, rtol=0, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_units_are_real_weights_that_add_nothing(dtype: str) -> None:
    before, target = experts_of(target_in(dtype)), pad_experts(target_in(dtype), 500)
    width = CONFIG.moe_intermediate_size
    seen = []
    for path, after in experts_of(target).items():
        if path.endswith("down.weight"):
            np.testing.assert_array_equal(after[:, :, :width], before[path])
            assert after.shape[2] == width + 500 and not after[:, :, width:].any()
            continue
        np.testing.assert_array_equal(after[:, :width], before[path])
        new = after[:, width:]
        assert new.shape[1] == 500 and np.mean(new != 0) > 0.999
        np.testing.assert_allclose(new.std(axis=(1, 2)), before[path].std(axis=(1, 2)), rtol=0.05)
        seen += [np.round(expert.ravel()[:64] / expert.std(), 1) for expert in new]
    assert len({expert.tobytes() for expert in seen}) == len(seen) == 2 * 2 * CONFIG.num_experts
    assert {str(variable.get_value().dtype) for variable in parameters(target).values()} == {dtype}


def test_the_byte_model_counts_the_padding() -> None:
    before, after = byte_model(CONFIG, 4), byte_model(pad_experts(target_in("float32"), UNITS).config, 4)
    width = CONFIG.moe_intermediate_size
    assert after.per_expert == before.per_expert * (width + UNITS) / width
    assert after.fixed == before.fixed


def test_no_units_change_nothing() -> None:
    target = target_in("float32")
    state = jax.tree.leaves(nnx.state(target))
    assert pad_experts(target, 0) is target and target.config == CONFIG
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(target)), state, strict=True))


def test_a_seed_repeats_its_numbers() -> None:
    one, same, other = (experts_of(pad_experts(target_in("float32"), UNITS, seed)) for seed in (3, 3, 4))
    path = "layers.0.moe.experts.up.weight"
    np.testing.assert_array_equal(one[path], same[path])
    assert (one[path] != other[path]).any()


def test_impossible_padding_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_in("float32")
    with pytest.raises(UserError, match="cannot be padded by -1 hidden units"):
        pad_experts(target, -1)
    with pytest.raises(UserError, match=r"padded by 1000000000000 hidden units need 2016000\.0 GB more memory"):
        pad_experts(target, 10**12)
    monkeypatch.setattr(padding, "_free_bytes", lambda array: 1000)
    with pytest.raises(UserError, match="0.0 GB are available"):
        pad_experts(target, 1)
    assert target.config == CONFIG
    with pytest.raises(UserError, match="not with a placement"):
        Decoder.load("absent", pad_ffn=1, placement=Placement.create("tp1"))


def test_random_weights_are_padded() -> None:
    decoder = Decoder.with_random_weights(tiny.TARGET, tiny.DRAFTER, dtype="float32", pad_ffn=UNITS)
    assert decoder.target.config.moe_intermediate_size == tiny.TARGET.moe_intermediate_size + UNITS


@pytest.mark.parametrize(
    ("preset", "sizes", "named"),
    [
        ("gpt-oss-20b", {"moe_intermediate_size": 96, "num_experts": 5}, "layers.0.moe.experts.down.blocks"),
        ("deepseek-v3.1", {"moe_intermediate_size": 40, "first_sparse_layer": 1}, "layers.1.moe.experts.down.scales"),
    ],
)
def test_quantised_experts_are_refused(preset: str, sizes: dict[str, int], named: str) -> None:
    small = {"hidden_size": 64, "num_layers": 2, "vocab_size": 31, "num_heads": 8}
    if preset == "gpt-oss-20b":
        small["sliding_layers"] = (0,)
    target = abstract(replace(PRESETS[preset], **(small | sizes)), jnp.dtype(jnp.float32))
    with pytest.raises(UserError, match=f"experts with '{named}' cannot be padded"):
        pad_experts(target, 32)
