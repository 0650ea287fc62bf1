"""From prompts to predictors: traces are resumable and true, training resumes exactly, bad input is one line."""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder
from ecospec_jax.config import RoutingShape
from ecospec_jax.errors import run_command
from ecospec_jax.predictor_checkpoint import load_predictors
from ecospec_jax.training.traces import Trace, read_manifest, read_traces, split_by_prompt, write_manifest
from ecospec_jax.training.trainer import Trainer
from experiments import collect_traces, train_predictor
from tests.complaints import complaint
from tests.parity.compare import causal_rows
from tests.tiny import quick_compilation
from tests.tiny_predictors import TARGET, make_target, write_converted

__all__ = ["quick_compilation"]
# The second layer is dense, so the second MoE layer is the third layer.
TRACED = replace(TARGET, num_layers=3, dense_layers=(1,))
ROUTING = RoutingShape.of(TRACED)
PROMPTS = [
    {"id": f"p{i}", "turns": [text, "ignored"]} for i, text in enumerate(("abc", "x", "hello", "no", "cab", "w"))
]
NEW_TOKENS = 9


@dataclass
class World:
    """A converted target, loaded once, and prompts."""

    target: Path
    prompts: Path
    decoder: Decoder

    def collect(self, out: Path, **changes) -> collect_traces.Settings:
        settings = collect_traces.Settings(
            target=self.target, prompts=self.prompts, out=out, max_new_tokens=NEW_TOKENS, batch_size=2, shard_prompts=2
        )
        return replace(settings, **changes)

    def train(self, traces: Path, out: Path, **changes) -> train_predictor.Settings:
        settings = train_predictor.Settings(
            target=self.target,
            traces=traces,
            out=out,
            width=12,
            depth=1,
            heads=2,
            steps=6,
            batch_size=4,
            length=32,
            warmup=2,
            held_out=0.34,
            checkpoint_every=2,
        )
        return replace(settings, **changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target, _ = write_converted(folder / "converted", make_target(TRACED))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return World(target, folder / "prompts.jsonl", Decoder.load(target))


@pytest.fixture(autouse=True)
def _loaded_once(world: World, monkeypatch) -> None:
    """Commands get the decoder that is compiled already, if they ask for its folder."""
    load = Decoder.load

    def load_once(folder, **options) -> Decoder:
        return world.decoder if Path(folder) == world.target and not options else load(folder, **options)

    monkeypatch.setattr(Decoder, "load", staticmethod(load_once))


@pytest.fixture(scope="module")
def collected(world: World, tmp_path_factory) -> Path:
    """Traces of an uninterrupted collection."""
    out = tmp_path_factory.mktemp("traces") / "traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "load", staticmethod(lambda folder: world.decoder))
        collect_traces.run(world.collect(out))
    return out


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ---------------------------------------------------------------------------------------------------------------------
# Traces


def test_traces_hold_what_was_generated(world: World, collected: Path) -> None:
    """Every prompt at each temperature, prompt and answer; the greedy answer is plain decoding's."""
    manifest = read_manifest(collected)
    assert (manifest.target_hash, manifest.routing) == (world.decoder.target_hash, ROUTING)
    assert [shard.prompts for shard in manifest.shards] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5")]
    traces = list(read_traces(collected, manifest))
    assert sorted(trace.prompt for trace in traces) == sorted([f"p{i}" for i in range(6)] * 2)
    answers = {}
    for trace in traces:
        text = PROMPTS[int(trace.prompt[1:])]["turns"][0]
        start = world.decoder.encode(text)
        assert trace.prompt_length == len(start) and trace.tokens_T[: len(start)].tolist() == start
        assert len(trace.tokens_T) == len(start) + NEW_TOKENS
        answers.setdefault(trace.prompt, []).append(tuple(trace.tokens_T[len(start) :].tolist()))
    texts = [prompt["turns"][0] for prompt in PROMPTS]
    greedy = world.decoder.generate(texts, method="ar", max_new_tokens=NEW_TOKENS, batch_size=2).generations
    assert [answers[f"p{i}"][0] for i in range(6)] == [answer.tokens for answer in greedy]
    assert sum(a != b for a, b in answers.values()) > 3


def test_recorded_routing_is_that_of_decoding_token_by_token(world: World, collected: Path) -> None:
    """One token at a time through the target's cache: the experts of each, best first, layer by layer."""
    target = world.decoder.target
    forward = nnx.jit(lambda target, rows, cache: target(rows, cache, ()))
    for trace in list(read_traces(collected, read_manifest(collected)))[:4]:
        cache = target.empty_cache(1, 32)
        for place, token in enumerate(trace.tokens_T):
            output, cache = forward(target, causal_rows([[token]], context_B=[place]), cache)
            ids_LK = np.asarray(output.expert_ids_LBRK)[:, 0, 0]
            np.testing.assert_array_equal(trace.experts_TLK[place], ids_LK, err_msg=f"{trace.prompt}, token {place}")


def test_an_interrupted_collection_continues(world: World, collected: Path, tmp_path, monkeypatch) -> None:
    """It does the rest only, and ends with the same bytes as an uninterrupted one."""
    out = tmp_path / "traces"
    write, asked = collect_traces.write_shard, []

    def interrupted(folder: Path, index: int, traces: list[Trace]):
        if index == 1:
            (folder / "shard-00001.new").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        return write(folder, index, traces)

    with monkeypatch.context() as patch:
        patch.setattr(collect_traces, "write_shard", interrupted)
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: collect_traces.run(world.collect(out)))
    assert caught.value.code == 130
    assert read_manifest(out).prompts == {"p0", "p1"}

    routing = world.decoder.routing
    monkeypatch.setattr(world.decoder, "routing", lambda sequences: asked.append(len(sequences)) or routing(sequences))
    collect_traces.run(world.collect(out))
    assert asked == [2] * 4  # two shards of two prompts, each at two temperatures
    assert files(out) == files(collected)
    collect_traces.run(world.collect(out))
    assert asked == [2] * 4 and files(out) == files(collected)


def test_traces_of_another_recipe_or_target_are_not_continued(world: World, collected: Path, tmp_path, capsys) -> None:
    out = Path(shutil.copytree(collected, tmp_path / "traces"))
    before = files(out)
    for changes in ({"temperatures": (0.0,)}, {"max_new_tokens": 8}, {"seed": 1}):
        line = complaint(lambda changes=changes: collect_traces.run(world.collect(out, **changes)), capsys)
        assert line.startswith(f"{out / 'manifest.json'}: traces of another target or recipe")
    assert files(out) == before
    write_manifest(out, replace(read_manifest(out), target_hash="0" * 64))
    line = complaint(lambda: collect_traces.run(world.collect(out)), capsys)
    assert line.startswith(f"{out / 'manifest.json'}: traces of another target or recipe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": Path("absent.jsonl")}, "absent.jsonl: cannot be read"),
        ({"target": Path("absent")}, "absent: no manifest.json"),
        ({"temperatures": ()}, "--temperatures names no temperature"),
        ({"temperatures": (0.0, -1.0)}, "temperature must not be negative"),
        ({"batch_size": 0}, "--batch-size must be at least 1, not 0"),
        ({"shard_prompts": 0}, "--shard-prompts must be at least 1"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"prompts": Path("zebra")}, "a prompt has no tokens"),
        ({"max_new_tokens": 95}, "prompts.jsonl: p0: 3 prompt tokens and 95 new ones exceed"),
    ],
    ids=str,
)
def test_bad_input_of_a_collection(world: World, tmp_path, capsys, changes: dict, message: str) -> None:
    out = tmp_path / "traces"
    if changes == {"prompts": Path("zebra")}:  # only letters that the tokenizer does not know
        changes = {"prompts": tmp_path / "prompts.jsonl"}
        changes["prompts"].write_text(json.dumps({"id": "z", "turns": ["zz"]}))
    assert message in complaint(lambda: collect_traces.run(world.collect(out, **changes)), capsys)
    assert not out.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Training


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
    train, held_out = split_by_prompt(traces, 0.34, 0)
    assert {trace.prompt for trace in held_out} and len({trace.prompt for trace in held_out}) == 2
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
    overlap = json.loads((trained / "manifest.json").read_text())["overlap"]
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
    file = traces / "shard-00002.npz"
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
