"""A small target with prompts, and its traces, for the commands that collect them and learn from them."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ecospec_jax import Decoder
from ecospec_jax.config import RoutingShape
from experiments import collect_traces, train_predictor
from tests.tiny_predictors import TARGET, make_target, write_converted

# The second layer is dense, so the second MoE layer is the third layer.
TRACED = replace(TARGET, num_layers=3, dense_layers=(1,))
ROUTING = RoutingShape.of(TRACED)
PROMPTS = [
    {"id": f"p{i}", "turns": [text, "ignored"]} for i, text in enumerate(("abc", "x", "hello", "no", "cab", "w"))
]
OTHER_PROMPTS = [{"id": f"p{i}", "turns": [text]} for i, text in enumerate(("on", "hell", "a"))]
NEW_TOKENS = 9
HELD_OUT, SEED = 0.34, 3


@dataclass
class World:
    """A converted target, loaded once, and prompts."""

    target: Path
    prompts: Path
    other_prompts: Path
    decoder: Decoder

    def collect(self, out: Path, **changes) -> collect_traces.Settings:
        settings = collect_traces.Settings(
            target=self.target,
            prompts=(str(self.prompts),),
            out=out,
            max_new_tokens=NEW_TOKENS,
            batch_size=2,
            shard_prompts=2,
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
            held_out=HELD_OUT,
            seed=SEED,
            checkpoint_every=2,
        )
        return replace(settings, **changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target, _ = write_converted(folder / "converted", make_target(TRACED))
    files = []
    for name, prompts in (("prompts", PROMPTS), ("other", OTHER_PROMPTS)):
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return World(target, *files, Decoder.load(target))


@pytest.fixture(autouse=True)
def loaded_once(world: World, monkeypatch) -> None:
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


@pytest.fixture(scope="module")
def collected_both(world: World, collected: Path, tmp_path_factory) -> Path:
    """Traces of the first data set, to which another, whose prompts have the same ids, is added later."""
    out = Path(shutil.copytree(collected, tmp_path_factory.mktemp("both") / "traces"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "load", staticmethod(lambda folder: world.decoder))
        collect_traces.run(world.collect(out, prompts=(str(world.prompts), f"more={world.other_prompts}")))
    return out
