import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from ecospec_jax import Generation
from ecospec_jax.cost import CostModel
from ecospec_jax.metrics import DecodeStats
from experiments.decode_report import (
    Difference,
    Record,
    first_differences,
    paired_u,
    same_tokens,
    summarise,
    write_report,
)

BYTES = CostModel(fixed=100.0, per_expert=10.0, moe_layers=2)
STAGES = {"draft": 1.0, "predict": 2.0, "select": 0.5, "verify": 3.0, "commit": 0.25}


def stats(emitted: tuple[int, ...], seconds: float, distinct: tuple[int, int], predicted: bool = False) -> DecodeStats:
    passes = sum(emitted)
    return DecodeStats(
        prefill_seconds=0.1,
        decode_seconds=seconds,
        verifications=passes,
        emitted_histograms=(emitted,),
        distinct_by_layer=distinct,
        predicted_by_layer=distinct if predicted else (0, 0),
        hits_by_layer=(6, 6) if predicted else (0, 0),
        uses=24,
        added_error=4 if predicted else 0,
        live_rows=12,
    )


def record(method: str, prompt: int, tokens: tuple[int, ...], figures: DecodeStats) -> Record:
    return Record.create(method, f"p{prompt}", prompt, [Generation(tokens, "text", "length")], figures, BYTES)


@pytest.fixture
def records() -> list[Record]:
    made = []
    for prompt in range(3):
        made.append(record("ar", prompt, (1, 2), stats((10,), 1.0, (40, 40))))
        made.append(record("likelihood", prompt, (1, 2), stats((0, 5), 0.5, (45, 55))))
        made.append(record("oracle", prompt, (1, 2 + prompt // 2), stats((0, 5), 0.5, (35, 45), predicted=True)))
    return made


METHODS = ["ar", "likelihood", "oracle"]


def test_figures_follow_from_the_counts(records: list[Record]) -> None:
    ar, likelihood, oracle = summarise(METHODS, records, {method: [STAGES] for method in METHODS})
    assert ar.figures["tokens_per_second"].middle == 10
    assert likelihood.figures["speedup"].middle == 2.0
    assert likelihood.figures["tau"].middle == 2.0
    assert likelihood.figures["u"].middle == 10.0
    assert likelihood.figures["bytes_per_step"].middle == 100 + 10 * 2 * 10
    assert likelihood.figures["bytes_per_token"].middle == (100 + 10 * 2 * 10) / 2
    assert math.isnan(likelihood.figures["overlap"].middle)
    assert oracle.figures["overlap"].middle == 0.5
    assert oracle.figures["marginal_error"].middle == 4 / (5 * 2)
    # Looking ahead takes 2 of the oracle's 6.75 staged milliseconds; that share of its half second is not counted.
    assert oracle.figures["tokens_per_second"].middle == pytest.approx(20 / (4.75 / 6.75))
    assert oracle.oracle and not likelihood.oracle


def test_predictions_of_methods_that_also_step_plainly_are_not_judged(records: list[Record]) -> None:
    """A plain step predicts nothing; the figures would count that as misses."""
    mine = [record("rate", prompt, (1, 2), stats((5, 5), 0.5, (35, 45), predicted=True)) for prompt in range(3)]
    _, rate = summarise(["ar", "rate"], records + mine, {"ar": [STAGES], "rate": [STAGES]})
    assert rate.figures["tau"].middle == 1.5
    assert all(math.isnan(rate.figures[name].middle) for name in ("predicted_u", "overlap", "marginal_error"))


def test_experts_of_a_drafter_have_a_column_of_their_own(tmp_path: Path, records: list[Record]) -> None:
    """Only where a drafter has experts; the modelled bytes stay the target's."""
    figures = dataclasses.replace(stats((0, 5), 0.5, (45, 55)), draft_experts=40)
    mine = [record("likelihood", prompt, (1, 2), figures) for prompt in range(3)]
    assert mine[0].json()["draft_u"] == 8 and mine[0].json()["stats"]["draft_experts"] == 40
    assert records[0].json()["draft_u"] is None
    assert mine[0].bytes_per_token == records[1].bytes_per_token
    console = Console(width=200, record=True)
    for name, given in (("with", records[::3] + mine), ("without", records[::3] + records[1::3])):
        methods = ["ar", "likelihood"]
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, methods, given, {m: [STAGES] for m in methods}, [], {}, console)
        text, shown = (tmp_path / name / "table.md").read_text(), console.export_text()
        for output in (text, shown):
            assert ("U draft" in output) == (name == "with")
        assert ("8.00 [8.00, 8.00]" in text) == (name == "with")


def test_different_tokens_are_reported_by_prompt(records: list[Record]) -> None:
    assert same_tokens(METHODS, records) == [
        "likelihood and ar: identical tokens on all 3 prompts",
        "oracle and ar: DIFFERENT tokens on 1 of 3 prompts: p2",
    ]


def test_the_first_difference_is_located(records: list[Record]) -> None:
    assert first_differences(METHODS, records) == [Difference("oracle", "p2", turn=0, place=1)]


def test_the_difference_in_u_is_paired(records: list[Record]) -> None:
    assert paired_u(METHODS, records) == ["U of oracle minus likelihood, paired: -2.000 [-2.000, -2.000]"]


def test_everything_is_written_and_records_are_json(tmp_path: Path, records: list[Record]) -> None:
    console = Console(width=200, record=True)
    stages, on_tokens = {method: [STAGES] for method in METHODS}, [*same_tokens(METHODS, records), "a near-tie"]
    write_report(tmp_path, METHODS, records, stages, on_tokens, {"seed": 0}, console)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experts.png", "speed.png", "table.md"]
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0].startswith("| method |") and lines[4].startswith("| oracle* |")
    assert "a near-tie" in console.export_text(clear=False)
    assert "oracle and ar: DIFFERENT" in console.export_text()
    line = json.loads(json.dumps(records[0].json(), allow_nan=False))
    assert line["overlap"] is None and line["answers"][0]["tokens"] == [1, 2]
