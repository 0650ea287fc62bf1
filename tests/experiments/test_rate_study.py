"""The study of selection by rate: one command, resumed part by part, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecospec_jax.errors import run_command
from ecospec_jax.metrics import DecodeStats
from experiments import rate_measure, rate_study, replay_contenders
from experiments.rate_measure import Candidate, candidates, over_plain
from tests.complaints import complaint
from tests.tiny import quick_compilation
from tests.tiny_predictors import write_converted

__all__ = ["quick_compilation"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write_converted(folder / "target")
    for name, turns in (("one", ("abc", "hello", "no")), ("other", ("yes", "cab", "on"))):
        prompts = [{"id": f"{name}/{turn}", "turns": [turn]} for turn in turns]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def settings(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rate_study.Settings:
    monkeypatch.setattr(replay_contenders, "SHARES", (0.5,))
    return rate_study.Settings(
        target=folders / "target",
        prompts=(folders / "one.jsonl", folders / "other.jsonl"),
        limit=2,
        temperatures=(0.0,),
        batch_sizes=(2,),
        costs=("qwen3-235b-a22b",),
        budgets=(1, 4),
        eps=(1.0,),
        max_new_tokens=6,
        out=tmp_path / "out",
    )


def test_one_command_writes_everything_and_goes_on(settings: rate_study.Settings, folders: Path) -> None:
    settings = replace(settings, recordings=folders / "recordings")
    rate_study.run(settings)
    rows = [json.loads(line) for line in (settings.out / "rate_study.jsonl").read_text().splitlines()]
    groups = {(row["costs"], row["draft"]) for row in rows}
    assert groups == {("qwen3-235b-a22b", "free"), ("qwen3-235b-a22b", "eagle3")}
    assert {(row["pool"], row["temperature"], row["batch"]) for row in rows} == {("2x3", 0.0, 2)}
    families = {row["family"] for row in rows}
    assert {"likelihood", "likelihood, budget 4", "ecospec", "size by C", "rate oracle", "clairvoyant"} <= families
    free = {row["family"]: row for row in rows if row["draft"] == "free"}
    for row in free.values():
        less = row["speed"]["middle"] - free["likelihood"]["speed"]["middle"]
        assert row["less_likelihood"]["middle"] == pytest.approx(less, abs=1e-9)
    table = (settings.out / "rate_study.md").read_text()
    assert "### qwen3-235b-a22b, drafting eagle3, pool 2x3, T 0, batch 2" in table and "| rate oracle |" in table
    assert (settings.out / "replay-T0.png").read_bytes().startswith(b"\x89PNG")

    # Parts that are there are not made again.
    (kept,) = (settings.out / "parts").iterdir()
    part = json.loads(kept.read_text())
    part["lines"][0]["family"] = "marked"
    kept.write_text(json.dumps(part))
    part["key"]["batch"] = part["lines"][0]["batch"] = 1
    kept.with_name("replay-2x3-T0-B1.json").write_text(json.dumps(part | {"lines": part["lines"][:1]}))
    rate_study.run(replace(settings, batch_sizes=(1, 2)))
    again = [json.loads(line) for line in (settings.out / "rate_study.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in again if row["family"] == "marked"] == [1, 2] and len(again) == len(rows) + 1


def test_quick_is_small() -> None:
    asked = rate_study.Settings(Path("target"), (Path("prompts"),), pools=("3x4", "2x3"), max_new_tokens=16)
    small = asked.small()
    assert (small.limit, small.pools, small.temperatures, small.batch_sizes) == (8, ("3x4",), (0.0,), (1, 4))
    assert (small.max_new_tokens, small.measured_tokens, small.measured_limit) == (16, 32, 8)


def test_what_is_timed() -> None:
    assert [one.name for one in candidates((1, 4), ("backbone",))] == [
        "ar",
        "likelihood, budget 1",
        "likelihood, budget 4",
        "ecospec, budget 1",
        "ecospec, budget 4",
        "rate, budget 4",
    ]
    assert candidates((2,), ()) == [Candidate("ar"), Candidate("likelihood", 2)]


def seconds(*each: float) -> list[DecodeStats]:
    sums = {"verifications": 1, "emitted_histograms": ((1,),), "distinct_by_layer": (4,), "predicted_by_layer": (0,)}
    rest = {"hits_by_layer": (0,), "uses": 4, "added_error": 0, "live_rows": 1}
    return [DecodeStats(prefill_seconds=9.0, decode_seconds=one, **sums, **rest) for one in each]


def test_speeds_are_paired_by_batch() -> None:
    ratio = over_plain(seconds(2.0, 4.0, 20.0), seconds(1.0, 2.0, 10.0))
    assert (ratio.low, ratio.middle, ratio.high) == (2, 2, 2)
    assert over_plain(seconds(1.0, 3.0), seconds(1.0, 1.0)).middle == 2


def test_wall_clock(settings: rate_study.Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding first, the same tokens from all; costs are fitted once a batch size."""
    monkeypatch.setattr(rate_measure, "FIT_STEPS", 2)
    monkeypatch.setattr(rate_study, "replay_parts", lambda *_: [])
    monkeypatch.setattr(rate_study, "plot", lambda *_: None)
    few = {"measure": True, "pad_ffn": 8, "measured_limit": 3, "measured_tokens": 6, "measured_budgets": (2,)}
    settings = replace(settings, **few)
    fitted = settings.out / "parts" / "cost-8-B2.json"
    fitted.parent.mkdir(parents=True)
    fitted.write_text(
        json.dumps({"fixed": 1.0, "per_expert": 0.1, "moe_layers": 3, "per_row": 0, "draft": 0, "predict": 0})
    )
    with pytest.raises(SystemExit):
        run_command(lambda: rate_study.run(replace(settings, measured_budgets=(40,))))
    rate_study.run(settings)
    rows = [json.loads(line) for line in (settings.out / "rate_study.jsonl").read_text().splitlines()]
    assert [row["family"] for row in rows] == ["ar", "likelihood, budget 2"]
    assert all(row["same_tokens"] and row["batches"] == 2 and row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["speed"] == {"middle": 1, "low": 1, "high": 1} and rows[0]["tau"] == 1
    assert "Wall clock, experts widened by 8, T 0, batch 2 (2 batches)" in (settings.out / "rate_study.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": ("2by3",)}, "--pools: '2by3' is not branch x depth"),
        ({"pools": ()}, "--pools needs at least one value"),
        ({"budgets": (11,)}, "budget must be in 0..10"),
        ({"measured_budgets": (11,)}, "budget must be in 0..10"),
        ({"batch_sizes": (0,)}, "--batch-sizes must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"costs": ("gpt-9",)}, "unknown cost model 'gpt-9'"),
        ({"eps": (0.0,)}, "eps must be positive"),
        ({"temperatures": (-1.0,)}, "temperature must not be negative"),
        ({"prompts": (Path("absent.jsonl"),)}, "absent.jsonl: cannot be read"),
        ({"prompts": (Path("a/p.jsonl"), Path("b/p.jsonl"))}, "two files of the same name"),
        ({"target": Path("absent")}, "absent"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(
    settings: rate_study.Settings, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert message in complaint(lambda: rate_study.run(replace(settings, **changes)), capsys)
    assert not settings.out.exists()


def test_parts_of_other_settings_are_refused(settings: rate_study.Settings, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings.out / "parts" / "replay-2x3-T0-B2.json"
    path.parent.mkdir(parents=True)
    for text, message in (
        ("{", "is no part of a study"),
        ('{"key": {}}', "is no part of a study"),
        ('{"key": {"eps": [9]}, "lines": []}', "made with other batch, budgets, costs, eps"),
    ):
        path.write_text(text)
        assert message in complaint(lambda: rate_study.run(settings), capsys)
