"""From traces to predictors: what is written is true, training resumes exactly, bad input is one line."""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax import Decoder
from ecospec_jax.checkpoint import parameters
from ecospec_jax.errors import UserError, run_command
from ecospec_jax.predictor_checkpoint import load_predictors
from ecospec_jax.training import traces as trace_files
from ecospec_jax.training.corpus import is_held_out
from ecospec_jax.training.traces import Trace, read_manifest, read_traces, write_manifest
from ecospec_jax.training.trainer import Trainer
from experiments import collect_traces, recording, train_predictor
from experiments.resuming import train
from tests.complaints import complaint
from tests.experiments.traced_world import (
    HELD_OUT,
    ROUTING,
    SEED,
    World,
    collected,
    collected_both,
    loaded_once,
    world,
)
from tests.tiny import quick_compilation

__all__ = ["collected", "collected_both", "loaded_once", "quick_compilation", "world"]


@pytest.fixture(scope="module")
def trained(world: World, collected: Path, tmp_path_factory) -> Path:
    """Predictors of an uninterrupted training."""
    out = tmp_path_factory.mktemp("trained") / "predictors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "load", staticmethod(lambda folder: world.decoder))
        train_predictor.run(world.train(collected, out))
    return out


def pieces(folder: Path) -> dict[str, str]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return {name: piece["sha256"] for name, piece in manifest["pieces"].items()} | {"overlap": manifest["overlap"]}


def test_training_writes_all_predictors(world: World, collected: Path, trained: Path) -> None:
    """They load for their target; nothing else stays; their overlaps are those of plain counting."""
    assert [path.name for path in trained.parent.iterdir()] == ["predictors"]
    loaded = load_predictors(trained, world.decoder.target_hash, jnp.dtype(jnp.float32), world.decoder.target)
    assert loaded.keys() == {"backbone", "token_table", "frequency"}
    assert loaded["backbone"].embedding.weight.get_value() is world.decoder.target.embedding.weight.get_value()

    traces = list(read_traces(collected, read_manifest(collected)))
    sides: dict[bool, list[Trace]] = {False: [], True: []}
    for trace in traces:
        sides[is_held_out("prompts", trace.prompt, share=HELD_OUT, seed=SEED)].append(trace)
    train, held_out = sides[False], sides[True]
    assert len({trace.prompt for trace in train}) > 1 and len({trace.prompt for trace in held_out}) > 1
    counts: dict[tuple, int] = {}
    for trace in train:
        for token, experts_LK in zip(trace.tokens_T.tolist(), trace.experts_TLK.tolist(), strict=True):
            for layer, experts in enumerate(experts_LK):
                for expert in experts:
                    counts[token, layer, expert] = counts.get((token, layer, expert), 0) + 1
                    counts["any", layer, expert] = counts.get(("any", layer, expert), 0) + 1

    def best(token: int | None, layer: int) -> set[int]:
        total = sum(counts.get(("any", layer, e), 0) for e in range(ROUTING.experts))
        prior = [counts.get(("any", layer, e), 0) / total for e in range(ROUTING.experts)]
        own = [0 if token is None else counts.get((token, layer, e), 0) for e in range(ROUTING.experts)]
        order = sorted(range(ROUTING.experts), key=lambda e: (-np.float32(own[e] + prior[e]), e))
        return set(order[: ROUTING.k])

    hits = {name: np.zeros(ROUTING.layers) for name in ("token_table", "frequency", "previous")}
    tokens, pairs = 0, 0
    for trace in held_out:
        tokens, pairs = tokens + len(trace.tokens_T), pairs + len(trace.tokens_T) - 1
        for place, (token, experts_LK) in enumerate(zip(trace.tokens_T.tolist(), trace.experts_TLK, strict=True)):
            for layer, experts in enumerate(experts_LK.tolist()):
                hits["token_table"][layer] += len(best(token, layer) & set(experts))
                hits["frequency"][layer] += len(best(None, layer) & set(experts))
                if place:
                    hits["previous"][layer] += len(set(trace.experts_TLK[place - 1, layer].tolist()) & set(experts))
    written = json.loads((trained / "manifest.json").read_text())
    overlap = written["overlap"]
    assert written["recipe"]["training_tokens"] == str(sum(len(trace.tokens_T) for trace in train))
    assert written["recipe"]["held_out_tokens"] == str(tokens)
    assert overlap["token_table"] == pytest.approx(hits["token_table"] / (tokens * ROUTING.k))
    assert overlap["frequency"] == pytest.approx(hits["frequency"] / (tokens * ROUTING.k))
    assert overlap["previous"] == pytest.approx(hits["previous"] / (pairs * ROUTING.k))
    assert len(overlap["backbone"]) == ROUTING.layers


def test_an_interrupted_training_continues_exactly(
    world: World, collected: Path, trained: Path, tmp_path, monkeypatch, capsys
) -> None:
    """From the last checkpoint, here that of step 4; the predictors have the same bytes. Other settings are refused."""
    settings = world.train(collected, tmp_path / "predictors")
    step, count = Trainer.step, []

    def interrupted(self: Trainer, examples):
        if len(count) == 5:
            raise KeyboardInterrupt
        count.append(step(self, examples))
        return count[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: train_predictor.run(settings))
    assert caught.value.code == 130 and not settings.out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["predictors.training"]

    capsys.readouterr()
    for changes in ({"steps": 7}, {"learning_rate": 1e-3}, {"width": 16}, {"seed": 1}):
        line = complaint(lambda changes=changes: train_predictor.run(replace(settings, **changes)), capsys)
        assert line.startswith(f"{tmp_path / 'predictors.training'}: holds an unfinished training with other")
    assert not settings.out.exists()

    count.clear()
    monkeypatch.setattr(Trainer, "step", lambda self, examples: count.append(1) or step(self, examples))
    train_predictor.run(replace(settings, checkpoint_every=1))
    assert len(count) == 2 and "resuming after step 4" in capsys.readouterr().out
    assert pieces(settings.out) == pieces(trained)
    assert [path.name for path in tmp_path.iterdir()] == ["predictors"]


def interrupt_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    step, count = Trainer.step, []

    def interrupted(self: Trainer, examples):
        if len(count) == steps:
            raise KeyboardInterrupt
        count.append(1)
        return step(self, examples)

    patch.setattr(Trainer, "step", interrupted)


def test_all_options_together_continue_exactly(world: World, collected_both: Path, tmp_path, monkeypatch) -> None:
    """Accumulated bfloat16 with patience: interrupted or not, the same bytes. The data set left out is judged apart."""
    changes = {
        "batch_size": 2,
        "accumulate": 2,
        "dtype": "bfloat16",
        "patience": 1,
        "steps": 9,
        "checkpoint_every": 1,
        "leave_out": ("more",),
    }
    whole, again = (world.train(collected_both, tmp_path / name, **changes) for name in ("whole", "again"))
    judged = iter([0.3, 0.4, 0.5, 0.5, 0.6] * 2)
    monkeypatch.setattr(train_predictor, "top_k_overlap", lambda *_, **__: np.array([next(judged)]))
    train_predictor.run(whole)  # ends after step 4, since 0.5 is no better than 0.5
    assert next(judged) == 0.6
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train_predictor.run(again)
    train_predictor.run(again)
    assert next(judged) == 0.6
    assert pieces(again.out) == pieces(whole.out)
    three = replace(whole, out=tmp_path / "three", patience=None, checkpoint_every=9)
    monkeypatch.setattr(train_predictor, "top_k_overlap", lambda *_, **__: np.array([0.0]))
    monkeypatch.setattr(
        train_predictor, "train", lambda trainer, feed, *, steps, **rest: train(trainer, feed, steps=3, **rest)
    )
    train_predictor.run(three)
    assert pieces(three.out)["backbone/top"] == pieces(whole.out)["backbone/top"]

    manifest = json.loads((whole.out / "manifest.json").read_text())
    assert manifest["recipe"].keys() >= {"left out more"} and manifest["recipe"]["batch_size"] == "4"
    traces = read_traces(collected_both, read_manifest(collected_both), data_sets=["prompts"])
    learned = [t for t in traces if not is_held_out("prompts", t.prompt, share=HELD_OUT, seed=SEED)]
    assert manifest["recipe"]["training_tokens"] == str(sum(len(trace.tokens_T) for trace in learned))
    counts = np.zeros((ROUTING.layers, ROUTING.experts))
    for trace in learned:
        for layer in range(ROUTING.layers):
            counts[layer] += np.bincount(trace.experts_TLK[:, layer].ravel(), minlength=ROUTING.experts)
    favourites = np.argsort(-counts, axis=1, kind="stable")[:, : ROUTING.k]
    shares = [
        len(set(favourites[layer]) & set(experts.tolist())) / ROUTING.k
        for trace in read_traces(collected_both, read_manifest(collected_both), data_sets=["more"])
        for experts_LK in trace.experts_TLK
        for layer, experts in enumerate(experts_LK)
    ]
    assert f"frequency {np.mean(shares):.4f}" in manifest["recipe"]["left out more"]


def test_another_checkpoint_interval_is_another_training_with_patience(
    world: World, collected: Path, tmp_path, monkeypatch, capsys
) -> None:
    """Since what is kept depends on when it is judged."""
    settings = world.train(collected, tmp_path / "predictors", patience=2)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train_predictor.run(settings)
    line = complaint(lambda: train_predictor.run(replace(settings, checkpoint_every=3)), capsys)
    assert line.startswith(f"{tmp_path / 'predictors.training'}: holds an unfinished training with other")


def test_no_trace_is_held_longer_than_needed(world: World, collected: Path, tmp_path, monkeypatch) -> None:
    """Each pass over the files is a stream: no list of all traces is ever there."""
    alive, most = [0], [0]

    class Counted(Trace):
        def __init__(self, *values: object) -> None:
            super().__init__(*values)
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    monkeypatch.setattr(trace_files, "Trace", Counted)
    monkeypatch.setattr("ecospec_jax.training.corpus.WINDOW", 1)
    monkeypatch.setattr(train_predictor, "JUDGED", 1)
    train_predictor.run(world.train(collected, tmp_path / "predictors", batch_size=1))
    assert alive[0] == 0 and 4 <= most[0] <= 4 + 3  # a shard of four, the batch, what is judged, the one being read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traces": Path("absent")}, "absent/manifest.json: cannot be read"),
        ({"target": Path("absent")}, "absent: no manifest.json"),
        ({"held_out": 0.0}, "6 prompts are too few to hold some out"),
        ({"held_out": 1.0}, "6 prompts are too few to hold some out"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"width": 10}, "--width 10 is not a multiple of twice --heads 2"),
        ({"warmup": 6}, "--warmup 6 is not in 0..5"),
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"patience": 0}, "--patience must be at least 1"),
        ({"devices": 0}, "--devices must be at least 1"),
        ({"devices": 3}, "--batch-size 4 is not a multiple of --devices 3"),
        ({"devices": 4}, "4 devices are asked for; there are 1"),
        ({"leave_out": ("more",)}, "holds no data set 'more' to leave out"),
        ({"leave_out": ("prompts",)}, "0 prompts are too few to hold some out"),
    ],
    ids=str,
)
def test_bad_input_of_a_training(world: World, collected: Path, tmp_path, capsys, changes: dict, message: str) -> None:
    settings = replace(world.train(collected, tmp_path / "predictors"), **changes)
    assert message in complaint(lambda: train_predictor.run(settings), capsys)
    assert not list(tmp_path.iterdir())


def test_an_existing_output_is_refused(world: World, collected: Path, trained: Path, capsys) -> None:
    before = pieces(trained)
    line = complaint(lambda: train_predictor.run(world.train(collected, trained)), capsys)
    assert line.startswith(f"{trained}: already exists") and pieces(trained) == before


def other_target(traces: Path) -> str:
    write_manifest(traces, replace(read_manifest(traces), target_hash="0" * 64))
    return f"{traces}: traces of another target (hash 000000000000)"


def corrupt_shard(traces: Path) -> str:
    file = traces / "shard-00002.parquet"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    return f"{file}: the shard was changed or damaged"


@pytest.mark.parametrize("damage", [other_target, corrupt_shard])
def test_unusable_traces_through_the_command_line(
    world: World, collected: Path, tmp_path, monkeypatch, capsys, damage: Callable[[Path], str]
) -> None:
    """The whole command: one line on stderr, exit code 2, no output."""
    traces = Path(shutil.copytree(collected, tmp_path / "traces"))
    message = damage(traces)
    out = tmp_path / "predictors"
    arguments = ["train_predictor", "--target", world.target, "--traces", traces, "--out", out]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
    monkeypatch.delitem(sys.modules, "experiments.train_predictor")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("experiments.train_predictor", run_name="__main__")
    lines = capsys.readouterr().err.strip().splitlines()
    assert caught.value.code == 2 and len(lines) == 1
    assert re.match(f"error: {re.escape(message)}", lines[0])
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


@pytest.fixture(scope="module")
def collected_states(world: World, tmp_path_factory) -> Path:
    """Traces with the drafter's states."""
    out = tmp_path_factory.mktemp("states") / "traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "load", staticmethod(lambda folder: world.decoder))
        collect_traces.run(world.collect(out, drafter_states=True))
    return out


EVERY = ("backbone", "drafter_features", "target_gates", "token_table", "token_pairs", "frequency")


def test_every_predictor_decodes(world: World, collected_states: Path, tmp_path, monkeypatch) -> None:
    """Trained, saved, loaded and named in a method; the tokens are plain decoding's."""
    out = tmp_path / "predictors"
    train_predictor.run(world.train(collected_states, out, predictors=EVERY, rank=5, pairs=9))
    monkeypatch.undo()
    decoder = Decoder.load(world.target, predictor=out)
    prompts = ["abc", "hello"]
    plain = decoder.generate(prompts, method="ar", max_new_tokens=8)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["predictors"].keys() == set(EVERY)
    for name in EVERY:
        drafted = decoder.generate(prompts, method=f"ecospec@{name}", max_new_tokens=8)
        assert [g.tokens for g in drafted.generations] == [g.tokens for g in plain.generations], name
        assert all(0 <= share <= 1 for share in manifest["overlap"][name])
    loaded = load_predictors(out, decoder.target_hash, decoder.dtype, decoder.target, drafter_hash=decoder.drafter_hash)
    gate = parameters(loaded["target_gates"])["routers.1.gate.weight"].get_value()
    assert gate is parameters(decoder.target)["layers.2.moe.router.gate.weight"].get_value()

    recording.run(
        recording.Settings(world.target, world.prompts, tmp_path / "seen", predictor=(out,), max_new_tokens=5)
    )
    seen = recording.read_recordings(sorted((tmp_path / "seen").iterdir()))
    assert seen.forecasts.keys() == {"previous", *EVERY}
    for name, sets in seen.forecasts.items():
        assert (np.bitwise_count(sets).sum(axis=-1) == ROUTING.k).all(), name

    manifest["predictors"]["drafter_features"]["drafter_hash"] = "0" * 64
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="'drafter_features' reads the states of another drafter"):
        Decoder.load(world.target, predictor=out)


def test_states_that_are_missing_or_of_another_drafter(
    world: World, collected: Path, collected_states: Path, tmp_path, capsys
) -> None:
    wanted = world.train(collected, tmp_path / "predictors", predictors=("target_gates",))
    assert "no drafter's states, which 'target_gates' needs" in complaint(lambda: train_predictor.run(wanted), capsys)
    copied = Path(shutil.copytree(collected_states, tmp_path / "traces"))
    manifest = read_manifest(copied)
    assert manifest.states is not None
    write_manifest(copied, replace(manifest, states=replace(manifest.states, drafter_hash="0" * 64)))
    line = complaint(lambda: train_predictor.run(replace(wanted, traces=copied)), capsys)
    assert line == f"{copied}: states of another drafter (hash 000000000000)"
    unknown, none = (replace(wanted, predictors=names) for names in (("oracle",), ()))
    assert "unknown predictor 'oracle'; known: backbone" in complaint(lambda: train_predictor.run(unknown), capsys)
    assert "--predictors names no predictor" in complaint(lambda: train_predictor.run(none), capsys)
    assert not (tmp_path / "predictors").exists()
