"""Metrics of expert predictors against sets of pairs counted one by one, and the command on a made-up recording."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from experiments import eval_predictor
from experiments.predictor_metrics import agreement, ancestors, by_prompt, marginal_counts, rank_correlation
from experiments.recording import Recording, write_recording
from tests.complaints import complaint
from tests.made_up_recording import ROUTING, made_up
from tests.tiny_predictors import sets_of


def path_of(recording: Recording, position: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = recording.parents[position, node]
    return path


def direct_counts(recording: Recording, sets: np.ndarray) -> np.ndarray:
    """Marginal counts with sets of pairs."""
    counts = np.zeros(recording.tokens.shape)
    for position, node in np.ndindex(counts.shape):
        prompt = {0: 0, 4: 2}.get(position)
        paid = recording.previous[prompt] if prompt is not None else recording.experts[position - 1, 0]
        touched = frozenset().union(*(sets_of(sets[position, 1 + i]) for i in path_of(recording, position, node)))
        counts[position, node] = len(touched - sets_of(paid))
    return counts


def test_sizes_and_paths() -> None:
    recording = made_up()
    found = agreement(recording.forecasts["guess"], recording.experts)
    for position, row in np.ndindex(*recording.experts.shape[:2]):
        said, true = sets_of(recording.forecasts["guess"][position, row]), sets_of(recording.experts[position, row])
        for layer in range(ROUTING.layers):
            parts = said & true, said, true
            sizes = [sum(pair[0] == layer for pair in part) for part in parts]
            assert [a[position, row, layer] for a in (found.hits, found.predicted, found.true)] == sizes
    on_path = ancestors(recording.parents)
    for position, node in np.ndindex(*recording.tokens.shape):
        assert set(np.flatnonzero(on_path[position, node])) == set(path_of(recording, position, node))


@pytest.mark.parametrize("name", ["guess", "oracle"])
def test_marginal_counts(name: str) -> None:
    """Of whole paths, less what the token before the root used: the prompt's last for an answer's first step."""
    recording = made_up()
    sets = recording.experts if name == "oracle" else recording.forecasts[name]
    counts = marginal_counts(recording, sets, ancestors(recording.parents))
    np.testing.assert_array_equal(counts, direct_counts(recording, sets))


def test_rank_correlation_and_sums_by_prompt() -> None:
    random = np.random.default_rng(0)
    scores, others = random.integers(0, 4, (2, 6, 7))
    scores[2] = 3  # no order at all
    found = rank_correlation(scores.astype(float), others.astype(float))
    assert np.isnan(found[2])
    for row in (0, 1, 3, 4, 5):
        assert found[row] == pytest.approx(spearmanr(scores[row], others[row]).statistic)
    recording = made_up()
    values = np.arange(9.0)
    assert by_prompt(recording, values).tolist() == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7 + 8]


def test_judgement() -> None:
    """Figures are those of all rows together; layers and depths split them."""
    recording = made_up()
    one = eval_predictor.judge(recording, "made up", "guess", eps=0.5)
    pairs = [
        (len(sets_of(said) & sets_of(true)), len(sets_of(true)))
        for said, true in zip(recording.forecasts["guess"][:, 0], recording.experts[:, 0], strict=True)
    ]
    assert one.depths[0].middle == pytest.approx(sum(hit for hit, _ in pairs) / sum(size for _, size in pairs))
    assert one.overlap.middle == pytest.approx(np.mean([layer.middle for layer in one.layers]))
    assert one.precision == one.overlap and one.f1.middle == pytest.approx(one.overlap.middle)  # sets of equal size
    assert one.overlap.low < one.overlap.middle < one.overlap.high
    said, true = (direct_counts(recording, s) for s in (recording.forecasts["guess"], recording.experts))
    assert one.count_error.middle == pytest.approx(np.abs(said - true).sum() / true.sum())
    assert one.count_bias.middle == pytest.approx(said.sum() / true.sum())
    chance = np.exp(recording.log_probs)
    ranks = [spearmanr(chance[x] / (said[x] + 0.5), chance[x] / (true[x] + 0.5)).statistic for x in range(len(said))]
    assert one.rank.middle == pytest.approx(np.mean(ranks))
    assert len(one.counts) == 10 and one.counts[0][0] <= one.counts[-1][0]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("held-out", "other")}
    for seed, folder in enumerate(found.values()):
        write_recording(folder / "recording-0000.npz", made_up(seed))
    return found


def test_command(folders: dict[str, Path], tmp_path: Path) -> None:
    """A line for each recording and predictor; the table and the plot beside them."""
    named = tuple(f"{name}={folder}" for name, folder in folders.items())
    eval_predictor.run(eval_predictor.Settings(recording=named, out=tmp_path / "out"))
    lines = [json.loads(line) for line in (tmp_path / "out/predictors.jsonl").read_text().splitlines()]
    assert [(line["recording"], line["predictor"]) for line in lines] == list(
        itertools.product(("held-out", "other"), ("guess", "nothing"))
    )
    assert 0.3 < lines[0]["overlap"]["middle"] < 0.8 and lines[1]["overlap"]["middle"] == 0
    assert lines[0]["milliseconds"] is None and lines[0]["megabytes"] == 0
    assert "| held-out | guess |" in (tmp_path / "out/predictors.md").read_text()
    assert (tmp_path / "out/predictors.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_input(folders: dict[str, Path], tmp_path: Path, capsys) -> None:
    def refused(*recording: str, **changes) -> str:
        wanted = eval_predictor.Settings(recording=recording, out=tmp_path / "out", **changes)
        return complaint(lambda: eval_predictor.run(wanted), capsys)

    first, second = (f"{name}={folder}" for name, folder in folders.items())
    assert "NAME=FOLDER is expected" in refused(str(folders["other"]))
    assert "two are called 'other'" in refused(second, second)
    assert f"{tmp_path}: holds no recording-*.npz" in refused(f"a={tmp_path}")
    assert "--recording names no recording" in refused()
    assert "--eps 0.0 is not positive" in refused(first, eps=0.0)
    other = made_up(5)
    header = replace(other.header, target_hash="x" * 64)
    write_recording(folders["other"] / "recording-0000.npz", replace(other, header=header))
    assert f"{folders['other']}: another target hash than in {first}" in refused(first, second)
    assert not (tmp_path / "out").exists()
