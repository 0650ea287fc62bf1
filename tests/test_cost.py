"""Cost models: bytes against published figures and parameter counts, seconds against measurements, files."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen3MoeConfig as PublishedConfig
from transformers import Qwen3MoeForCausalLM

from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import MtpConfig, Qwen3MoeConfig, RopeConfig
from ecospec_jax.cost import CostModel, byte_model, fit_seconds, read_cost, write_cost
from ecospec_jax.errors import UserError
from ecospec_jax.models import abstract
from ecospec_jax.models.gpt_oss import GptOss
from ecospec_jax.predictor_config import FrequencyConfig, TokenTableConfig
from ecospec_jax.presets import PRESETS, drafter_for
from ecospec_jax.selection import Economy
from tests import tiny, tiny_predictors
from tests.parity.fp8 import CONFIG as FP8_CONFIG


def test_published_figures_of_qwen3_235b() -> None:
    """docs/design.md section 4: bf16; the paper's bytes per verification at its two U."""
    model = byte_model(PRESETS["qwen3-235b-a22b"], 2)
    assert model.per_expert == 3 * 1536 * 4096 * 2 == pytest.approx(37.7e6, rel=2e-3)
    assert model.fixed == pytest.approx(14.7e9, rel=5e-3)
    assert model.moe_layers == 94
    assert model.step(23.7) == pytest.approx(99.3e9, rel=0.01)
    assert model.step(20.5) == pytest.approx(88.1e9, rel=0.01)
    assert model.step(0) == model.fixed


def test_published_figures_of_gpt_oss_120b() -> None:
    """docs/design.md section 4: mxfp4 experts, the rest bf16; all weights together are the checkpoint's 65 GB."""
    model = byte_model(PRESETS["gpt-oss-120b"], 2)
    assert model.per_expert == pytest.approx(13.2e6, rel=3e-3)
    assert model.fixed == pytest.approx(3.1e9, rel=5e-3)
    assert model.step(11.6) == pytest.approx(8.6e9, rel=0.01)
    embedding = 201088 * 2880 * 2
    assert model.fixed + embedding + 36 * 128 * model.per_expert == pytest.approx(65.2e9, rel=5e-3)


@pytest.mark.parametrize("storage", ["plain", "mxfp4"])
def test_bytes_of_all_gpt_oss_weights_equal_those_of_the_model(storage: str) -> None:
    config = replace(
        PRESETS["gpt-oss-20b"],
        vocab_size=101,
        hidden_size=64,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        moe_intermediate_size=96,
        num_experts=9,
        sliding_layers=(0, 2),
        expert_storage=storage,
    )
    module = nnx.eval_shape(lambda: GptOss(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    arrays = {path: variable.get_value() for path, variable in parameters(module).items()}
    total = sum(array.size * array.dtype.itemsize for array in arrays.values())
    model = byte_model(config, 2)
    assert model.fixed + 3 * 9 * model.per_expert + 2 * arrays["embedding.weight"].size == total


def test_published_figures_of_deepseek_v3_1() -> None:
    """docs/design.md section 4: fp8 and its factors; the paper's bytes per verification at its U.

    The checkpoint's published size counts in GiB, and the MTP module with its copies of embedding and head.
    """
    config = PRESETS["deepseek-v3.1"]
    model = byte_model(config, 2)
    assert model.per_expert == 3 * (2048 * 7168 + 16 * 56 * 4) == pytest.approx(44.0e6, rel=2e-3)
    assert model.fixed == pytest.approx(17.2e9, rel=5e-3)
    assert model.moe_layers == 58
    assert model.step(31.4) == pytest.approx(97.4e9, rel=0.01)
    embedding = 2 * 129280 * 7168
    read = model.fixed + 58 * 256 * model.per_expert
    assert read == pytest.approx(671e9, rel=1e-3)
    module = byte_model(config, 2, drafter=drafter_for(config), depth=1).draft + (256 - 8) * model.per_expert
    assert read + embedding + module + embedding == pytest.approx(641 * 2**30, rel=1e-3)


def bytes_by_part(module: nnx.Module) -> dict[str, int]:
    """Bytes of the arrays by the part of a module that holds them, its experts apart."""
    sizes: dict[str, int] = {}
    for path, variable in parameters(module).items():
        part = "experts" if ".experts." in path else path.split(".")[0]
        value = variable.get_value()
        sizes[part] = sizes.get(part, 0) + value.size * value.dtype.itemsize
    return sizes


@pytest.mark.parametrize("storage", ["plain", "fp8"])
def test_bytes_of_all_deepseek_weights_equal_those_of_the_modules(storage: str) -> None:
    """Ragged blocks have whole factors. The MTP module is read once a level, of its experts those that rows touch."""
    config = replace(FP8_CONFIG, storage=storage)
    part = bytes_by_part(abstract(config, jnp.dtype(jnp.bfloat16)))
    model = byte_model(config, 2)
    assert model.per_expert * config.num_experts == part["experts"]
    assert model.fixed + part["experts"] + part["embedding"] == sum(part.values())

    part = bytes_by_part(abstract(MtpConfig(config), jnp.dtype(jnp.bfloat16)))
    assert part.keys() == {"embedding", "embedding_norm", "hidden_norm", "join", "layer", "experts", "norm", "head"}
    every = sum(part.values()) - part["embedding"] - part["experts"]
    touched = 2 / 6, 1 - (1 - 2 / 6) ** 3  # of the experts: by one row, and by three
    drafter = partial(byte_model, config, 2, drafter=MtpConfig(config), branch=3)
    assert drafter(depth=1).draft == pytest.approx(every + touched[0] * part["experts"])
    assert drafter(depth=4).draft == pytest.approx(4 * every + (touched[0] + 3 * touched[1]) * part["experts"])


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
        total = sum(parameter.numel() for parameter in Qwen3MoeForCausalLM(published).parameters())
    model = byte_model(ours, 3)
    embedding = 0 if tied else 101 * 24
    assert model.fixed + model.moe_layers * 9 * model.per_expert + 3 * embedding == 3 * total
    assert model.step(2) - model.step(1) == (5 - len(dense)) * model.per_expert


# ---------------------------------------------------------------------------------------------------------------------
# Drafter and predictor


def matrices(module: nnx.Module) -> dict[str, int]:
    """Sizes of the weights by the part of the module that holds them; tables of integers are not counted."""
    sizes: dict[str, int] = {}
    for path, variable in parameters(module).items():
        value = variable.get_value()
        if jnp.issubdtype(value.dtype, jnp.floating):
            part = path.split(".")[0]
            sizes[part] = sizes.get(part, 0) + value.size
    return sizes


@pytest.mark.parametrize("depth", [1, 3])
def test_bytes_of_drafting_are_those_of_the_weights_it_reads(depth: int) -> None:
    """`fc` for the catch-up; layer and head for it and for each further level; of the embedding only rows."""
    part = matrices(tiny.make_drafter())
    norms = {"embedding_norm", "hidden_norm", "mlp_norm", "norm"}
    assert part.keys() == {"embedding", "fc", "attention", "mlp", "head"} | norms
    model = byte_model(tiny.TARGET, 2, drafter=tiny.DRAFTER, depth=depth)
    assert model.draft == 2 * (part.pop("fc") + depth * (sum(part.values()) - part["embedding"]))
    assert replace(model, draft=0.0) == byte_model(tiny.TARGET, 2)


def test_bytes_of_predicting_are_those_of_the_weights_it_reads() -> None:
    """A backbone is read once, without its embedding; tables are looked up and cost nothing."""
    part = matrices(tiny_predictors.make_backbone())
    assert part.keys() == {"embedding", "projection", "backbone", "heads"}
    model = byte_model(tiny_predictors.TARGET, 4, predictor=tiny_predictors.PREDICTOR)
    assert model.predict == 4 * (part["projection"] + part["backbone"] + part["heads"])
    routing = tiny_predictors.ROUTING
    for table in (TokenTableConfig(29, routing), FrequencyConfig(routing), None):
        assert byte_model(tiny_predictors.TARGET, 4, predictor=table).predict == 0


# ---------------------------------------------------------------------------------------------------------------------
# Cost models of one's own


SECONDS = CostModel(1e-3, 2e-5, 4, 3e-6, 4e-4, 5e-5, "seconds")


def test_a_step_costs_what_its_experts_and_rows_cost() -> None:
    assert SECONDS.step(8.0, 5) == pytest.approx(1e-3 + 8 * 4 * 2e-5 + 5 * 3e-6)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fixed", "per_expert", "per_row", "draft", "predict"])
def test_impossible_coefficients_are_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"^cost model: {name} must .*, not {value}$"):
        replace(SECONDS, **{name: value})


def test_zero_is_possible_for_what_may_be_free() -> None:
    for name in ("fixed", "per_expert"):
        with pytest.raises(UserError, match=f"^cost model: {name} must be positive"):
            replace(SECONDS, **{name: 0.0})
    assert replace(SECONDS, per_row=0.0, draft=0.0, predict=0.0).per_row == 0
    with pytest.raises(UserError, match="^cost model: moe_layers must be at least 1, not 0"):
        replace(SECONDS, moe_layers=0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cost.json"
    write_cost(path, SECONDS)
    assert read_cost(path) == SECONDS
    for content, message in (
        ('{"fixed": 1', "cannot be read"),
        ('{"fixed": 1}', "per_expert: "),
        (path.read_text().replace("seconds", "hours"), "unit: "),
        (path.read_text().replace("0.001", "0.0"), "cost model: fixed must be positive and finite, not 0.0"),
        (path.read_text().replace("0.001", "NaN"), "cost model: fixed must be positive and finite, not nan"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"^{path}: {message}") as caught:
            read_cost(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_cost(tmp_path / "absent.json")


def measurements(count: int = 200, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    rows = random.integers(1, 6, count)
    pairs = 10 * rows - random.integers(0, 20, count) + 20
    seconds = 1e-3 + 2e-5 * pairs + 3e-6 * rows
    return seconds + noise * random.normal(size=count), pairs, rows


def test_a_fit_recovers_the_cost_of_experts_and_rows() -> None:
    seconds, pairs, rows = measurements()
    model, r_squared = fit_seconds(seconds, pairs, rows, moe_layers=4, draft=4e-4, predict=5e-5)
    assert (model.fixed, model.per_expert, model.per_row) == pytest.approx((1e-3, 2e-5, 3e-6), rel=1e-6)
    assert model == replace(SECONDS, fixed=model.fixed, per_expert=model.per_expert, per_row=model.per_row)
    assert r_squared == pytest.approx(1)
    seconds, pairs, rows = measurements(2000, noise=2e-4)
    model, r_squared = fit_seconds(seconds, pairs, rows, moe_layers=4, draft=0.0, predict=0.0)
    assert (model.fixed, model.per_expert) == pytest.approx((1e-3, 2e-5), rel=0.1)
    explained = np.var(measurements(2000)[0])
    assert r_squared == pytest.approx(explained / (explained + 4e-8), abs=0.05)


def test_measurements_that_tell_nothing_are_refused() -> None:
    seconds, pairs, rows = measurements(50)
    fit = partial(fit_seconds, moe_layers=4, draft=0.0, predict=0.0)
    for few in (([], [], []), ([1.0], [2], [3]), (seconds, [7] * 50, rows)):
        with pytest.raises(UserError, match="do not differ in the experts they touch"):
            fit(*few)
    for wrong, name in ((2e-3 - 1e-6 * pairs, "per_expert"), (1e-5 * pairs - 1e-4, "fixed")):
        with pytest.raises(UserError, match=f"^cost model: {name} must be positive"):
            fit(wrong, pairs, 0 * rows)


def test_a_large_models_bytes_fit_where_they_are_weighed() -> None:
    """As integers they would overflow 32 bits inside jit."""
    cost = byte_model(PRESETS["qwen3-235b-a22b"], 2)
    price = jax.jit(Economy(cost, jnp.float32(1 / cost.step(8))).price)(jnp.int32(2000), jnp.int32(5))
    assert float(price) == pytest.approx(2000 * cost.per_expert / cost.step(8), rel=1e-5)
