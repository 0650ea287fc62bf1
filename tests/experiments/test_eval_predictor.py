"""Metrics of expert predictors against sets of pairs counted one by one, and the command on a made-up recording."""

import itertools
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from ecospec_jax.training.traces import FORMAT, Trace, TraceManifest, write_manifest, write_shard
from ecospec_jax.tree import build_tree
from experiments import eval_predictor
from experiments.predictor_metrics import agreement, by_prompt, marginal_counts, rank_correlation
from experiments.recording import Recording, read_recordings, write_recording
from tests.complaints import complaint
from tests.made_up_recording import ROUTING, made_up
from tests.tiny_predictors import ROUTING as TARGET_ROUTING
from tests.tiny_predictors import TARGET, random_ids, sets_of, write_converted, write_predictors


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
    tree = build_tree(recording.tokens, recording.parents, recording.depths, recording.log_probs)
    on_path = np.asarray(tree.ancestors_BNN)
    for position, node in np.ndindex(*recording.tokens.shape):
        assert set(np.flatnonzero(on_path[position, node])) == set(path_of(recording, position, node))


@pytest.mark.parametrize("name", ["guess", "oracle"])
def test_marginal_counts(name: str) -> None:
    """Of whole paths, less what the token before the root used: the prompt's last for an answer's first step."""
    recording = made_up()
    sets = recording.experts if name == "oracle" else recording.forecasts[name]
    counts = marginal_counts(recording, sets)
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


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A converted target with predictors, a prompt file and made-up traces."""
    folder = tmp_path_factory.mktemp("models")
    _, target_hash = write_converted(folder / "target")
    write_predictors(folder / "predictors", target_hash)
    lines = [json.dumps({"id": name, "turns": [name]}) + "\n" for name in ("abc", "hello", "no")]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return folder / "target", folder / "predictors"


def write_some_traces(folder: Path, target_hash: str) -> Path:
    """Made up, of the fixture's target."""
    folder.mkdir()
    manifest = TraceManifest(FORMAT, target_hash, TARGET.vocab_size, TARGET_ROUTING, None, {})
    traces = [
        Trace(
            "one",
            name,
            1,
            np.arange(length, dtype=np.int32),
            random_ids((length, TARGET_ROUTING.layers), TARGET_ROUTING, 5),
        )
        for name, length in (("a", 5), ("b", 8))
    ]
    write_manifest(folder, replace(manifest, shards=(write_shard(folder, manifest, traces),)))
    return folder


def settings(models: tuple[Path, Path], out: Path, *text: str, **changes) -> eval_predictor.Settings:
    target, predictor = models
    wanted = eval_predictor.Settings(text=text, target=target, predictor=(predictor,), max_new_tokens=6, out=out)
    return replace(wanted, repeats=2, **changes)


def test_command(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A line for each text and predictor; what was recorded is used again; a second folder has names of its own."""
    prompts, out = models[0].parent / "prompts.jsonl", tmp_path / "out"
    eval_predictor.run(settings(models, out, f"one={prompts}"))
    made = out / "recordings/one"
    stamp = (made / "recording-0000.npz").stat().st_mtime_ns
    eval_predictor.run(settings(models, out, f"one={prompts}", f"two={made}"))
    assert (made / "recording-0000.npz").stat().st_mtime_ns == stamp
    lines = [json.loads(line) for line in (out / "predictors.jsonl").read_text().splitlines()]
    names = ("previous", "backbone", "token_table", "frequency")
    assert {(line["text"], line["predictor"]) for line in lines} == set(itertools.product(("one", "two"), names))
    by_name = {line["predictor"]: line for line in lines if line["text"] == "one"}
    judged = eval_predictor.judge(read_recordings([made / "recording-0000.npz"]), "one", "token_table", 1.0)
    assert json.loads(json.dumps(asdict(judged))).items() <= by_name["token_table"].items()
    assert all(line["milliseconds"] > 0 for line in lines)
    assert by_name["backbone"]["megabytes"] > 0 == by_name["token_table"]["megabytes"]
    assert "| one | token_table |" in (out / "predictors.md").read_text()
    assert (out / "predictors.png").read_bytes()[:4] == b"\x89PNG"

    traces = write_some_traces(tmp_path / "traces", read_recordings([made / "recording-0000.npz"]).header.target_hash)
    eval_predictor.run(settings(models, tmp_path / "sure", f"one={made}", traces=traces, held_out=1.0))
    (line,) = (tmp_path / "sure/calibration.jsonl").read_text().splitlines()
    (row,) = (row for row in (tmp_path / "sure/predictors.md").read_text().splitlines() if row.endswith("| 13 |"))
    assert json.loads(line)["predictor"] == "backbone"
    assert row.startswith(f"| backbone | {json.loads(line)['every']['error']:.4f} |")
    assert (tmp_path / "sure/calibration.png").exists() and not (out / "calibration.png").exists()

    other = Path(shutil.copytree(models[1], tmp_path / "again"))
    both = replace(settings(models, tmp_path / "both", f"one={prompts}"), predictor=(models[1], other))
    eval_predictor.run(both)
    lines = [json.loads(line) for line in (tmp_path / "both/predictors.jsonl").read_text().splitlines()]
    assert {line["predictor"] for line in lines} >= {"previous", "predictors/backbone", "again/backbone"}


def test_bad_input(models: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    def refused(*text: str, **changes) -> str:
        return complaint(lambda: eval_predictor.run(settings(models, tmp_path / "out", *text, **changes)), capsys)

    (tmp_path / "empty").mkdir()
    assert "NAME=PATH is expected" in refused("prompts.jsonl")
    assert "NAME=PATH is expected" in refused("a/b=prompts.jsonl")
    assert "absent.jsonl: no such file or folder" in refused("a=absent.jsonl")
    assert f"{tmp_path / 'empty'}: holds no recording-*.npz" in refused(f"a={tmp_path / 'empty'}")
    assert "--text names no text" in refused()
    prompts = models[0].parent / "prompts.jsonl"
    assert "two are called 'a'" in refused(f"a={prompts}", f"a={prompts}")
    assert "--held-out 0.0 is not in 0..1" in refused(f"a={prompts}", held_out=0.0)
    assert "--eps 0.0 is not positive" in refused(f"a={prompts}", eps=0.0)
    write_recording(tmp_path / "made/recording-0000.npz", made_up())
    assert f"{tmp_path / 'made'}: was recorded with another target" in refused(f"a={tmp_path / 'made'}")
    twice = settings(models, tmp_path / "out", f"a={prompts}")
    twice = replace(twice, predictor=(models[1], models[1]))
    assert "another predictor is called" in complaint(lambda: eval_predictor.run(twice), capsys)
