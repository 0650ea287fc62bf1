"""Milliseconds of each stage of a step, from a separate pass that runs the stages one by one.

The sum is more than a fused step takes, since every stage pays its own dispatch; throughput is never taken from here.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ecospec_jax.decoding import DecodeState, StepPlan, Weights, commit, draft, predict, select, verify

STAGES = ("draft", "predict", "select", "verify", "commit")


class StageProfiler:
    """The stages of a plan, compiled apart."""

    def __init__(self, plan: StepPlan) -> None:
        """Nothing is compiled before the first call."""
        self._draft = jax.jit(partial(draft, plan), donate_argnames=("state",))
        self._predict = jax.jit(partial(predict, plan), donate_argnames=("state",))
        self._select = jax.jit(partial(select, plan))
        self._verify = jax.jit(partial(verify, plan), donate_argnames=("state",))
        self._commit = jax.jit(partial(commit, plan), donate_argnames=("state",))

    def milliseconds(self, weights: Weights, state: DecodeState, steps: int) -> dict[str, float]:
        """Median milliseconds of each stage over at most `steps` steps, after one that is not counted."""
        samples: dict[str, list[float]] = {stage: [] for stage in STAGES}

        def timed(stage: str, call: Callable[..., Any], *arguments: Any) -> Any:
            started = time.perf_counter()
            result = jax.block_until_ready(call(*arguments))
            samples[stage].append(1000 * (time.perf_counter() - started))
            return result

        for _ in range(steps + 1):
            tree, state = timed("draft", self._draft, weights, state)
            forecast, state = timed("predict", self._predict, weights, state, tree)
            selection = timed("select", self._select, state, tree, forecast)
            verified, state = timed("verify", self._verify, weights, state, tree, selection)
            state = timed("commit", self._commit, state, verified, forecast)
            if state.finished_B.all():
                break
        return {stage: statistics.median(times[1:] or times) for stage, times in samples.items()}
