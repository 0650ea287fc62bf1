"""Where the time of a step goes, what it reads, and what it costs by experts and rows, beside the published figures.

    python -m experiments.latency --target converted/tiny-qwen3-moe \
        --predictor checkpoints/tiny-qwen3-moe/predictor --data prompts --out results/latency

The paper's Tables 2 and 3; loading, compilation and prefill, which it leaves out, are reported beside.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ecospec_jax import Decoder, UserError
from ecospec_jax.cost import byte_model
from ecospec_jax.predictor_checkpoint import read_predictor_manifest
from ecospec_jax.presets import PRESETS
from ecospec_jax.profiling import STAGES
from experiments import decode, fit_cost
from experiments.batches import Contender, check_contenders, contender, measure_batches, median_of
from experiments.harness import (
    ExperimentSettings,
    Measurement,
    Results,
    check_methods,
    check_prompts,
    check_settings,
    open_results,
    run_experiment,
    write_markdown,
)
from experiments.intervals import Interval
from experiments.launches import count_launches
from experiments.plots import plt, save_figure
from experiments.prompts import Prompt
from experiments.published import PUBLISHED
from experiments.tables import markdown_table

NOTE = (
    "Medians over batches of prompts [95 % bootstrap interval]. Stages are from a staged pass, each with its own "
    "dispatch, and their sum exceeds the step, which is timed whole and compiled as one. Launches: instructions of the "
    "compiled step that do something (a fusion, library call, custom call or copy each); bodies of loops and all "
    "branches count once. GB: modelled weight bytes of a verification, the target's alone."
)
NOTE_ON_BYTES = (
    "Modelled bytes of a verification of the full targets at the published U (bf16, or as the weights are stored), and "
    "the published estimates. The last column is what the published estimate leaves for everything but routed experts, "
    "beside our count: attention, shared experts, routers, norms, dense layers and head. For gpt-oss-120b the "
    "published figures leave far less than the checkpoint's bf16 attention and head take, so ours are larger; the "
    "paper does not say what it counts there."
)
FULL_WIDTH = 2  # bytes of a bf16 weight
UNDETERMINED = {name: math.nan for name in ("fixed", "per_expert", "per_row", "r_squared")}


@dataclass(frozen=True)
class Settings(ExperimentSettings):
    """Where the time of a step goes."""

    methods: tuple[str, ...] = ("ar", "likelihood", "ecospec", "rate")
    """Methods to time."""
    ignore_eos: bool = True
    """Go on after the end-of-sequence token."""
    budgets: tuple[int, ...] = (0, 1, 2, 4, 6)
    """Sizes of the verify tree that the cost model is fitted to."""
    fit_steps: int = 24
    """Verifications measured for each of `fit_prompts` and size."""
    fit_prompts: int = 4
    """Prompts of the first data set that the cost model is fitted to."""
    out: Path = Path("results/latency")
    """Folder for results.jsonl, latency.md and latency.png."""

    QUICK: ClassVar[dict[str, Any]] = {
        **ExperimentSettings.QUICK,
        "methods": ("ar", "likelihood", "ecospec"),
        "budgets": (0, 4),
        "fit_prompts": 2,
    }


def compiled(decoder: Decoder, one: Contender, prompts: Sequence[Prompt]) -> dict[str, float]:
    """What compiling a step takes, and what came of it."""
    inputs = [decode.Conversation(prompt, 0).next_input(decoder) for prompt in prompts]
    started = time.perf_counter()
    step = decoder.compiled_step(inputs, method=one.method, spec=one.settings.spec, sampling=one.settings.sampling)
    seconds = time.perf_counter() - started
    memory = step.memory_analysis()
    return {
        "compile_seconds": seconds,
        "launches": count_launches(step.as_text() or ""),
        "temporary_bytes": math.nan if memory is None else memory.temp_size_in_bytes,
    }


def fitted(decoder: Decoder, settings: Settings, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Seconds of a verification as a + b x distinct experts + c x rows; nan where the steps do not tell them."""
    asked = fit_cost.Settings(
        prompts=Path(),
        budgets=settings.budgets,
        steps=settings.fit_steps,
        batch_size=settings.batch_size,
        predictor=settings.predictor,
    )
    encoded = [decoder.encode(decode.Conversation(one, 0).next_input(decoder)) for one in prompts]
    samples = list(fit_cost.measure(decoder, asked, encoded))
    try:
        cost, r_squared = fit_cost.fit(samples, len(decoder.target.config.moe_layers))
    except UserError:  # the report says so
        return {**UNDETERMINED, "verifications": len(samples)}
    return {
        "fixed": cost.fixed,
        "per_expert": cost.per_expert,
        "per_row": cost.per_row,
        "r_squared": r_squared,
        "verifications": len(samples),
    }


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def steps(measurements: Sequence[Measurement], methods: Sequence[str]) -> str:
    """The stages, the whole step, launches and bytes of each method."""
    lines = []
    for method in methods:

        def middle(name: str, method: str = method) -> Interval:
            return median_of(measurements, name, method=method)

        apart = [middle(f"{stage}_ms").cell() for stage in STAGES]
        launches = value_of(measurements, "launches", what="compilation", method=method)
        gigabytes = middle("bytes_per_step").middle / 1e9
        lines.append([method, *apart, middle("step_ms").cell(), f"{launches:.0f}", f"{gigabytes:.4g}"])
    return markdown_table(["method", *(f"{stage} ms" for stage in STAGES), "step ms", "launches", "GB"], lines)


def value_of(measurements: Sequence[Measurement], name: str, **case: str) -> float:
    """A value of the one measurement of this case; nan where it is undefined."""
    (found,) = (one for one in measurements if all(one.case.get(key) == wanted for key, wanted in case.items()))
    number = found.values[name]
    return math.nan if number is None else number


def beside(measurements: Sequence[Measurement], methods: Sequence[str], trained: Mapping[str, str]) -> str:
    """What no step contains."""
    lines = [["loading the models, s", f"{value_of(measurements, 'seconds', what='loading'):.2f}"]]
    for method in methods:
        seconds = value_of(measurements, "compile_seconds", what="compilation", method=method)
        prefill = median_of(measurements, "prefill_ms", method=method)
        lines.append([f"{method}: tracing and compiling a step, or reading it from the cache, s", f"{seconds:.2f}"])
        lines.append([f"{method}: prefill, all turns of a prompt, ms", prefill.cell()])
    lines += [[f"training of the predictors: {name}", value] for name, value in trained.items()]
    return markdown_table(["beside the steps", ""], lines)


def cost_line(measurements: Sequence[Measurement]) -> str:
    found = {name: value_of(measurements, name, what="cost model") for name in (*UNDETERMINED, "verifications")}
    count = f"{found['verifications']:.0f} verifications"
    if math.isnan(found["fixed"]):
        return (
            f"{count} do not show what a pass and an expert cost: take more steps, more budgets or a quieter machine."
        )
    return (
        f"Verification = {1e3 * found['fixed']:.4g} ms + {1e6 * found['per_expert']:.4g} us x distinct (layer, expert) "
        f"pairs + {1e6 * found['per_row']:.4g} us x rows, coefficients not negative; r^2 {found['r_squared']:.3f} over "
        f"{count}."
    )


def published_steps() -> str:
    lines = [
        [target, one.method, *(f"{1e3 * value:.0f}" for value in (one.verify_seconds, one.total_seconds)), f"{one.u}"]
        for target, methods in PUBLISHED.items()
        for one in methods
    ]
    return markdown_table(["published (not ours)", "method", "verify ms", "step ms", "U"], lines)


def published_bytes() -> str:
    """Our model of the published targets' bytes beside the published estimates."""
    lines = []
    for target, methods in PUBLISHED.items():
        model = byte_model(PRESETS[target], FULL_WIDTH)
        for one in methods:
            ours = model.step(one.u) / 1e9
            left = one.gigabytes - one.u * model.moe_layers * model.per_expert / 1e9
            lines.append(
                [
                    target,
                    one.method,
                    f"{one.u}",
                    f"{ours:.1f}",
                    f"{one.gigabytes}",
                    f"{100 * (ours / one.gigabytes - 1):+.1f} %",
                    f"{left:.1f} against {model.fixed / 1e9:.1f}",
                ]
            )
    header = ["target", "method", "U", "ours, GB", "published, GB", "difference", "without experts, GB"]
    return markdown_table(header, lines)


def plot(path: Path, measurements: Sequence[Measurement], methods: Sequence[str]) -> None:
    figure, axis = plt.subplots(figsize=(2 + 1.2 * len(methods), 3.2), layout="constrained")
    bottoms = [0.0] * len(methods)
    for stage in STAGES:
        middles = [median_of(measurements, f"{stage}_ms", method=method).middle for method in methods]
        axis.bar(methods, middles, bottom=bottoms, label=stage)
        bottoms = [bottom + middle for bottom, middle in zip(bottoms, middles, strict=True)]
    whole = [median_of(measurements, "step_ms", method=one).middle for one in methods]
    axis.plot(methods, whole, "k_", markersize=24, label="whole step")
    axis.set_ylabel("ms per step")
    axis.legend(fontsize=8)
    save_figure(figure, path)


def measure(results: Results, decoder: Decoder, settings: Settings, found: Sequence[Contender]) -> None:
    data_sets = settings.data_sets()
    for name, prompts in data_sets.items():
        measure_batches(results, decoder, found, prompts, {"data_set": name}, repeats=settings.repeats, staged=True)
    first = next(iter(data_sets.values()))
    for one in found:
        results.measure(
            {"what": "compilation", "method": one.method},
            lambda one=one: compiled(decoder, one, first[: settings.batch_size]),
            seed=settings.seed,
        )
    results.measure(
        {"what": "cost model"}, lambda: fitted(decoder, settings, first[: settings.fit_prompts]), seed=settings.seed
    )


def run(settings: Settings) -> None:
    check_settings(settings, "fit_steps", "fit_prompts")
    methods = check_methods(settings.methods)
    if len(set(settings.budgets)) < 2:
        raise UserError("--budgets needs at least two sizes to tell what a row and an expert cost")
    data_sets = settings.data_sets()
    started = time.perf_counter()
    decoder = decode.load_decoder(settings)
    loading = time.perf_counter() - started
    found = [contender(method, settings.decoding(), {}) for method in methods]
    check_contenders(decoder, [*found, *(contender("ar", settings.decoding(budget=n), {}) for n in settings.budgets)])
    check_prompts(decoder, itertools.chain(*data_sets.values()), settings.max_new_tokens)
    with open_results("latency", settings, decoder, data_sets) as results:
        results.measure({"what": "loading"}, lambda: {"seconds": loading}, seed=settings.seed)
        measure(results, decoder, settings, found)
        recipe = {} if settings.predictor is None else read_predictor_manifest(settings.predictor).recipe
        measured = list(results)
        plot(settings.out / "latency.png", measured, methods)
        sections = [
            NOTE,
            steps(measured, methods),
            cost_line(measured),
            beside(measured, methods, recipe),
            "## Published",
            published_steps(),
            NOTE_ON_BYTES,
            published_bytes(),
        ]
        write_markdown(settings.out / "latency.md", "Latency of a step", results.header, sections)
    print(f"written to {settings.out}: results.jsonl, latency.md, latency.png")


if __name__ == "__main__":
    run_experiment(Settings, run, __doc__)
