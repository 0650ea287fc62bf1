"""The busiest device's experts against Python sets, and what the command refuses."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import busiest_device
from experiments.busiest_device import BUSIEST, PLAIN, Settings, contender, use_of
from experiments.recording import Recording, write_recording
from experiments.replay import Replay
from experiments.replay_costs import OWN, cost_model
from tests.complaints import complaint
from tests.made_up_recording import ROUTING, made_up
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]


def experts_of(recording: Recording, position: int, row: int, layer: int) -> set[int]:
    words = recording.experts[position, row, layer]
    return {expert for expert in range(ROUTING.experts) if words[expert // 32] >> np.uint32(expert % 32) & np.uint32(1)}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("devices", [1, ROUTING.experts])
def test_use_by_sets(batch: int, devices: int) -> None:
    recording = made_up()
    replay = Replay(recording, batch)
    settings = Settings((), budget=3, predictor="guess")
    one = contender(settings, recording, 0.5, None)
    steps = replay.steps(one, cost_model(recording.header, OWN, None, "free"))
    use = use_of(recording, replay.order_GB, steps, devices)
    for group, prompts in enumerate(replay.order_GB):
        at, count, verifications, pairs, busiest = [0] * batch, 0, 0, 0, 0
        for step in range(steps.emitted_GTB.shape[1]):
            live = [place for place in range(batch) if steps.emitted_GTB[group, step, place]]
            if not live:
                break
            count, verifications = count + 1, verifications + len(live)
            for layer in range(ROUTING.layers):
                union: set[int] = set()
                for place in live:
                    position = int(recording.starts[prompts[place]]) + at[place]
                    rows = [0, *(1 + np.flatnonzero(steps.chosen_GTBN[group, step, place]))]
                    union |= {e for row in rows for e in experts_of(recording, position, row, layer)}
                pairs += len(union)
                busiest += max(Counter(e // (ROUTING.experts // devices) for e in union).values())
            for place in live:
                at[place] += int(steps.emitted_GTB[group, step, place])
        assert (use.steps[group], use.verifications[group], use.tokens[group]) == (count, verifications, sum(at))
        assert (use.pairs[group], use.busiest[group]) == (pairs, busiest)
    assert use.pairs.sum() > use.busiest.sum() or devices == 1


def write(folder: Path) -> Path:
    write_recording(folder / "shard.npz", made_up())
    return folder / "shard.npz"


def test_the_command_compares(tmp_path: Path) -> None:
    out = tmp_path / "out"
    busiest_device.run(Settings((write(tmp_path),), devices=(1, 37), predictor="guess", eps=(0.5, 2.0), out=out))
    table = (out / "busiest_device.md").read_text()
    for devices in (1, 37):
        for counts in ("likelihood", PLAIN, BUSIEST):
            assert f"| {devices} | {counts} |" in table
    # With one device both counts are the same.
    plain, own = (next(line for line in table.splitlines() if f"| 1 | {counts}" in line) for counts in (PLAIN, BUSIEST))
    assert plain.split("|")[3:] == own.split("|")[3:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": (2,)}, "37 experts do not divide among 2 devices"),
        ({"devices": ()}, "--devices and --eps need at least one value each"),
        ({"devices": (1,), "predictor": "nobody"}, "'nobody' was not recorded; known: oracle, guess, nothing"),
        ({"devices": (1,), "budget": 0}, "--budget must be at least 1, not 0"),
        ({"devices": (1,), "eps": (0.0,)}, "eps must be positive"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str) -> None:
    settings = Settings((write(tmp_path),), out=tmp_path / "out", **options)
    assert message in complaint(lambda: busiest_device.run(settings), capsys)
    assert not (tmp_path / "out").exists()
