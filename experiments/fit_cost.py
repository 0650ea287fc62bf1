"""Fit what a step costs in seconds on this machine: `cost.json` for methods that weigh costs.

    python -m experiments.fit_cost --target converted/tiny-qwen3-moe --prompts my_prompts.jsonl --out results/cost.json
    python -m experiments.decode --cost results/cost.json --methods ar,likelihood,rate ..

Prompts are decoded with trees of several sizes, and each verification is repeated and timed apart: its median against
the (layer, expert) pairs that it touched and its rows. Run it while the machine does nothing else.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import track

from ecospec_jax import Decoder, Method, SamplingConfig, SpecConfig, UserError
from ecospec_jax.cost import CostModel, fit_seconds, write_cost
from ecospec_jax.decoding import DecodeState, StepPlan, Weights, commit, draft, predict, verify
from ecospec_jax.errors import run_command
from ecospec_jax.generation import Batch, bucket
from ecospec_jax.selection import likelihood
from ecospec_jax.tree import CandidateTree
from experiments import decode
from experiments.options import require_positive

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Fit what a step costs in seconds on this machine."""

    prompts: Path
    """Prompt file; first turns are used."""
    target: Path | None = None
    """Folder that `python -m convert` wrote."""
    drafter: Path | None = None
    """Take the drafter from this converted folder instead of the target's own."""
    predictor: Path | None = None
    """Folder of expert predictors; the time of one prediction counts only with it."""
    predictor_name: str = "backbone"
    """Which predictor of the folder."""
    random_weights: str | None = None
    """Instead of a target: random weights of this published shape."""
    layers: int | None = None
    """With random weights: number of layers."""
    pad_ffn: int = 0
    """Memory-bound mode: hidden units to add to every expert without changing its output."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Compute dtype; auto is float32 on CPU and bfloat16 on accelerators."""
    budgets: tuple[int, ...] = (0, 1, 2, 4, 6)
    """Sizes of the verify tree."""
    limit: int = 4
    """Use only the first prompts of the file."""
    steps: int = 24
    """Verifications measured for each prompt and size."""
    repeats: int = 5
    """Times each verification is measured."""
    batch_size: int = 1
    """Prompts decoded together: what drafting costs depends on it."""
    out: Path = Path("results/cost.json")
    """File to write."""


@dataclass(frozen=True)
class Sample:
    """One verification: its median seconds, what it touched, and what came before it."""

    seconds: float
    pairs: int
    rows: int
    draft: float
    predict: float


class StageTimer:
    """The stages of a plan, compiled apart; each is repeated on the same state, its caches written in place."""

    def __init__(self, plan: StepPlan, weights: Weights, repeats: int) -> None:
        """Nothing is compiled before the first step."""
        self._weights, self._repeats, self._predicts = weights, repeats, plan.predictor is not None

        def draft_again(weights: Weights, state: DecodeState) -> tuple[CandidateTree, DecodeState]:
            tree, after = draft(plan, weights, state)
            return tree, replace(state, draft_cache=after.draft_cache)

        self._draft = jax.jit(draft_again, donate_argnames=("state",))
        self._predict = jax.jit(partial(predict, plan), donate_argnames=("state",))
        self._select = jax.jit(lambda tree: likelihood(tree, None, plan.spec))
        self._verify = jax.jit(partial(verify, plan), donate_argnames=("state",))
        self._commit = jax.jit(partial(commit, plan), donate_argnames=("state",))

    def _timed(
        self, call: Callable[..., tuple[T, DecodeState]], state: DecodeState, *rest: Any
    ) -> tuple[float, T, Any]:
        result, state = jax.block_until_ready(call(self._weights, state, *rest))
        seconds = []
        for _ in range(self._repeats):
            started = time.perf_counter()
            result, state = jax.block_until_ready(call(self._weights, state, *rest))
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds), result, state

    def step(self, state: DecodeState) -> tuple[Sample, DecodeState]:
        """One step of decoding, its stages timed."""
        drafting, tree, state = self._timed(self._draft, state)
        state = replace(state, pending_count_B=jnp.zeros_like(state.pending_count_B))
        predicting, forecast = 0.0, None
        if self._predicts:
            predicting, forecast, state = self._timed(self._predict, state, tree)
        seconds, verified, state = self._timed(self._verify, state, tree, self._select(tree))
        live_BR = np.asarray(verified.tree.rows.live_BR)
        pairs = int(np.bitwise_count(np.bitwise_or.reduce(np.asarray(verified.experts_BRLW)[live_BR])).sum())
        sample = Sample(seconds, pairs, int(live_BR.sum()), drafting, predicting)
        return sample, self._commit(state, verified, forecast)


def measure(decoder: Decoder, settings: Settings, prompts: list[list[int]]) -> Iterator[Sample]:
    """Every batch of prompts with every size of tree."""
    predictor = settings.predictor_name if settings.predictor is not None else None
    longest = max(len(ids) for ids in prompts)
    for budget in settings.budgets:
        spec = SpecConfig(budget=budget)
        program, weights = decoder.program(
            Method("measured", likelihood, predictor=predictor), spec, SamplingConfig(), ignore_eos=True
        )
        new_tokens = settings.steps * spec.max_emitted + 2
        capacity = bucket(longest + new_tokens + program.plan.scratch_slots())
        timer = StageTimer(program.plan, weights, settings.repeats)
        for first in range(0, len(prompts), settings.batch_size):
            part = prompts[first : first + settings.batch_size]
            sizes = {"max_new_tokens": new_tokens, "capacity": capacity, "batch_size": settings.batch_size}
            state = Batch(program, weights, part, [(0, index) for index in range(len(part))], **sizes).state
            for _ in range(settings.steps):
                sample, state = timer.step(state)
                yield sample


def fit(samples: list[Sample], moe_layers: int) -> tuple[CostModel, float]:
    """The cost model of the measurements, and r^2; a `UserError` says what they do not show."""
    try:
        return fit_seconds(
            [one.seconds for one in samples],
            [one.pairs for one in samples],
            [one.rows for one in samples],
            moe_layers=moe_layers,
            draft=statistics.median(one.draft for one in samples),
            predict=statistics.median(one.predict for one in samples),
        )
    except UserError as error:
        raise UserError(
            f"{len(samples)} verifications do not show what a pass and an expert cost ({error}): "
            "measure more steps and budgets, or on a quieter machine"
        ) from error


def encode(decoder: Decoder, settings: Settings) -> list[list[int]]:
    """Token ids of the prompts, checked against the context that the longest measurement needs."""
    asked = decode.load_prompts(decode.Settings(prompts=settings.prompts, limit=settings.limit))
    encoded = [
        decoder.encode(prompt.turns[0] if decoder.tokenizer is not None else list(prompt.turns[0].encode()))
        for prompt in asked
    ]
    new_tokens = settings.steps * SpecConfig(budget=max(settings.budgets)).max_emitted + 2
    for prompt, ids in zip(asked, encoded, strict=True):
        decoder.check_fits(ids, new_tokens, where=f"{settings.prompts}: {prompt.id}")
    return encoded


def run(settings: Settings) -> None:
    require_positive(settings, "limit", "steps", "repeats", "batch_size")
    if len(set(settings.budgets)) < 2:
        raise UserError("--budgets needs at least two sizes to tell what a row and an expert cost")
    for budget in settings.budgets:
        SpecConfig(budget=budget)  # refuses an impossible one before anything is loaded
    decoder = decode.load_decoder(
        decode.Settings(
            target=settings.target,
            drafter=settings.drafter,
            predictor=settings.predictor,
            random_weights=settings.random_weights,
            layers=settings.layers,
            pad_ffn=settings.pad_ffn,
            dtype=settings.dtype,
        )
    )
    prompts = encode(decoder, settings)
    total = len(settings.budgets) * -(-len(prompts) // settings.batch_size) * settings.steps
    samples = list(track(measure(decoder, settings, prompts), total=total, description="verifications"))
    cost, r_squared = fit(samples, len(decoder.target.config.moe_layers))
    write_cost(settings.out, cost)
    print(
        f"a verification takes {1e3 * cost.fixed:.3f} ms, {1e6 * cost.per_expert:.3f} us for each expert of a layer "
        f"and {1e3 * cost.per_row:.3f} ms for each row; r^2 {r_squared:.3f} over {len(samples)} verifications"
    )
    print(f"drafting takes {1e3 * cost.draft:.3f} ms, predicting {1e3 * cost.predict:.3f} ms; written: {settings.out}")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
