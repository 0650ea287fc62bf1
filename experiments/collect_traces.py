r"""Collect routing traces: the target answers prompts, greedy and sampled, and its experts are recorded per token.

    python -m experiments.collect_traces --target converted/tiny-qwen3-moe --prompts gsm8k=gsm8k.jsonl mbpp=mbpp.jsonl \
        --out traces/tiny
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from rich.progress import track

from ecospec_jax import Decoder, SamplingConfig, UserError
from ecospec_jax.config import RoutingShape
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.training.states import TOO_EARLY, states_of
from ecospec_jax.training.traces import (
    FORMAT,
    MANIFEST,
    StateShape,
    Trace,
    TraceManifest,
    read_manifest,
    write_manifest,
    write_shard,
)
from experiments.options import require_positive
from experiments.prompts import Prompt, data_set_files, read_prompts


@dataclass(frozen=True)
class Settings:
    """Collect routing traces of a target's own answers; an interrupted run continues."""

    target: Path
    """Folder that `python -m convert` wrote."""
    prompts: tuple[str, ...]
    """Prompt files, each a data set, as NAME=FILE or FILE; the first turn of each prompt is used."""
    out: Path
    """Folder for the traces."""
    limit: int | None = None
    """Use only the first prompts of each file."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """One answer per prompt at each temperature; 0 is greedy."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    batch_size: int = 8
    """Prompts decoded together."""
    shard_prompts: int = 64
    """Prompts in a shard."""
    seed: int = 0
    """Seed of sampling."""
    drafter_states: bool = False
    """Store the drafter's states as well, for predictors that read them; much larger than the rest."""

    @property
    def recipe(self) -> dict[str, str]:
        names = ("temperatures", "max_new_tokens", "seed")
        return {name: str(getattr(self, name)) for name in names}


def state_shape(decoder: Decoder) -> StateShape:
    """Of the drafter's states."""
    if decoder.drafter is None:
        raise UserError("--drafter-states needs a drafter; this model was converted without one")
    (states_TSH,) = states_of(decoder.target, decoder.drafter, [[0] * (TOO_EARLY + 1)])
    return StateShape(*states_TSH.shape[1:], drafter_hash=decoder.drafter_hash)


def open_traces(settings: Settings, decoder: Decoder) -> TraceManifest:
    """The manifest to go on from: an earlier run's, if it traced the same target in the same way."""
    fresh = TraceManifest(
        format=FORMAT,
        target_hash=decoder.target_hash,
        vocab_size=decoder.target.config.vocab_size,
        routing=RoutingShape.of(decoder.target.config),
        states=state_shape(decoder) if settings.drafter_states else None,
        recipe=settings.recipe,
    )
    if not (settings.out / MANIFEST).exists():
        return fresh
    earlier = read_manifest(settings.out)
    if replace(earlier, shards=()) != fresh:
        raise UserError(f"{settings.out / MANIFEST}: traces of another target or recipe; choose another --out")
    return earlier


def trace(
    decoder: Decoder, settings: Settings, data_set: str, prompts: Sequence[tuple[int, Prompt]]
) -> Iterator[Trace]:
    """Answers a few prompts at every temperature and records the routing of the whole sequences."""
    inputs = [decoder.encode(prompt.turns[0]) for _, prompt in prompts]
    for temperature in settings.temperatures:
        result = decoder.generate(
            inputs,
            method="ar",
            sampling=SamplingConfig(temperature=temperature),
            seed=[settings.seed + index for index, _ in prompts],
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
        )
        sequences = [ids + list(answer.tokens) for ids, answer in zip(inputs, result.generations, strict=True)]
        states: Sequence[np.ndarray | None] = [None] * len(prompts)
        if settings.drafter_states and decoder.drafter is not None:
            states = states_of(decoder.target, decoder.drafter, sequences)
        for (_, prompt), ids, sequence, experts_TLK, states_TSH in zip(
            prompts, inputs, sequences, decoder.routing(sequences), states, strict=True
        ):
            yield Trace(data_set, prompt.id, len(ids), np.array(sequence, np.int32), experts_TLK, states_TSH)


def remaining(
    settings: Settings, manifest: TraceManifest, data_sets: dict[str, list[Prompt]]
) -> Iterator[tuple[str, list[tuple[int, Prompt]]]]:
    """What is to be done: for each shard its data set and numbered prompts."""
    done = manifest.prompts
    for name, prompts in data_sets.items():
        todo = [(number, prompt) for number, prompt in enumerate(prompts) if (name, prompt.id) not in done]
        for first in range(0, len(todo), settings.shard_prompts):
            yield name, todo[first : first + settings.shard_prompts]


def run(settings: Settings) -> None:
    require_positive(settings, "limit", "max_new_tokens", "batch_size", "shard_prompts")
    if not settings.temperatures:
        raise UserError("--temperatures names no temperature")
    for temperature in settings.temperatures:
        SamplingConfig(temperature=temperature)  # refuses an impossible one before anything is written
    files = data_set_files(settings.prompts)
    data_sets = {name: read_prompts(file, settings.limit) for name, file in files.items()}
    decoder = Decoder.load(settings.target)
    for name, prompts in data_sets.items():
        for prompt in prompts:
            decoder.check_fits(prompt.turns[0], settings.max_new_tokens, where=f"{files[name]}: {prompt.id}")
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
        manifest = open_traces(settings, decoder)
        shards = list(remaining(settings, manifest, data_sets))
        for data_set, part in track(shards, description="shards", disable=not shards):
            traces = [
                one
                for first in range(0, len(part), settings.batch_size)
                for one in trace(decoder, settings, data_set, part[first : first + settings.batch_size])
            ]
            shard = write_shard(settings.out, manifest, traces)
            manifest = replace(manifest, shards=(*manifest.shards, shard))
            write_manifest(settings.out, manifest)
    tokens = sum(shard.tokens for shard in manifest.shards)
    print(f"{settings.out}: {len(manifest.prompts)} prompts, {tokens} tokens in {len(manifest.shards)} shards")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
