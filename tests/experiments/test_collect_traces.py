"""From prompts to traces: they are true, an interrupted collection continues, bad input is one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from ecospec_jax.errors import run_command
from ecospec_jax.training import traces as trace_files
from ecospec_jax.training.traces import Trace, TraceManifest, read_manifest, read_traces, write_manifest
from experiments import collect_traces
from tests.complaints import complaint
from tests.experiments.traced_world import (
    NEW_TOKENS,
    OTHER_PROMPTS,
    PROMPTS,
    ROUTING,
    World,
    collected,
    collected_both,
    files,
    loaded_once,
    world,
)
from tests.parity.compare import causal_rows
from tests.tiny import quick_compilation

__all__ = ["collected", "collected_both", "loaded_once", "quick_compilation", "world"]


def test_traces_hold_what_was_generated(world: World, collected: Path) -> None:
    """Every prompt at each temperature, prompt and answer; the greedy answer is plain decoding's."""
    manifest = read_manifest(collected)
    assert (manifest.target_hash, manifest.routing) == (world.decoder.target_hash, ROUTING)
    assert [shard.sequences for shard in manifest.shards] == [{f"p{i}": 2, f"p{i + 1}": 2} for i in (0, 2, 4)]
    traces = list(read_traces(collected, manifest))
    assert {trace.data_set for trace in traces} == {"prompts"} and manifest.states is None
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

    def interrupted(folder: Path, manifest: TraceManifest, traces: list[Trace]):
        if len(manifest.shards) == 1:
            (folder / "shard-00001.new").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        return write(folder, manifest, traces)

    with monkeypatch.context() as patch:
        patch.setattr(collect_traces, "write_shard", interrupted)
        with pytest.raises(SystemExit) as caught:
            run_command(lambda: collect_traces.run(world.collect(out)))
    assert caught.value.code == 130
    assert read_manifest(out).prompts == {("prompts", "p0"), ("prompts", "p1")}

    routing = world.decoder.routing
    monkeypatch.setattr(world.decoder, "routing", lambda sequences: asked.append(len(sequences)) or routing(sequences))
    collect_traces.run(world.collect(out))
    assert asked == [2] * 4  # two shards of two prompts, each at two temperatures
    assert files(out) == files(collected)
    collect_traces.run(world.collect(out))
    assert asked == [2] * 4 and files(out) == files(collected)


def test_a_data_set_is_added(world: World, collected: Path, collected_both: Path, tmp_path) -> None:
    """What is there stays; both at once give the same bytes."""
    before, after = files(collected), files(collected_both)
    assert {name: after[name] for name in before if name != "manifest.json"} == {
        name: content for name, content in before.items() if name != "manifest.json"
    }
    manifest = read_manifest(collected_both)
    assert [(shard.data_set, *shard.sequences) for shard in manifest.shards[3:]] == [
        ("more", "p0", "p1"),
        ("more", "p2"),
    ]
    starts = {trace.prompt: trace.tokens_T for trace in read_traces(collected_both, manifest, data_sets=["more"])}
    for prompt in OTHER_PROMPTS:
        ids = world.decoder.encode(prompt["turns"][0])
        assert starts[prompt["id"]][: len(ids)].tolist() == ids
    out = tmp_path / "traces"
    collect_traces.run(world.collect(out, prompts=(f"prompts={world.prompts}", f"more={world.other_prompts}")))
    assert files(out) == after


def test_a_shard_is_written_before_the_next_is_begun(world: World, tmp_path, monkeypatch) -> None:
    """So that no more than one is held."""
    events, write, routing = [], trace_files.write_shard, world.decoder.routing
    monkeypatch.setattr(collect_traces, "write_shard", lambda *what: events.append(len(what[2])) or write(*what))
    monkeypatch.setattr(world.decoder, "routing", lambda sequences: events.append("trace") or routing(sequences))
    collect_traces.run(world.collect(tmp_path / "traces", temperatures=(0.0,)))
    assert events == ["trace", 2] * 3


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
        ({"prompts": ("absent.jsonl",)}, "absent.jsonl: cannot be read"),
        ({"prompts": ("a/x.jsonl", "b/x.jsonl")}, "--prompts: two data sets are called 'x'; call one otherwise"),
        ({"prompts": ("x=a.jsonl", "x=b.jsonl")}, "--prompts: two data sets are called 'x'"),
        ({"prompts": ()}, "--prompts names no file"),
        ({"prompts": ("=a.jsonl",)}, "--prompts =a.jsonl: neither FILE nor NAME=FILE"),
        ({"prompts": ("x=",)}, "--prompts x=: neither FILE nor NAME=FILE"),
        ({"target": Path("absent")}, "absent: no manifest.json"),
        ({"temperatures": ()}, "--temperatures names no temperature"),
        ({"temperatures": (0.0, -1.0)}, "temperature must not be negative"),
        ({"batch_size": 0}, "--batch-size must be at least 1, not 0"),
        ({"shard_prompts": 0}, "--shard-prompts must be at least 1"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"prompts": ("zebra",)}, "a prompt has no tokens"),
        ({"max_new_tokens": 95}, "prompts.jsonl: p0: 3 prompt tokens and 95 new ones exceed"),
    ],
    ids=str,
)
def test_bad_input_of_a_collection(world: World, tmp_path, capsys, changes: dict, message: str) -> None:
    out = tmp_path / "traces"
    if changes == {"prompts": ("zebra",)}:  # only letters that the tokenizer does not know
        changes = {"prompts": (str(tmp_path / "prompts.jsonl"),)}
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "z", "turns": ["zz"]}))
    assert message in complaint(lambda: collect_traces.run(world.collect(out, **changes)), capsys)
    assert not out.exists()
