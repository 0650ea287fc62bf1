"""The fit of acceptance: it finds a known model, tells how well it is calibrated, and refuses what does not belong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.acceptance import ACCEPTANCE, FORMAT, Acceptance, AcceptanceFit, read_acceptance, write_acceptance
from ecospec_jax.calibration import FEATURES, edge_features
from ecospec_jax.checkpoint import read_manifest
from ecospec_jax.errors import UserError
from ecospec_jax.tree import ROOT, build_tree
from experiments import fit_acceptance
from experiments.environment import environment
from experiments.fit_acceptance import RIDGE, Edges, Settings, calibration_error, edges_of, fit, run
from experiments.recording import FORMAT as RECORDING_FORMAT
from experiments.recording import Header, Recording, write_recording
from tests.tiny import quick_compilation
from tests.tiny_predictors import write_converted

__all__ = ["quick_compilation"]
TRUE = np.array([0.7, 1.3, -0.2, -0.4, -0.1])


def made_up(folder: Path, *, prompts: int = 6, each: int = 120, temperature: float = 0.0, **changes: Any) -> Recording:
    """Trees of depth 2 and branch 2 with random probabilities; the target accepts edges as `TRUE` says."""
    manifest, random = read_manifest(folder), np.random.default_rng(7)
    assert manifest.drafter is not None
    versions: Any = environment()["versions"]
    header = Header(
        format=RECORDING_FORMAT,
        target_hash=manifest.target_hash,
        drafter_hash=manifest.drafter_hash,
        target=manifest.target,
        drafter=manifest.drafter,
        predictors={},
        bytes_per_weight=4,
        temperature=temperature,
        depth=2,
        branch=2,
        max_new_tokens=each + 1,
        seed=0,
        eos_ids=(),
        prompts=tuple(str(index) for index in range(prompts)),
        versions=versions,
    )
    count = prompts * each
    parents = np.tile(np.array([ROOT, ROOT, 0, 0, 1, 1], np.int32), (count, 1))
    pairs = np.log(random.dirichlet((1.0, 1.0, 1.0), (count, 3))[:, :, :2])
    pairs = -np.sort(-pairs, axis=-1)
    edges = pairs.reshape(count, 6)
    log_probs = edges + np.concatenate([np.zeros((count, 2)), np.repeat(edges[:, :2], 2, axis=1)], axis=1)
    tokens = np.tile(np.array([1, 2, 1, 2, 1, 2], np.int32), (count, 1))
    depths = jnp.array([1, 1, 2, 2, 2, 2])
    tree = build_tree(jnp.asarray(tokens), jnp.asarray(parents), depths, jnp.asarray(log_probs, jnp.float32))
    accepted = 1 / (1 + np.exp(-np.asarray(edge_features(tree)) @ TRUE))
    drawn = np.zeros((count, 7), np.int32)
    for row, children in ((0, (0, 1)), (1, (2, 3)), (2, (4, 5))):  # at most one of two siblings is drawn
        first, second = (accepted[:, child] for child in children)
        total = np.maximum(first + second, 1.0)
        draw = random.random(count)
        drawn[:, row] = np.where(draw < first / total, 1, np.where(draw < (first + second) / total, 2, 0))
    layers = header.routing.layers
    recording = Recording(
        header=header,
        starts=np.arange(prompts + 1) * each,
        previous=np.zeros((prompts, layers, 1), np.uint32),
        roots=np.zeros(count, np.int32),
        tokens=tokens,
        parents=parents,
        log_probs=log_probs.astype(np.float32),
        drawn=drawn,
        experts=np.zeros((count, 7, layers, 1), np.uint32),
        forecasts={},
    )
    return replace(recording, header=replace(header, **changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_converted(tmp_path / "converted")[0]


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> Settings:
    write_recording(tmp_path / "made.npz", made_up(folder))
    return Settings(folder, recording=(tmp_path / "made.npz",), plot=tmp_path / "plots" / "acceptance.png")


def test_edges_are_those_behind_accepted_nodes(folder: Path) -> None:
    """Against a walk with dictionaries."""
    recording = made_up(folder, prompts=2, each=30)
    expected = []
    for position in range(len(recording.roots)):
        at = ROOT
        while True:
            children = [node for node in range(6) if recording.parents[position, node] == at]
            wanted = recording.drawn[position, at + 1]
            expected += [bool(recording.tokens[position, child] == wanted) for child in children]
            following = [child for child in children if recording.tokens[position, child] == wanted]
            if not following:
                break
            at = following[0]
    edges = edges_of(recording)
    assert edges.accepted_X.tolist() == expected and set(edges.prompt_X) == {0, 1}
    assert np.isfinite(edges.features_XF).all()


def test_fit_finds_the_model_that_made_the_outcomes() -> None:
    random = np.random.default_rng(1)
    features = np.stack(
        [np.ones(40000), random.normal(size=40000) * 2, *random.integers(0, 3, (2, 40000)), -random.random(40000) * 5],
        axis=1,
    )
    accepted = random.random(40000) < 1 / (1 + np.exp(-features @ TRUE))
    weights, precision = fit(Edges(features, accepted, np.zeros(40000, int)))
    np.testing.assert_allclose(weights, TRUE, atol=0.1)
    few, few_precision = fit(Edges(features[:150], accepted[:150], np.zeros(150, int)))
    assert (np.linalg.eigvalsh(precision) >= RIDGE * 0.99).all()
    # However many were seen, further observations still move the fit: it counts for 200 of them.
    assert precision[0, 0] < 0.25 * 200 + RIDGE and precision[0, 0] > few_precision[0, 0] / 2 and np.isfinite(few).all()
    against = fit(Edges(features, ~accepted, np.zeros(40000, int)))[0]
    assert against[FEATURES.index("logit")] == 0


def test_calibration_error() -> None:
    random = np.random.default_rng(2)
    said = random.random(20000)
    assert calibration_error(said, random.random(20000) < said) < 0.02
    assert calibration_error(np.full(100, 0.9), np.arange(100) % 2 == 0) == pytest.approx(0.4)
    assert calibration_error(np.array([0.2]), np.array([True])) == pytest.approx(0.8)


def test_writes_the_fit_beside_earlier_ones(
    settings: Settings, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(settings)
    said = capsys.readouterr().out
    drafter_hash = read_manifest(folder).drafter_hash
    written = read_acceptance(folder / ACCEPTANCE, drafter_hash)
    (one,) = written.fits
    assert one.temperature == 0 and one.error_after < one.error_before and one.edges > 200
    assert f"{one.error_before:.3f} of the drafter, {one.error_after:.3f} of the fit" in said
    assert settings.plot.read_bytes().startswith(b"\x89PNG")
    write_recording(tmp_path / "warm.npz", made_up(folder, temperature=1.0))
    run(replace(settings, recording=(tmp_path / "warm.npz",), temperature=1.0))
    run(settings)
    fits = read_acceptance(folder / ACCEPTANCE, drafter_hash).fits
    assert [fit.temperature for fit in fits] == [0.0, 1.0] and fits[0] == one


def test_records_prompts_itself(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_acceptance, "FEWEST_EDGES", 20)
    prompts = [{"id": text, "turns": [text]} for text in ("abc", "hello", "no")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    asked = Settings(folder, prompts=tmp_path / "prompts.jsonl", max_new_tokens=20, plot=tmp_path / "a.png")
    run(replace(asked, temperature=0.7))
    (one,) = read_acceptance(folder / ACCEPTANCE, read_manifest(folder).drafter_hash).fits
    assert one.temperature == 0.7 and one.edges >= 20


def test_refuses_what_does_not_belong(settings: Settings, folder: Path, tmp_path: Path) -> None:
    def refused(message: str, made: Recording | None = None, **changes: Any) -> None:
        if made is not None:
            write_recording(tmp_path / "other.npz", made)
            changes["recording"] = (tmp_path / "other.npz",)
        with pytest.raises(UserError, match=message):
            run(replace(settings, **changes))
        assert not (folder / ACCEPTANCE).exists() and not settings.plot.exists()

    refused("recorded with another target", made_up(folder, target_hash="0" * 64))
    refused("recorded with another drafter", made_up(folder, drafter_hash="0" * 64))
    refused("was recorded at temperature 0, not 1", temperature=1.0)
    refused("edges of known outcome in one half of the prompts; a fit needs 200", made_up(folder, prompts=2, each=20))
    refused("give either --recording files or --prompts", prompts=Path("p.jsonl"))
    refused("give either --recording files or --prompts", recording=())
    refused("--max-new-tokens must be at least 1", max_new_tokens=0)


def test_a_fit_of_another_drafter_is_not_overwritten(settings: Settings, folder: Path) -> None:
    fit_there = AcceptanceFit(0.0, tuple(TRUE.tolist()), tuple(map(tuple, np.eye(5).tolist())), 300, 0.2, 0.1)
    write_acceptance(folder / ACCEPTANCE, Acceptance(FORMAT, "another", (fit_there,)))
    with pytest.raises(UserError, match="was fitted for another drafter; remove it to fit anew"):
        run(settings)
    assert read_acceptance(folder / ACCEPTANCE, "another").fits == (fit_there,)
