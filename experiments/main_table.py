"""The main comparison: speedup, acceptance length and distinct experts on every data set, greedy and sampled.

    python -m experiments.main_table --target converted/tiny-qwen3-moe \
        --predictor checkpoints/tiny-qwen3-moe/predictor --data prompts --out results/main_table

The paper's Table 1, with intervals over prompts and paired tests between methods.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ecospec_jax import UserError
from experiments import decode
from experiments.batches import (
    Contender,
    by_prompt,
    check_contenders,
    contender,
    measure_batches,
    median_difference,
    median_of,
    median_ratio,
    paired,
)
from experiments.harness import (
    ExperimentSettings,
    Measurement,
    Scalar,
    check_methods,
    check_prompts,
    check_settings,
    open_results,
    run_experiment,
    write_markdown,
)
from experiments.intervals import error_bars, paired_p
from experiments.plots import plt, save_figure
from experiments.tables import markdown_table

POOLED = "all"  # the prompts of all data sets together
NOTE = (
    "Medians over batches of prompts [95 % bootstrap interval]. Speedup is over {baseline}, paired by batch. "
    "p: two-sided sign-flip test over the same batches, not corrected for the number of comparisons."
)


@dataclass(frozen=True)
class Settings(ExperimentSettings):
    """Speedup, acceptance length and distinct experts on every data set."""

    methods: tuple[str, ...] = ("ar", "likelihood", "ecospec", "rate")
    """Methods to compare; the first is the baseline of the speedup."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0 is greedy."""
    seeds: int = 1
    """Seeds to sample with, from --seed on; greedy decoding takes the first only."""
    out: Path = Path("results/main_table")
    """Folder for results.jsonl, main_table.md and a plot for each temperature."""


def contenders(settings: Settings, methods: Sequence[str], temperature: float) -> list[list[Contender]]:
    """For each seed, every method. A seed draws from other streams than the next whatever the number of prompts."""
    return [
        [
            contender(method, settings.decoding(seed=settings.seed + 100_003 * number), {}, temperature=temperature)
            for method in methods
        ]
        for number in range(settings.seeds if temperature > 0 else 1)
    ]


def table(measurements: Sequence[Measurement], methods: Sequence[str], temperature: float) -> str:
    """Rows of every data set, then of all together."""
    lines, base = [], by_prompt(measurements, "tokens_per_second", method=methods[0], temperature=temperature)
    for data_set, wanted in groups(base).items():
        for method in methods:
            case: dict[str, Scalar] = {"method": method, "temperature": temperature, **wanted}
            speed = beside(base, measurements, data_set, case)
            cells = [median_ratio(speed).cell(), *(median_of(measurements, name, **case).cell() for name in FIGURES)]
            lines.append([data_set, method, f"{np.nanmedian(speed[:, 0]):.1f}", *cells, str(len(speed))])
    return markdown_table(["data set", "method", "tokens/s", "speedup", "tau", "U", "batches"], lines)


FIGURES = ("tau", "u")


def beside(
    base: Mapping[tuple[str, str], float],
    measurements: Sequence[Measurement],
    data_set: str,
    case: Mapping[str, Scalar],
) -> np.ndarray:
    """Speeds of a case and of the baseline on the same batches of a data set, `[batches, 2]`."""
    theirs = {key: value for key, value in base.items() if data_set in (key[0], POOLED)}
    return paired(by_prompt(measurements, "tokens_per_second", **case), theirs)


def groups(found: Mapping[tuple[str, str], float]) -> dict[str, dict[str, Scalar]]:
    """What selects the measurements of each data set, and of all where there are several."""
    names = list(dict.fromkeys(data_set for data_set, _ in found))
    selecting: dict[str, dict[str, Scalar]] = {name: {"data_set": name} for name in names}
    return selecting if len(names) == 1 else {**selecting, POOLED: {}}


def tests(measurements: Sequence[Measurement], methods: Sequence[str], temperature: float) -> str:
    """Every two methods, on all data sets together: ratio of speeds, differences of tau and U, and their p."""
    lines = []
    for first, second in itertools.combinations(methods, 2):
        line = [f"{second} against {first}"]
        for name in ("tokens_per_second", *FIGURES):
            mine, theirs = (
                by_prompt(measurements, name, method=method, temperature=temperature) for method in (second, first)
            )
            both = paired(mine, theirs)
            if name == "tokens_per_second":
                line.append(median_ratio(both).cell())
                both = np.log(both)
            else:
                line.append(median_difference(both).cell("+"))
            line.append(f"{paired_p(both[:, 0], both[:, 1]):.4f}")
        lines.append(line)
    return markdown_table(["methods", "speed, ratio", "p", "tau, difference", "p", "U, difference", "p"], lines)


def agreement(measurements: Sequence[Measurement], methods: Sequence[str], temperature: float) -> str:
    """Whether the tokens are the first method's: on how many runs they are not."""
    sums: dict[Scalar, dict[tuple[Any, ...], float | None]] = {method: {} for method in methods}
    for one in measurements:
        if one.case["temperature"] == temperature:
            sums[one.case["method"]][one.case["data_set"], one.prompt, one.seed, one.repeat] = one.values["checksum"]
    lines = []
    for method in methods[1:]:
        other = sum(value != sums[methods[0]][key] for key, value in sums[method].items())
        lines.append(f"- {method}: tokens other than {methods[0]}'s in {other} of {len(sums[method])} runs")
    return "\n".join(lines)


def plot(path: Path, measurements: Sequence[Measurement], methods: Sequence[str], temperature: float) -> None:
    base = by_prompt(measurements, "tokens_per_second", method=methods[0], temperature=temperature)
    data_sets = groups(base)
    figure, axis = plt.subplots(figsize=(2 + 1.2 * len(data_sets), 3.2), layout="constrained")
    width = 0.8 / len(methods)
    for place, method in enumerate(methods):
        speeds = []
        for data_set, wanted in data_sets.items():
            case: dict[str, Scalar] = {"method": method, "temperature": temperature, **wanted}
            speeds.append(median_ratio(beside(base, measurements, data_set, case)))
        places = np.arange(len(data_sets)) + width * (place - (len(methods) - 1) / 2)
        axis.bar(places, [one.middle for one in speeds], width, yerr=error_bars(speeds), capsize=2, label=method)
    axis.set_xticks(range(len(data_sets)), list(data_sets))
    axis.set_ylabel(f"speed over {methods[0]}")
    axis.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
    axis.legend(fontsize=8)
    save_figure(figure, path)


def run(settings: Settings) -> None:
    check_settings(settings, "seeds")
    methods = check_methods(settings.methods)
    if not settings.temperatures:
        raise UserError("--temperatures names none")
    data_sets = settings.data_sets()
    decoder = decode.load_decoder(settings)
    runs = {temperature: contenders(settings, methods, temperature) for temperature in settings.temperatures}
    for seeds in runs.values():
        check_contenders(decoder, seeds[0])
    check_prompts(decoder, itertools.chain(*data_sets.values()), settings.max_new_tokens)
    with open_results("main_table", settings, decoder, data_sets) as results:
        for (name, prompts), seeds in itertools.product(data_sets.items(), runs.values()):
            for each in seeds:
                measure_batches(results, decoder, each, prompts, {"data_set": name}, repeats=settings.repeats)
        found, sections = list(results), [NOTE.format(baseline=methods[0])]
        for temperature in runs:
            sections += [
                f"## Temperature {temperature:g}",
                table(found, methods, temperature),
                tests(found, methods, temperature),
                agreement(found, methods, temperature),
            ]
            plot(settings.out / f"speed-T{temperature:g}.png", found, methods, temperature)
        write_markdown(settings.out / "main_table.md", "Main comparison", results.header, sections)
    print(f"written to {settings.out}: results.jsonl, main_table.md, plots")


if __name__ == "__main__":
    run_experiment(Settings, run, __doc__)
