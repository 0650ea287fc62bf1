"""Where batching ends the gain: plain step time over verification time, and speedup, for growing batches.

    python -m experiments.batch_scaling --target converted/tiny-qwen3-moe \
        --predictor checkpoints/tiny-qwen3-moe/predictor --data prompts --out results/batch_scaling

The paper's Tables 6 to 8. A batch verifies the union of its sequences' experts; methods with a predictor run with an
expert buffer a sequence and with one that all share.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ecospec_jax import UserError
from ecospec_jax.methods import get_method
from experiments import decode
from experiments.batches import (
    Contender,
    by_prompt,
    check_contenders,
    contender,
    measure_batches,
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
from experiments.intervals import Interval, error_bars
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.prompts import Prompt
from experiments.tables import markdown_table

PLAIN = "ar"
NOTE = (
    "Medians over batches of prompts [95 % bootstrap interval], paired with plain decoding of the same batch. Plain "
    "over verify: milliseconds of a plain target pass over those of a verification, both from a staged pass. "
    "Crossover: where the speedup falls to 1, interpolated over the logarithm of the batch size."
)


@dataclass(frozen=True)
class Settings(ExperimentSettings):
    """Speedup and verification time for growing batches."""

    methods: tuple[str, ...] = ("likelihood", "ecospec", "rate")
    """Methods to compare with plain decoding."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Prompts decoded together; --batch-size is not used."""
    ignore_eos: bool = True
    """Go on after the end-of-sequence token, so that a batch stays whole."""
    out: Path = Path("results/batch_scaling")
    """Folder for results.jsonl, batch_scaling.md and batch_scaling.png."""

    QUICK: ClassVar[dict[str, Any]] = {
        **ExperimentSettings.QUICK,
        "methods": ("likelihood", "ecospec"),
        "batch_sizes": (1, 4),
        "limit": 4,
    }


def contenders(settings: Settings, methods: Sequence[str], batch_size: int) -> list[Contender]:
    """Plain decoding, and every method with each buffer that it can have."""
    job = settings.decoding(batch_size=batch_size)
    found = [contender(PLAIN, job, {"batch_size": batch_size}, shared_buffer=False)]
    for method in methods:
        for shared in (False, True) if get_method(method).predictor is not None and batch_size > 1 else (False,):
            found.append(contender(method, job, {"batch_size": batch_size}, shared_buffer=shared))
    return found


def whole_batches(prompts: Mapping[str, list[Prompt]], batch_size: int) -> dict[str, list[Prompt]]:
    """As many prompts of each data set as fill batches; one that fills none is refused."""
    found = {name: some[: len(some) // batch_size * batch_size] for name, some in prompts.items()}
    for name, some in found.items():
        if not some:
            raise UserError(f"data set '{name}' has {len(prompts[name])} prompts, a batch of {batch_size} needs more")
    return found


@dataclass(frozen=True)
class Row:
    """A method at a batch size, against plain decoding of the same batches."""

    name: str
    batch_size: int
    plain_over_verify: Interval
    speedup: Interval
    tau: Interval
    u: Interval


def rows(measurements: Sequence[Measurement], settings: Settings) -> list[Row]:
    found = []
    for batch_size in settings.batch_sizes:
        plain, *others = contenders(settings, settings.methods, batch_size)
        for one in others:
            case: dict[str, Scalar] = {"method": one.method, **one.case}
            base: dict[str, Scalar] = {"method": PLAIN, **plain.case}
            mine_ms, plain_ms = (by_prompt(measurements, "verify_ms", **either) for either in (case, base))
            mine_speed, plain_speed = (
                by_prompt(measurements, "tokens_per_second", **either) for either in (case, base)
            )
            tau, u = (median_of(measurements, value, **case) for value in ("tau", "u"))
            name = f"{one.method}, shared buffer" if one.case["shared_buffer"] else one.method
            ratios = median_ratio(paired(plain_ms, mine_ms)), median_ratio(paired(mine_speed, plain_speed))
            found.append(Row(name, batch_size, *ratios, tau, u))
    return found


def crossover(sizes: Sequence[int], speedups: Sequence[float]) -> str:
    """The batch size where the speedup first falls to 1."""
    if speedups[0] <= 1:
        return f"below {sizes[0]}"
    for (small, above), (large, below) in itertools.pairwise(zip(sizes, speedups, strict=True)):
        if below <= 1:
            share = (above - 1) / (above - below)
            return f"{math.exp(math.log(small) + share * math.log(large / small)):.1f}"
    return f"above {sizes[-1]}"


def crossovers(found: Sequence[Row]) -> str:
    lines = []
    for name in dict.fromkeys(row.name for row in found):
        mine = [row for row in found if row.name == name]
        lines.append([name, crossover([row.batch_size for row in mine], [row.speedup.middle for row in mine])])
    return markdown_table(["method", "crossover"], lines)


def plot(path: Path, found: Sequence[Row]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, value, title in zip(
        axes, ("plain_over_verify", "speedup"), ("plain step over verification", "speedup over plain"), strict=True
    ):
        for name in dict.fromkeys(row.name for row in found):
            mine = [row for row in found if row.name == name]
            intervals = [getattr(row, value) for row in mine]
            middles = [one.middle for one in intervals]
            sizes, errors = [row.batch_size for row in mine], error_bars(intervals)
            axis.errorbar(sizes, middles, yerr=errors, marker="o", capsize=2, label=name)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("batch size")
        axis.set_title(title, fontsize=9)
    axes[0].legend(fontsize=8)
    save_figure(figure, path)


def run(settings: Settings) -> None:
    check_settings(settings)
    methods = check_methods(settings.methods)
    if PLAIN in methods or not settings.batch_sizes or list(settings.batch_sizes) != sorted(set(settings.batch_sizes)):
        raise UserError(f"--methods are compared with {PLAIN}, which is not one of them; --batch-sizes must rise")
    for batch_size in settings.batch_sizes:
        require_positive(settings.decoding(batch_size=batch_size), "batch_size")
    data_sets = settings.data_sets()
    filled = {size: whole_batches(data_sets, size) for size in settings.batch_sizes}
    decoder = decode.load_decoder(settings)
    found = {size: contenders(settings, methods, size) for size in settings.batch_sizes}
    check_contenders(decoder, found[settings.batch_sizes[-1]])
    check_prompts(decoder, itertools.chain(*data_sets.values()), settings.max_new_tokens)
    with open_results("batch_scaling", settings, decoder, data_sets) as results:
        for size, prompts in filled.items():
            for name, some in prompts.items():
                case = {"data_set": name}
                measure_batches(results, decoder, found[size], some, case, repeats=settings.repeats, staged=True)
        measured = rows(list(results), settings)
        names = ("plain_over_verify", "speedup", "tau", "u")
        cells = [[row.name, str(row.batch_size), *(getattr(row, name).cell() for name in names)] for row in measured]
        header = ["method", "batch", "plain over verify", "speedup", "tau", "U"]
        plot(settings.out / "batch_scaling.png", measured)
        sections = [NOTE, markdown_table(header, cells), crossovers(measured)]
        write_markdown(settings.out / "batch_scaling.md", "Batch scaling", results.header, sections)
    print(f"written to {settings.out}: results.jsonl, batch_scaling.md, batch_scaling.png")


if __name__ == "__main__":
    run_experiment(Settings, run, __doc__)
