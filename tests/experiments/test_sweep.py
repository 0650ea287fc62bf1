"""The sweep: its grid, its Pareto front, how it continues, and what it refuses."""

import json
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecospec_jax import Decoder, SpecConfig
from ecospec_jax.cost import byte_model
from ecospec_jax.predictor_checkpoint import save_predictors
from ecospec_jax.predictor_config import TokenTableConfig
from experiments import sweep
from tests import tiny_predictors
from tests.complaints import complaint
from tests.tiny import quick_compilation
from tests.tiny_predictors import ROUTING, TARGET, random_ids, write_converted

__all__ = ["quick_compilation"]
PROMPTS = [{"id": "a", "turns": ["abc"]}, {"id": "b", "turns": ["hello"]}]


@dataclass
class World:
    target: Path
    predictor: Path
    other_predictor: Path
    decoder: Decoder


def write_table(folder: Path, target_hash: str, seed: int) -> Path:
    table = tiny_predictors.make_table(random_ids((TARGET.vocab_size, ROUTING.layers), ROUTING, seed))
    save_predictors(
        folder,
        {"token_table": (TokenTableConfig(TARGET.vocab_size, ROUTING), table)},
        target_hash=target_hash,
        overlap={},
        recipe={},
        dtype=jnp.dtype(jnp.float32),
    )
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target, target_hash = write_converted(folder / "converted")
    tables = [write_table(folder / f"table-{seed}", target_hash, seed) for seed in range(2)]
    return World(target, *tables, Decoder.load(target, predictor=tables[0]))


@pytest.fixture
def measured(world: World, monkeypatch) -> list[sweep.Point]:
    """Points in the order of their measurement, which is made up; loading takes no time."""
    points: list[sweep.Point] = []

    def measure(decoder: Decoder, settings: sweep.Settings, texts: list[str], point: sweep.Point) -> dict[str, Any]:
        assert decoder is world.decoder and texts == [prompt["turns"][0] for prompt in PROMPTS][: len(texts)]
        points.append(point)
        fields = {"method": point.method, **vars(point.spec)}
        return fields | {"tau": 1 + 0.1 * point.spec.budget, "u": 3.0 + point.spec.eps, "bytes_per_token": 1e6}

    monkeypatch.setattr(sweep, "measure", measure)
    load = Decoder.load
    paths = (world.target, world.predictor, world.other_predictor)
    monkeypatch.setattr(
        Decoder,
        "load",
        staticmethod(lambda folder, predictor: world.decoder if folder in paths else load(folder, predictor=predictor)),
    )
    return points


@pytest.fixture
def settings(world: World, tmp_path) -> sweep.Settings:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return sweep.Settings(
        target=world.target,
        prompts=tmp_path / "prompts.jsonl",
        predictor=world.predictor,
        methods=("likelihood", "ecospec-table"),
        eps=(0.5, 2.0),
        buffer=("root", "previous"),
        budget=(1, 4),
        max_new_tokens=8,
        out=tmp_path / "sweep",
    )


def test_grid(settings: sweep.Settings) -> None:
    """Every combination once; eps and buffer only where a predictor informs the policy."""
    points = sweep.grid(settings)
    specs = {method: [point.spec for point in points if point.method == method] for method in settings.methods}
    assert specs["likelihood"] == [SpecConfig(budget=budget) for budget in (1, 4)]
    expected = {(b, e, f) for b in (1, 4) for e in (0.5, 2.0) for f in ("root", "previous")}
    assert {(s.budget, s.eps, s.buffer) for s in specs["ecospec-table"]} == expected
    assert len(specs["ecospec-table"]) == 8 and len({point.key for point in points}) == 10


def test_writes_rows_table_and_plot(settings: sweep.Settings, measured: list[sweep.Point]) -> None:
    sweep.run(settings)
    assert measured == sweep.grid(settings)
    rows = [json.loads(line) for line in (settings.out / "sweep.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows] == [point.key for point in measured]
    table = (settings.out / "sweep.md").read_text().splitlines()
    assert len(table) == 2 + 10 and sum(line.endswith("| yes |") for line in table) == len(
        sweep.pareto([row["row"] for row in rows])
    )
    assert (settings.out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in settings.out.iterdir()} == {"sweep.jsonl", "sweep.md", "pareto.png"}


def test_an_interrupted_sweep_continues(settings: sweep.Settings, measured, monkeypatch) -> None:
    """Also after a line that was written in part; only what is missing is measured, and a larger grid adds to it."""
    sweep.run(settings)
    whole = (settings.out / "sweep.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    for left in ("".join(lines[:4]), "".join(lines[:4]) + lines[4][:30]):
        (settings.out / "sweep.jsonl").write_text(left)
        measured.clear()
        sweep.run(settings)
        assert measured == sweep.grid(settings)[4:]
        assert (settings.out / "sweep.jsonl").read_text() == whole

    measured.clear()
    sweep.run(settings)
    assert measured == []
    sweep.run(replace(settings, budget=(1, 2, 4)))
    assert {point.spec.budget for point in measured} == {2} and len(measured) == 5
    # An interruption amid a measurement leaves the earlier rows.
    (settings.out / "sweep.jsonl").unlink()
    measure = sweep.measure

    def interrupted(*arguments: Any) -> dict[str, Any]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    measured.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep.run(settings)
    assert (settings.out / "sweep.jsonl").read_text() == "".join(lines[:3])


def test_results_of_another_sweep_are_refused(settings: sweep.Settings, measured, world: World, capsys) -> None:
    """Other prompts, also under the same ids, another predictor, other limits; the file stays as it was."""
    sweep.run(settings)
    file = settings.out / "sweep.jsonl"
    before = file.read_text()

    def refused(**changes: Any) -> None:
        line = complaint(lambda: sweep.run(replace(settings, **changes)), capsys)
        assert line.startswith(f"{file}: holds a sweep of another target, predictor, prompt set"), line
        assert file.read_text() == before

    refused(max_new_tokens=9)
    refused(batch_size=2)
    refused(limit=1)
    refused(predictor=world.other_predictor)
    same_ids = [PROMPTS[0], {"id": "b", "turns": ["help"]}]
    settings.prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in same_ids))
    refused()
    file.write_text(before.replace("{", "", 1))
    line = complaint(lambda: sweep.run(settings), capsys)
    assert line.startswith(f"{file}: cannot be read")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": (1.0, 0.0)}, "eps must be positive, not 0.0"),
        ({"methods": ("likelihood", "magic")}, "unknown method 'magic'; known: ar, likelihood"),
        ({"buffer": ("root", "next")}, "unknown expert buffer 'next'"),
        ({"budget": (11,)}, "budget must be in 0..10 for depth 3 and branch 2, not 11"),
        ({"methods": ("ecospec",)}, "method 'ecospec' needs the predictor 'backbone'; loaded: previous, oracle, token"),
        ({"prompts": Path("absent.jsonl")}, "absent.jsonl: cannot be read"),
        ({"target": Path("absent")}, "absent: no manifest.json"),
        ({"max_new_tokens": 95}, "prompts.jsonl: a: 3 prompt tokens and 95 new ones exceed"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"budget": ()}, "there are no settings to sweep"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_nothing_is_written(
    settings: sweep.Settings, measured, capsys, changes: dict, message: str
) -> None:
    assert message in complaint(lambda: sweep.run(replace(settings, **changes)), capsys)
    assert not settings.out.exists() and measured == []


@pytest.mark.parametrize(("option", "value"), [("--eps", "0"), ("--buffer", "next"), ("--methods", "magic")])
def test_bad_options_through_the_command_line(
    settings: sweep.Settings, measured, monkeypatch, capsys, option: str, value: str
) -> None:
    """Exit code 2, and the value is named on stderr; nothing is written."""
    arguments = ["--target", settings.target, "--prompts", settings.prompts, "--predictor", settings.predictor]
    arguments += ["--out", settings.out, option, value]
    monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
    monkeypatch.delitem(sys.modules, "experiments.sweep")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("experiments.sweep", run_name="__main__")
    said = capsys.readouterr().err
    assert caught.value.code == 2 and value in said and "Traceback" not in said
    assert not settings.out.exists()


def test_measure_decodes(world: World, settings: sweep.Settings) -> None:
    """One point for real."""
    point = sweep.Point("likelihood", SpecConfig(depth=1, budget=2))
    row = sweep.measure(world.decoder, replace(settings, batch_size=2), ["abc", "hello"], point)
    assert row["method"] == "likelihood" and row["budget"] == 2 and row["depth"] == 1
    assert 1 <= row["tau"] <= 2 and ROUTING.k <= row["u"] <= ROUTING.experts
    model = byte_model(world.decoder.target.config, 4)
    # Two sequences share each target pass, so a token costs at least half of one.
    assert row["bytes_per_token"] >= model.step(row["u"]) / 4
    assert row["bytes_per_token"] <= model.step(row["u"])


values = st.sampled_from([1.0, 1.5, 2.0, 2.5, 3.0]) | st.floats(1, 4)
rows_of = st.lists(st.tuples(values, values), min_size=1, max_size=12)


@given(rows_of)
def test_pareto(pairs: list[tuple[float, float]]) -> None:
    """Rows by rising U and rising tau; none is beaten by any row, and every other is, or equals one of them."""
    rows = [{"u": u, "tau": tau, "index": i} for i, (u, tau) in enumerate(pairs)]
    front = sweep.pareto(rows)
    assert front and all(row in rows for row in front)
    for before, after in zip(front, front[1:], strict=False):
        assert before["u"] < after["u"] and before["tau"] < after["tau"]

    def beats(one: dict, other: dict) -> bool:
        as_good = one["u"] <= other["u"] and one["tau"] >= other["tau"]
        return as_good and (one["u"], one["tau"]) != (other["u"], other["tau"])

    assert not any(beats(row, best) for row in rows for best in front)
    for row in rows:
        assert any((best["u"], best["tau"]) == (row["u"], row["tau"]) or beats(best, row) for best in front)
