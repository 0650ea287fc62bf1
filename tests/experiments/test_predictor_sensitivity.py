"""Corrupted labels keep the share they should; crossings and gaps by hand; the command on a made-up recording."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import predictor_sensitivity
from experiments.predictor_sensitivity import Settings, corrupted, crossing, gap
from experiments.recording import write_recording
from tests.complaints import complaint
from tests.made_up_recording import ROUTING, made_up, words
from tests.tiny import quick_compilation
from tests.tiny_predictors import sets_of

__all__ = ["quick_compilation"]


@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_corrupted_labels_keep_their_share(keep: float) -> None:
    """Sets stay as large as they were, within the target's experts; what was taken out does not come back."""
    true = words((40, 7), 3)
    found = corrupted(true, ROUTING.experts, keep, np.random.default_rng(0))
    kept = total = 0
    for place in np.ndindex(true.shape[:2]):
        before, after = sets_of(true[place]), sets_of(found[place])
        assert len(after) == len(before) == ROUTING.layers * ROUTING.k
        assert all(expert < ROUTING.experts for _, expert in after)
        assert [sum(layer == i for layer, _ in after) for i in range(ROUTING.layers)] == [ROUTING.k] * ROUTING.layers
        kept, total = kept + len(before & after), total + len(before)
    assert kept / total == pytest.approx(keep, abs=0.03)
    if keep == 0:
        assert kept == 0
        named = [expert for place in np.ndindex(true.shape[:2]) for _, expert in sets_of(found[place])]
        assert set(named) == set(range(ROUTING.experts))


def test_crossing() -> None:
    """The last place where gains rise above 0, whatever they do before it."""
    assert crossing([(0.2, -0.2), (0.6, 0.2), (1.0, 0.3)]) == pytest.approx(0.4)
    assert crossing([(1.0, 0.1), (0.0, 0.5), (0.5, -0.1)]) == pytest.approx(0.75)
    assert crossing([(0.3, 0.1), (0.9, 0.2)]) == 0.3
    assert crossing([(0.3, 0.1), (0.9, 0.0)]) is None


def test_gap() -> None:
    """Predictor error and search add up to what is missing to the best set."""

    def point(method: str, predictor: str, speed: float) -> SimpleNamespace:
        outcome = SimpleNamespace(speed=SimpleNamespace(middle=speed))
        return SimpleNamespace(method=method, predictor=predictor, outcome=outcome)

    speeds = {("ecospec-calibrated", "a"): 1.1, ("ecospec-calibrated", "oracle"): 1.25, ("rate", "oracle"): 1.4}
    parts = gap([point(*names, speed) for names, speed in speeds.items()], "a")
    assert parts["predictor error"] == pytest.approx(0.15)
    assert parts["greedy search and fixed size"] == pytest.approx(0.15)
    assert sum(parts.values()) == pytest.approx(1.4)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    write_recording(tmp_path / "recording-0000.npz", made_up())
    return Settings(
        recording=(tmp_path / "recording-0000.npz",),
        overlaps=(0.0, 1.0),
        budgets=(2,),
        eps=(1.0,),
        costs="own",
        out=tmp_path / "out",
    )


def test_command(settings: Settings) -> None:
    """A line for each predictor and method; true routing and labels that keep everything come out alike."""
    predictor_sensitivity.run(settings)
    lines = [json.loads(line) for line in (settings.out / "sensitivity.jsonl").read_text().splitlines()]
    overlap = {line["predictor"]: line["overlap"] for line in lines}
    assert overlap.keys() == {"guess", "nothing", "kept 0.00", "kept 1.00", "oracle"}
    assert (overlap["kept 0.00"], overlap["kept 1.00"], overlap["oracle"], overlap["nothing"]) == (0, 1, 1, 0)
    assert len(lines) == 3 * len(overlap)
    speeds = {(line["family"], line["predictor"]): line["speed"] for line in lines}
    for method in ("ecospec", "ecospec-calibrated", "rate"):
        assert speeds[method, "kept 1.00"] == speeds[method, "oracle"]
    text = (settings.out / "sensitivity.md").read_text()
    assert "What `ecospec-calibrated` misses" in text and "`rate` beats `likelihood`" in text
    assert (settings.out / "sensitivity.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlaps": (1.5,)}, "--overlaps 1.5 is not in 0..1"),
        ({"budgets": ()}, "--budgets and --eps need at least one value"),
        ({"budgets": (0,)}, "--budgets must be at least 1"),
        ({"eps": (0.0,)}, "eps must be positive"),
        ({"costs": "none"}, "unknown cost model 'none'"),
        ({"recording": ()}, "there are no recordings"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input(settings: Settings, capsys, changes: dict, message: str) -> None:
    assert message in complaint(lambda: predictor_sensitivity.run(replace(settings, **changes)), capsys)
    assert not settings.out.exists()
