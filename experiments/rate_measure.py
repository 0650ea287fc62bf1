"""Wall clock of a study: fixed trees and selection by rate against plain decoding, batch by batch in turn."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ecospec_jax import Decoder
from ecospec_jax.cost import read_cost, write_cost
from ecospec_jax.metrics import DecodeStats
from experiments import decode, fit_cost
from experiments.intervals import Interval, ratio_interval
from experiments.prompts import Prompt

FIT_STEPS = 12  # verifications measured for each group of prompts and size of tree


@dataclass(frozen=True)
class Candidate:
    """A method with the budget it runs at; `ar` has none."""

    method: str
    budget: int | None = None

    @property
    def name(self) -> str:
        return self.method if self.budget is None else f"{self.method}, budget {self.budget}"


def candidates(budgets: Sequence[int], predictors: Sequence[str]) -> list[Candidate]:
    """What is timed, plain decoding first; methods that choose the size have the largest budget as their cap."""
    informed = ("likelihood", "ecospec") if "backbone" in predictors else ("likelihood",)
    fixed = [Candidate(method, budget) for method in informed for budget in budgets]
    rates = [name for name, needs in (("rate", "backbone"), ("rate-table", "token_table")) if needs in predictors]
    return [Candidate("ar"), *fixed, *(Candidate(name, max(budgets)) for name in rates)]


def fitted_cost(decoder: Decoder, settings: decode.Settings, prompts: Sequence[Prompt], path: Path) -> None:
    """Gives the decoder the costs of its batch size in seconds; measured once and kept in `path`."""
    if not path.exists():
        asked = fit_cost.Settings(
            prompts=Path(), predictor=settings.predictor, steps=FIT_STEPS, repeats=3, batch_size=settings.batch_size
        )
        encoded = [decoder.encode(prompt.turns[0]) for prompt in prompts[: max(2, settings.batch_size)]]
        samples = list(fit_cost.measure(decoder, asked, encoded))
        write_cost(path, fit_cost.fit(samples, len(decoder.target.config.moe_layers))[0])
    decoder.cost = read_cost(path)


def time_batches(
    decoder: Decoder, settings: decode.Settings, prompts: Sequence[Prompt], found: Sequence[Candidate], console: Console
) -> list[dict[str, Any]]:
    """A line a candidate: tokens per second over plain decoding, paired by batch, and whether the tokens agree."""
    capacity = max(decode.whole_length(decoder, prompt, settings.max_new_tokens) for prompt in prompts)
    numbered = list(enumerate(prompts))
    tokens: dict[Candidate, list[Any]] = {one: [] for one in found}
    stats: dict[Candidate, list[DecodeStats]] = {one: [] for one in found}
    for first in range(0, len(prompts), settings.batch_size):
        batch = numbered[first : first + settings.batch_size]
        for one in found:
            own = settings if one.budget is None else replace(settings, budget=one.budget)
            conversations, figures = decode.converse(decoder, own, one.method, batch, capacity, console)
            tokens[one] += [answer.tokens for conversation in conversations for answer in conversation.answers]
            stats[one].append(figures)
    plain = found[0]
    return [
        {
            "family": one.name,
            "speed": vars(over_plain(stats[plain], stats[one])),
            "tokens_per_second": sum(part.emitted for part in stats[one])
            / sum(part.decode_seconds for part in stats[one]),
            "tau": functools.reduce(operator.add, stats[one]).tau,
            "same_tokens": tokens[one] == tokens[plain],
            "batches": len(stats[one]),
        }
        for one in found
    ]


def over_plain(plain: Sequence[DecodeStats], mine: Sequence[DecodeStats]) -> Interval:
    """Seconds of plain decoding over those of a method, for the same tokens; batches are resampled."""
    return ratio_interval([part.decode_seconds for part in plain], [part.decode_seconds for part in mine])
