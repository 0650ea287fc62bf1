"""Judge expert predictors on recordings: sets, counts, scores, and what they cost.

    python -m experiments.eval_predictor --target converted/tiny-qwen3-moe \
        --predictor checkpoints/tiny-qwen3-moe/predictor --text demo=experiments/prompts/demo.jsonl

Each text is of one kind: prompts held out of training, a data set that was left out, another language, longer answers.
Probabilities, where a predictor gives any, are judged on the traces of `--traces` (`predictor_reliability.py`).
A prompt file is recorded first (`experiments.recording`); a folder of recordings is taken as it is. Rows are the root
and every candidate node of every position of an answer. Intervals are 95 % bootstrap intervals over prompts.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Column, Table

from ecospec_jax import Decoder, UserError, expert_bits
from ecospec_jax.cache import Rows
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.models.predictor import Evidence, Predictor
from experiments import recording
from experiments.environment import environment
from experiments.intervals import Interval, error_bars, ratio_interval
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.predictor_metrics import (
    agreement,
    by_prompt,
    marginal_counts,
    rank_correlation,
)
from experiments.predictor_reliability import Trust, judge_reliability, reliability_table, write_reliability
from experiments.recording import Header, Recording, named_predictors
from experiments.replay_costs import OWN, cost_model
from experiments.tables import markdown_table, notes, write_text

SHARDS = "recording-*.npz"
CONTEXT = 64  # committed tokens behind which a prediction is timed


@dataclass(frozen=True)
class Settings:
    """Judge expert predictors on recordings."""

    text: tuple[str, ...]
    """NAME=PATH: a prompt file, or a folder that `python -m experiments.recording` wrote for this target."""
    target: Path
    """Folder that `python -m convert` wrote."""
    predictor: tuple[Path, ...]
    """Folders of predictors. With several, theirs are called FOLDER/NAME."""
    limit: int | None = None
    """Use only the first prompts of each prompt file."""
    max_new_tokens: int = 128
    """Most tokens of a recorded answer."""
    temperature: float = 0.0
    """Of recorded answers; 0 is greedy."""
    eps: float = 1.0
    """Of the cost-aware score whose order is compared with the oracle's."""
    repeats: int = 50
    """Timed predictions of each predictor."""
    traces: Path | None = None
    """Folder that `python -m experiments.collect_traces` wrote: judge probabilities too, on its held-out prompts."""
    held_out: float = 0.2
    """Share of the traces' prompts that was held out when the predictors were trained; 1 if none took part."""
    seed: int = 0
    """Seed of that training, which says which prompts these are."""
    out: Path = Path("results/predictors")
    """Folder for predictors.jsonl, predictors.md, predictors.png, the recordings that are made, and with --traces
    calibration.jsonl and calibration.png."""


@dataclass(frozen=True)
class Judgement:
    """Figures of one predictor on one recording.

    Attributes:
        overlap: share of the true experts that are predicted (recall, the paper's top-k overlap).
        precision: share of the predicted experts that are true.
        f1: of both.
        layers, depths: overlap by MoE layer, and by depth (0 is the root).
        count_error: mean absolute error of a node's marginal count, over its mean.
        count_bias: mean predicted over mean true marginal count.
        counts: mean true count of nodes by predicted count, in ten groups of equal size: (predicted, true).
        rank: mean Spearman correlation of the nodes' scores with the oracle's.
    """

    text: str
    predictor: str
    overlap: Interval
    precision: Interval
    f1: Interval
    layers: tuple[Interval, ...]
    depths: tuple[Interval, ...]
    count_error: Interval
    count_bias: Interval
    counts: tuple[tuple[float, float], ...]
    rank: Interval


def judge(text: Recording, name: str, predictor: str, eps: float) -> Judgement:
    """All figures of one predictor."""
    sets = text.forecasts[predictor]
    sizes = agreement(sets, text.experts)

    def ratio(tops: np.ndarray, bottoms: np.ndarray) -> Interval:
        sums = (by_prompt(text, part.reshape(len(part), -1).sum(axis=1, dtype=float)) for part in (tops, bottoms))
        return ratio_interval(*sums)

    levels = np.concatenate([[0], text.depths])
    true, said = (marginal_counts(text, bits) for bits in (text.experts, sets))
    chance = np.exp(text.log_probs)
    rank_X = rank_correlation(chance / (said + eps), chance / (true + eps))
    known_X = np.isfinite(rank_X)
    order = np.argsort(said.reshape(-1), kind="stable")
    groups = [group for group in np.array_split(order, 10) if len(group)]
    return Judgement(
        text=name,
        predictor=predictor,
        overlap=ratio(sizes.hits, sizes.true),
        precision=ratio(sizes.hits, sizes.predicted),
        f1=ratio(2 * sizes.hits, sizes.true + sizes.predicted),
        layers=tuple(ratio(sizes.hits[..., i], sizes.true[..., i]) for i in range(sizes.true.shape[2])),
        depths=tuple(
            ratio(sizes.hits[:, levels == depth], sizes.true[:, levels == depth]) for depth in range(max(levels) + 1)
        ),
        count_error=ratio(np.abs(said - true), true),
        count_bias=ratio(said, true),
        counts=tuple((float(said.reshape(-1)[g].mean()), float(true.reshape(-1)[g].mean())) for g in groups),
        rank=ratio(np.where(known_X, rank_X, 0.0), known_X),
    )


def seconds(predictor: Predictor, header: Header, repeats: int) -> float:
    """Median time of one prediction of a whole candidate tree, its cache in place."""
    rows_count = 1 + header.spec().pool_size
    shape = (1, rows_count)
    rows = Rows(
        tokens_BR=jnp.arange(rows_count)[None],
        positions_BR=jnp.full(shape, CONTEXT),
        live_BR=jnp.ones(shape, bool),
        context_B=jnp.array([CONTEXT]),
        mask_BRW=jnp.broadcast_to(jnp.eye(rows_count, dtype=bool), (1, rows_count, rows_count)),
    )
    graph, state = nnx.split(predictor)
    cache = predictor.empty_cache(1, CONTEXT + rows_count)
    last_BLW = jnp.zeros((1, header.routing.layers, expert_bits.words(header.routing.experts)), jnp.uint32)
    states_BRH = jnp.zeros((*shape, getattr(getattr(predictor, "config", None), "state_size", 0)))

    @jax.jit
    def call(state: nnx.State, cache: Any) -> Any:
        evidence = Evidence(last_BLW, lambda rows: last_BLW[:, None], rows.tokens_BR, states_BRH)
        return nnx.merge(graph, state)(rows, cache, evidence)

    jax.block_until_ready(call(state, cache))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(state, cache))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def paths_of(settings: Settings) -> dict[str, Path]:
    """Texts by name."""
    found: dict[str, Path] = {}
    for one in settings.text:
        name, separator, path = one.partition("=")
        if not separator or not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"--text {one}: NAME=PATH is expected, the name of letters, digits, '.', '_' and '-'")
        if name in found:
            raise UserError(f"--text: two are called '{name}'")
        found[name] = Path(path)
        if not found[name].exists():
            raise UserError(f"{path}: no such file or folder")
        if found[name].is_dir() and not list(found[name].glob(SHARDS)):
            raise UserError(f"{path}: holds no {SHARDS}")
    if not found:
        raise UserError("--text names no text")
    return found


def record(settings: Settings, name: str, prompts: Path) -> Path:
    """The folder of a text's recording, made if it is not there yet."""
    asked = recording.Settings(
        target=settings.target,
        prompts=prompts,
        out=settings.out / "recordings" / name,
        predictor=settings.predictor,
        limit=settings.limit,
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
    )
    for _ in recording.shards(asked):
        pass
    return asked.out


def load(settings: Settings, decoder: Decoder, predictors: Mapping[str, Predictor]) -> dict[str, Recording]:
    """The recordings by name; they must be of this target and these predictors."""
    configs = {name: getattr(one, "config", None) for name, one in predictors.items()}
    found = {}
    for name, path in paths_of(settings).items():
        folder = path if path.is_dir() else record(settings, name, path)
        found[name] = recording.read_recordings(sorted(folder.glob(SHARDS)))
        header = found[name].header
        for what, own, other in (
            ("target", header.target_hash, decoder.target_hash),
            ("drafter", header.drafter_hash, decoder.drafter_hash),
            ("set of predictors", header.predictors, configs),
        ):
            if own != other:
                raise UserError(f"{folder}: was recorded with another {what}")
    return found


HEADER = ("text", "predictor", "overlap", "F1", "count error", "count bias", "rank", "MB a step", "ms a step")


def cells_of(one: Judgement, megabytes: Mapping[str, float], times: Mapping[str, float]) -> list[str]:
    figures = [part.cell() for part in (one.overlap, one.f1, one.count_error, one.count_bias, one.rank)]
    return [one.text, one.predictor, *figures, f"{megabytes[one.predictor]:.2f}", f"{times[one.predictor]:.2f}"]


def layer_table(judged: list[Judgement]) -> str:
    layers, depths = (range(len(getattr(judged[0], part))) for part in ("layers", "depths"))
    header = ["text", "predictor", *(f"layer {i}" for i in layers), *(f"depth {i}" for i in depths)]
    lines = [
        [one.text, one.predictor, *(f"{part.middle:.3f}" for part in (*one.layers, *one.depths))] for one in judged
    ]
    return markdown_table(header, lines)


def plot(path: Path, judged: list[Judgement]) -> None:
    """By recording: overlap by layer, overlap by depth, and true counts against predicted ones."""
    names = list(dict.fromkeys(one.text for one in judged))
    figure, axes = plt.subplots(
        len(names), 3, figsize=(12, 1 + 3 * len(names)), layout="constrained", squeeze=False, sharey="col"
    )
    for row, name in zip(axes, names, strict=True):
        largest = 0.0
        for one in (one for one in judged if one.text == name):
            for axis, part in zip(row, (one.layers, one.depths), strict=False):
                middles = [interval.middle for interval in part]
                axis.errorbar(range(len(part)), middles, yerr=error_bars(part), label=one.predictor, capsize=2)
            row[2].plot(*zip(*one.counts, strict=True), marker="o", label=one.predictor)
            largest = max(largest, *(max(pair) for pair in one.counts))
        row[2].plot([0, largest], [0, largest], color="black", linewidth=0.8)
        for axis, label in zip(row, ("MoE layer", "depth (0: root)", "predicted new experts of a path"), strict=True):
            axis.set_xlabel(label)
        row[0].set_ylabel(f"{name}\noverlap")
        row[2].set_ylabel("true new experts")
    axes[0][0].legend()
    save_figure(figure, path)


def run(settings: Settings) -> None:
    console = Console()
    require_positive(settings, "repeats", "limit", "max_new_tokens")
    if settings.eps <= 0:
        raise UserError(f"--eps {settings.eps} is not positive")
    if not 0 < settings.held_out <= 1:
        raise UserError(f"--held-out {settings.held_out} is not in 0..1")
    paths_of(settings)  # refuses what cannot be before models are loaded
    decoder = Decoder.load(settings.target)
    predictors = named_predictors(settings.predictor, decoder)
    trusted: dict[str, Trust] = {}
    if settings.traces is not None:
        share, seed = settings.held_out, settings.seed
        trusted = judge_reliability(predictors, decoder, settings.traces, held_out=share, seed=seed)
    recordings = load(settings, decoder, predictors)
    header = next(iter(recordings.values())).header
    times = {name: 1e3 * seconds(one, header, settings.repeats) for name, one in predictors.items()}
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
    judged = [
        judge(text, name, predictor, settings.eps)
        for name, text in recordings.items()
        for predictor in header.predictors
    ]
    megabytes = {name: cost_model(header, OWN, name, "eagle3").predict / 1e6 for name in header.predictors}
    cells = [cells_of(one, megabytes, times) for one in judged]
    table = Table(*(Column(name) for name in HEADER), title="expert predictors")
    for line in cells:
        table.add_row(*line)
    console.print(table)
    sizes = ", ".join(f"{name}: {len(one.header.prompts)} prompts" for name, one in recordings.items())
    about = {"texts": sizes, "settings": asdict(settings), **environment()}
    lines = [
        json.dumps(asdict(one) | {"megabytes": megabytes[one.predictor], "milliseconds": times[one.predictor]})
        for one in judged
    ]
    tables = [markdown_table(HEADER, cells), layer_table(judged)]
    if trusted:
        tables.append(reliability_table(trusted, header.routing))
    written = ["predictors.jsonl", "predictors.md", "predictors.png"]
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        write_text(settings.out / "predictors.jsonl", "\n".join(lines) + "\n")
        write_text(settings.out / "predictors.md", "\n".join([*tables, notes(about), ""]))
        plot(settings.out / "predictors.png", judged)
        if trusted:
            written += write_reliability(settings.out, trusted)
    console.print(f"written to {settings.out}: {', '.join(written)}", soft_wrap=True)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
