"""The fit of seconds: what is measured, what is refused, and that decoding takes the result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecospec_jax import Decoder, SpecConfig
from ecospec_jax.cost import CostModel, read_cost, write_cost
from ecospec_jax.errors import UserError
from experiments import decode, fit_cost
from experiments.fit_cost import Sample, Settings, fit, measure
from tests.complaints import complaint
from tests.tiny import quick_compilation
from tests.tiny_predictors import ROUTING, write_converted

__all__ = ["quick_compilation"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    prompts = [{"id": text, "turns": [text]} for text in ("abc", "hello")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    target, _ = write_converted(tmp_path / "converted")
    options = {"budgets": (0, 3), "steps": 4, "repeats": 2, "limit": 1, "out": tmp_path / "cost.json"}
    return Settings(prompts=tmp_path / "prompts.jsonl", target=target, **options)


def test_measures_what_decoding_does(settings: Settings) -> None:
    """Rows, and experts of as many tokens; steps advance as in decoding."""
    assert settings.target is not None
    decoder = Decoder.load(settings.target)
    ids = decoder.encode("abc")
    samples = list(measure(decoder, settings, [ids]))
    assert [one.rows for one in samples] == [1] * 4 + [4] * 4
    assert all(one.seconds > 0 and one.draft > 0 and one.predict == 0 for one in samples)
    assert [one.pairs for one in samples[:4]] == [ROUTING.layers * ROUTING.k] * 4
    stats = decoder.generate([ids], method="likelihood", spec=SpecConfig(budget=3), max_new_tokens=5).stats
    first = samples[4 : 4 + stats.verifications]
    assert sum(one.pairs for one in first) == sum(stats.distinct_by_layer)


def test_fit_and_what_it_refuses() -> None:
    seconds = [(1e-3 + 2e-6 * pairs + 1e-5 * rows, pairs, rows) for pairs, rows in ((8, 1), (14, 3), (19, 3), (30, 8))]
    samples = [Sample(total, pairs, rows, 3e-4, 1e-4) for total, pairs, rows in seconds]
    cost, r_squared = fit(samples, 2)
    assert (cost.fixed, cost.per_expert, cost.per_row) == pytest.approx((1e-3, 2e-6, 1e-5))
    assert (cost.draft, cost.predict, cost.unit, r_squared) == (3e-4, 1e-4, "seconds", pytest.approx(1))
    falling = [replace(one, seconds=1e-3 / one.pairs) for one in samples]
    with pytest.raises(UserError, match="4 verifications do not show what a pass and an expert cost"):
        fit(falling, 2)


def test_writes_a_cost_model_that_decoding_takes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Sample(1e-3 + 1e-6 * pairs, pairs, 1 + pairs // 8, 1e-4, 0.0) for pairs in range(8, 40)]
    monkeypatch.setattr(fit_cost, "measure", lambda *_: samples)
    fit_cost.run(settings)
    assert "r^2 1.000 over 32 verifications" in capsys.readouterr().out
    cost = read_cost(settings.out)
    assert cost.moe_layers == ROUTING.layers
    asked = decode.Settings(target=settings.target, prompts=settings.prompts, cost=settings.out)
    assert decode.load_decoder(asked).cost_model("rate-oracle", SpecConfig()) == cost

    write_cost(tmp_path / "other.json", CostModel(1.0, 1.0, moe_layers=9))
    line = complaint(lambda: decode.run(replace(asked, cost=tmp_path / "other.json")), capsys)
    assert line.endswith("other.json: of a model with 9 MoE layers, not 2")
    settings.out.write_text(settings.out.read_text().replace('"fixed": ', '"fixed": -'))
    assert "fixed must be positive" in complaint(lambda: decode.run(replace(asked, cost=settings.out)), capsys)
    assert "absent.json" in complaint(lambda: decode.run(replace(asked, cost=Path("absent.json"))), capsys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": (4, 4)}, "--budgets needs at least two sizes"),
        ({"budgets": (0, 11)}, "budget must be in 0..10"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"steps": 30}, "exceed the model's context of 96"),
        ({"target": None}, "--target"),
        ({"random_weights": "qwen3-30b-a3b"}, "--random-weights"),
        ({"prompts": Path("absent.jsonl")}, "absent.jsonl"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(
    settings: Settings, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert message in complaint(lambda: fit_cost.run(replace(settings, **changes)), capsys)
    assert not settings.out.exists()
