"""Expert scattering: distinct experts and latency of a verification against the budget, with the theory drawn in.

    python -m experiments.scattering --target converted/tiny-qwen3-moe \
        --predictor checkpoints/tiny-qwen3-moe/predictor --data prompts --out results/scattering

The paper's Figure 1. With uniform routing, t tokens touch E (1 - (1 - K/E)^t) of E experts in the mean, K each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ecospec_jax import SpecConfig, UserError
from ecospec_jax.config import RoutingShape
from experiments import decode
from experiments.batches import check_contenders, contender, measure_batches, median_of
from experiments.harness import (
    ExperimentSettings,
    Measurement,
    check_methods,
    check_prompts,
    check_settings,
    open_results,
    run_experiment,
    write_markdown,
)
from experiments.intervals import error_bars
from experiments.plots import plt, save_figure
from experiments.tables import markdown_table

COLUMNS = {"u": "U", "verify_ms": "verify ms", "step_ms": "step ms", "rows": "rows", "tau": "tau"}
NOTE = (
    "Medians over batches of prompts [95 % bootstrap interval]. Uniform: the mean under uniform routing for as "
    "many tokens as the verification has rows. Verify ms is from a staged pass, step ms of the whole compiled step."
)


@dataclass(frozen=True)
class Settings(ExperimentSettings):
    """Distinct experts and latency against the budget."""

    methods: tuple[str, ...] = ("likelihood", "ecospec")
    """Methods to compare."""
    budgets: tuple[int, ...] = (0, 1, 2, 4, 6, 8, 10, 12, 14, 16)
    """Candidate nodes verified beside the root."""
    depth: int = 5
    """Token levels of the candidate tree; 5 with branch 2 are 18 nodes, so that a budget of 16 leaves a choice."""
    ignore_eos: bool = True
    """Go on after the end-of-sequence token."""
    out: Path = Path("results/scattering")
    """Folder for results.jsonl, scattering.md and scattering.png."""

    QUICK: ClassVar[dict[str, Any]] = {**ExperimentSettings.QUICK, "budgets": (0, 4, 16)}


def uniform_distinct(experts: int, per_token: int, tokens: float) -> float:
    """Distinct experts in the mean when each token takes `per_token` of `experts`, all sets equally likely."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def table(
    measurements: Sequence[Measurement], methods: Sequence[str], budgets: Sequence[int], shape: RoutingShape
) -> str:
    lines = []
    for method in methods:
        for budget in budgets:
            found = {name: median_of(measurements, name, method=method, budget=budget) for name in COLUMNS}
            theory = uniform_distinct(shape.experts, shape.k, found["rows"].middle)
            cells = [one.cell() for one in found.values()]
            lines.append([method, str(budget), f"{theory:.2f}", *cells])
    return markdown_table(["method", "budget", "U uniform", *COLUMNS.values()], lines)


def plot(
    path: Path,
    measurements: Sequence[Measurement],
    methods: Sequence[str],
    budgets: Sequence[int],
    shape: RoutingShape,
    batch_size: int,
) -> None:
    panels = {"u": "U: distinct experts per MoE layer", "verify_ms": "verification, ms", "step_ms": "step, ms"}
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2), layout="constrained")
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for method in methods:
            found = [median_of(measurements, name, method=method, budget=budget) for budget in budgets]
            middles = [one.middle for one in found]
            axis.errorbar(budgets, middles, yerr=error_bars(found), marker="o", capsize=2, label=method)
        axis.set_xlabel("budget")
        axis.set_title(title, fontsize=9)
        axis.set_ylim(bottom=0)
    line = np.linspace(min(budgets), max(budgets), 100)
    theory = [uniform_distinct(shape.experts, shape.k, batch_size * (1 + budget)) for budget in line]
    axes[0].plot(line, theory, "k--", label="uniform routing")
    axes[0].legend(fontsize=8)
    save_figure(figure, path)


def run(settings: Settings) -> None:
    check_settings(settings)
    methods = check_methods(settings.methods)
    budgets = sorted(set(settings.budgets))
    if not budgets:
        raise UserError("--budgets names none")
    for budget in budgets:
        SpecConfig(depth=settings.depth, branch=settings.branch, budget=budget)  # refuses what the pool does not hold
    data_sets = settings.data_sets()
    decoder = decode.load_decoder(settings)
    job = settings.decoding()
    found = [contender(method, job, {}, budget=budget) for budget in budgets for method in methods]
    check_contenders(decoder, found)
    for prompts in data_sets.values():
        check_prompts(decoder, prompts, settings.max_new_tokens)
    shape = RoutingShape.of(decoder.target.config)
    with open_results("scattering", settings, decoder, data_sets) as results:
        for name, prompts in data_sets.items():
            case = {"data_set": name}
            measure_batches(results, decoder, found, prompts, case, repeats=settings.repeats, staged=True)
        measured = list(results)
        plot(settings.out / "scattering.png", measured, methods, budgets, shape, settings.batch_size)
        sections = [NOTE, table(measured, methods, budgets, shape)]
        write_markdown(settings.out / "scattering.md", "Expert scattering", results.header, sections)
    print(f"written to {settings.out}: results.jsonl, scattering.md, scattering.png")


if __name__ == "__main__":
    run_experiment(Settings, run, __doc__)
