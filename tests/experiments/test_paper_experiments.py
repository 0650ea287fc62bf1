"""The paper's tables and figures: each experiment from end to end on one tiny model, and what tables are made of."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax import Decoder
from experiments import batch_scaling, decode, latency, main_table, scattering
from experiments.batches import by_prompt, checksum, paired
from experiments.harness import ExperimentSettings, Measurement, parse_settings, read_results
from experiments.intervals import paired_p
from experiments.launches import count_launches
from tests.complaints import complaint
from tests.tiny import quick_compilation
from tests.tiny_predictors import ROUTING, write_converted, write_predictors

__all__ = ["quick_compilation"]
TEXTS = ("abc", "hello", "tops", "deal")


@dataclass
class World:
    target: Path
    predictor: Path
    prompts: Path
    decoder: Decoder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target, target_hash = write_converted(folder / "converted")
    predictor = write_predictors(folder / "predictor", target_hash)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": one, "turns": [one]}) + "\n" for one in TEXTS))
    return World(target, predictor, prompts, Decoder.load(target, predictor=predictor))


@pytest.fixture
def options(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of every experiment; they share one decoder and so what it has compiled."""
    monkeypatch.setattr(decode, "load_decoder", lambda _: world.decoder)
    return {
        "target": world.target,
        "predictor": world.predictor,
        "prompts": (f"tiny={world.prompts}",),
        "limit": 2,
        "max_new_tokens": 8,
        "ignore_eos": True,
        "out": tmp_path / "out",
    }


def rerun(run: Callable[[Any], None], settings: Any) -> tuple[list[Measurement], str]:
    """Runs an experiment twice, the second time from what is written: it must say the same. Measurements and page."""
    run(settings)
    (page,) = settings.out.glob("*.md")
    first, lines = page.read_text(), (settings.out / "results.jsonl").read_text()
    run(settings)
    assert page.read_text() == first and (settings.out / "results.jsonl").read_text() == lines
    plots = list(settings.out.glob("*.png"))
    assert plots and all(f"]({plot.name})" in first for plot in plots)
    assert "nan" not in first.split("\n- depth:")[0].replace("nan [nan, nan]", "")
    return read_results(settings.out / "results.jsonl")[1], first


def test_main_table(world: World, options: dict[str, Any]) -> None:
    settings = main_table.Settings(**options, methods=("ar", "ecospec"), temperatures=(0.0, 1.0), seeds=2)
    found, page = rerun(main_table.run, settings)
    assert len(found) == 2 * 2 * (1 + 2)
    direct = world.decoder.generate(
        [list(world.decoder.encode("abc"))], method="ecospec", max_new_tokens=8, ignore_eos=True
    )
    (one,) = (m for m in found if m.case["method"] == "ecospec" and m.case["temperature"] == 0 and m.prompt == "abc")
    assert one.values["tau"] == pytest.approx(direct.stats.tau) and one.values["u"] == pytest.approx(direct.stats.u)
    talk = decode.Conversation(settings.data_sets()["tiny"][0], 0, list(direct.generations))
    assert one.values["checksum"] == checksum([talk])
    assert page.count("tokens other than ar's in 0 of 2 runs") == 1
    assert page.count("tokens other than ar's in 0 of 4 runs") == 1
    sampled = {m.values["checksum"] for m in found if m.case["temperature"] == 1 and m.prompt == "abc"}
    assert len(sampled) == 2  # one a seed, whatever the method


def test_scattering(options: dict[str, Any]) -> None:
    settings = scattering.Settings(**options, methods=("ecospec",), budgets=(0, 4), depth=3)
    found, page = rerun(scattering.run, settings)
    plain = by_prompt(found, "u", method="ecospec", budget=0)
    assert set(plain.values()) == {float(ROUTING.k)}
    wider = by_prompt(found, "u", method="ecospec", budget=4)
    assert all(wider[key] > ROUTING.k for key in plain) and len(plain) == 2
    assert f"| ecospec | 0 | {ROUTING.k:.2f} |" in page


def test_batch_scaling(options: dict[str, Any]) -> None:
    settings = batch_scaling.Settings(**options, methods=("ecospec",), batch_sizes=(2,))
    found, page = rerun(batch_scaling.run, settings)
    cases = [(m.case["method"], m.case["batch_size"], m.case["shared_buffer"]) for m in found]
    assert cases == [
        ("ar", 2, False),
        ("ecospec", 2, False),
        ("ecospec", 2, True),
    ]
    row = next(row for row in batch_scaling.rows(found, settings) if row.name == "ecospec, shared buffer")
    ar, mine = (
        next(m for m in found if m.case == {"data_set": "tiny", **case})
        for case in (
            {"method": "ar", "batch_size": 2, "shared_buffer": False},
            {"method": "ecospec", "batch_size": 2, "shared_buffer": True},
        )
    )
    assert ar.values["verify_ms"] and mine.values["verify_ms"]
    assert row.plain_over_verify.middle == pytest.approx(ar.values["verify_ms"] / mine.values["verify_ms"])
    assert "ecospec, shared buffer" in page


def test_latency(options: dict[str, Any]) -> None:
    settings = latency.Settings(
        **options, methods=("ar", "ecospec"), budgets=(0, 1), fit_steps=2, fit_prompts=1, depth=3
    )
    found, page = rerun(latency.run, settings)
    launches = {m.case["method"]: m.values["launches"] for m in found if m.case.get("what") == "compilation"}
    assert 0 < launches["ar"] < launches["ecospec"]
    cost = next(m for m in found if m.case == {"what": "cost model"})
    assert cost.values["verifications"] == 2 * 2
    assert "training of the predictors: steps | 3 |" in page and "| 99.3 | -0.5 % | 15.2 against 14.7 |" in page


# ---------------------------------------------------------------------------------------------------------------------
# What they are made of


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(5, 2, 1), (5, 2, 3), (4, 3, 2), (6, 1, 3)])
def test_uniform_routing_by_enumeration(experts: int, per_token: int, tokens: int) -> None:
    sets = list(itertools.combinations(range(experts), per_token))
    counts = [len(set().union(*drawn)) for drawn in itertools.product(sets, repeat=tokens)]
    assert scattering.uniform_distinct(experts, per_token, tokens) == pytest.approx(sum(counts) / len(counts))


def test_crossover_by_hand() -> None:
    assert batch_scaling.crossover((1, 4), (0.9, 0.5)) == "below 1"
    assert batch_scaling.crossover((1, 4, 16), (1.4, 1.2, 1.1)) == "above 16"
    # From 1.5 at 4 to 0.5 at 16: half of the way, in the logarithm.
    assert batch_scaling.crossover((1, 4, 16), (2.0, 1.5, 0.5)) == "8.0"


def made_up(method: str, speeds: list[float], **case: Any) -> list[Measurement]:
    return [
        Measurement(
            "main_table",
            {"data_set": "a" if i < 3 else "b", "method": method, "temperature": 0.0, **case},
            {"tokens_per_second": speed, "tau": speed / 100, "u": 4.0 + i, "checksum": 0.0},
            seed=0,
            repeat=repeat,
            prompt=f"p{i}",
        )
        for i, speed in enumerate(speeds)
        for repeat in range(1)
    ]


def test_values_by_prompt_are_medians_of_repeats_and_tables_pair_them() -> None:
    ar, mine = [100.0, 200.0, 400.0, 50.0], [150.0, 250.0, 300.0, 100.0]
    found = made_up("ar", ar) + made_up("rate", mine)
    found += [
        replace(one, repeat=r, values={**one.values, "tokens_per_second": v})
        for one in found[:1]
        for r, v in ((1, 90.0), (2, 1e9))
    ]
    assert by_prompt(found, "tokens_per_second", method="ar")["a", "p0"] == 100.0
    rows = [line.split(" | ") for line in main_table.table(found, ("ar", "rate"), 0.0).splitlines()[2:]]
    assert [(row[0].strip("| "), row[1], row[3].split()[0]) for row in rows if row[1] == "rate"] == [
        ("a", "rate", "1.250"),
        ("b", "rate", "2.000"),
        ("all", "rate", f"{(1.25 + 1.5) / 2:.3f}"),
    ]
    line = main_table.tests(found, ("ar", "rate"), 0.0).splitlines()[2]
    assert line.split(" | ")[2] == f"{paired_p(np.log(mine), np.log(ar)):.4f}"
    assert line.split(" | ")[6].strip(" |") == "1.0000"
    lost = {key: value for key, value in by_prompt(found, "u", method="ar").items() if key[1] != "p0"}
    with pytest.raises(ValueError, match="same prompts"):
        paired(lost, by_prompt(found, "u", method="rate"))


def test_changed_tokens_are_counted() -> None:
    found = made_up("ar", [1.0, 2.0]) + made_up("rate", [1.0, 2.0])
    found[-1] = replace(found[-1], values={**found[-1].values, "checksum": 7.0})
    assert main_table.agreement(found, ("ar", "rate"), 0.0) == "- rate: tokens other than ar's in 1 of 2 runs"


def test_launches_of_programs_that_are_known() -> None:
    def text(function: Callable[..., Any], *arguments: Any) -> str:
        return jax.jit(function).lower(*arguments).compile().as_text() or ""

    x = jnp.ones((3, 5))
    assert count_launches(text(lambda x: x, x)) <= 1
    once = count_launches(text(lambda x: jnp.sort(x, axis=0), x))
    assert once >= 1
    assert count_launches(text(lambda x: jnp.sort(jnp.sort(x, axis=0) @ jnp.ones((5, 7)), axis=1), x)) > once
    hlo = """HloModule m

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %n = f32[2]{0} negate(%p)
}

%body (c: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], f32[2]{0}) parameter(0)
  %x = f32[2]{0} get-tuple-element(%c), index=1
  %f = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[2]{0}) tuple(%i, %f)
}

%condition (c: (s32[], f32[2])) -> pred[] {
  %c = (s32[], f32[2]{0}) parameter(0)
  ROOT %l = pred[] compare(%c, %c), direction=LT
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %g = f32[2]{0} custom-call(%a), custom_call_target="g"
  %w = (s32[], f32[2]{0}) while(%t), condition=%condition, body=%body
  ROOT %r = f32[2]{0} conditional(%p, %a, %a), branch_computations={%fused, %fused}
}
"""
    assert count_launches(hlo) == 1 + 2 + 2


@pytest.mark.parametrize(
    ("kind", "run", "change", "message"),
    [
        (main_table.Settings, main_table.run, {"methods": ("ar", "magic")}, "unknown method 'magic'"),
        (main_table.Settings, main_table.run, {"temperatures": ()}, "--temperatures names none"),
        (main_table.Settings, main_table.run, {"seeds": 0}, "--seeds must be at least 1"),
        (main_table.Settings, main_table.run, {"prompts": ("absent.jsonl",)}, "absent.jsonl: cannot be read"),
        (main_table.Settings, main_table.run, {"max_new_tokens": 2000}, "exceed the model's context"),
        (scattering.Settings, scattering.run, {"budgets": (99,)}, "budget must be in 0..18"),
        (scattering.Settings, scattering.run, {"methods": ("ecospec@absent",)}, "needs the predictor 'absent'"),
        (batch_scaling.Settings, batch_scaling.run, {"batch_sizes": (2, 1)}, "--batch-sizes must rise"),
        (batch_scaling.Settings, batch_scaling.run, {"batch_sizes": (1, 3)}, "has 2 prompts, a batch of 3"),
        (batch_scaling.Settings, batch_scaling.run, {"batch_sizes": (0, 1)}, "--batch-size must be at least 1"),
        (latency.Settings, latency.run, {"budgets": (4,)}, "needs at least two sizes"),
        (latency.Settings, latency.run, {"budgets": (4, 50)}, "budget must be in 0..10"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    kind: type[ExperimentSettings],
    run: Callable[[Any], None],
    change: dict[str, Any],
    message: str,
) -> None:
    assert message in complaint(lambda: run(kind(**options | change)), capsys)
    assert not options["out"].exists()


@pytest.mark.parametrize("module", [main_table, latency, scattering, batch_scaling])
def test_quick_is_for_the_demo_prompts(module: Any) -> None:
    settings = parse_settings(module.Settings, ["--quick"])
    assert settings.data_sets().keys() == {"demo"} and math.isfinite(settings.max_new_tokens)
