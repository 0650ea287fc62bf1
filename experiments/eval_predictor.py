"""Judge expert predictors on recordings: sets, counts, scores, and what they cost.

    python -m experiments.eval_predictor --recording held-out=recordings/gsm8k left-out=recordings/mbpp \
        --target converted/tiny-qwen3-moe --predictor checkpoints/tiny-qwen3-moe/predictor --out results/predictors

Each recording (`python -m experiments.recording`) is a folder of one kind of text: prompts held out of training, a data
set that was left out, another language, longer answers. Rows are the root and every candidate node of every position
of an answer. Intervals are 95 % bootstrap intervals over prompts.
"""

import json
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
from ecospec_jax.models.predictor import Evidence, Predictor, Previous
from ecospec_jax.predictor_checkpoint import load_predictors
from experiments.environment import environment
from experiments.intervals import Interval, ratio_interval
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.predictor_metrics import (
    agreement,
    ancestors,
    by_prompt,
    marginal_counts,
    rank_correlation,
)
from experiments.recording import Header, Recording, read_recordings
from experiments.replay_costs import OWN, cost_model
from experiments.tables import markdown_table, write_text

CONTEXT = 64  # committed tokens behind which a prediction is timed


@dataclass(frozen=True)
class Settings:
    """Judge expert predictors on recordings."""

    recording: tuple[str, ...]
    """NAME=FOLDER of `python -m experiments.recording`, one each kind of text; all of one target."""
    target: Path | None = None
    """Folder that `python -m convert` wrote: with --predictor, predictions are timed."""
    predictor: Path | None = None
    """Folder of the predictors that were recorded."""
    eps: float = 1.0
    """Of the cost-aware score whose order is compared with the oracle's."""
    repeats: int = 50
    """Timed predictions of each predictor."""
    out: Path = Path("results/predictors")
    """Folder for predictors.jsonl, predictors.md and predictors.png."""


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

    recording: str
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


def judge(recording: Recording, name: str, predictor: str, eps: float) -> Judgement:
    """All figures of one predictor."""
    sets = recording.forecasts[predictor]
    sizes = agreement(sets, recording.experts)

    def ratio(tops: np.ndarray, bottoms: np.ndarray) -> Interval:
        sums = (by_prompt(recording, part.reshape(len(part), -1).sum(axis=1, dtype=float)) for part in (tops, bottoms))
        return ratio_interval(*sums)

    levels = np.concatenate([[0], recording.depths])
    on_path = ancestors(recording.parents)
    true, said = (marginal_counts(recording, bits, on_path) for bits in (recording.experts, sets))
    chance = np.exp(recording.log_probs)
    rank_X = rank_correlation(chance / (said + eps), chance / (true + eps))
    known_X = np.isfinite(rank_X)
    order = np.argsort(said.reshape(-1), kind="stable")
    groups = [group for group in np.array_split(order, 10) if len(group)]
    return Judgement(
        recording=name,
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


def load(settings: Settings) -> dict[str, Recording]:
    """The recordings by name; they must be of one target and one set of predictors."""
    found: dict[str, Recording] = {}
    for one in settings.recording:
        name, separator, folder = one.partition("=")
        if not separator or not name:
            raise UserError(f"--recording {one}: NAME=FOLDER is expected")
        if name in found:
            raise UserError(f"--recording: two are called '{name}'")
        files = sorted(Path(folder).glob("recording-*.npz"))
        if not files:
            raise UserError(f"{folder}: holds no recording-*.npz")
        found[name] = read_recordings(files)
        first, own = next(iter(found.values())).header, found[name].header
        for part in ("target_hash", "predictors"):
            if getattr(first, part) != getattr(own, part):
                raise UserError(f"{folder}: another {part.replace('_', ' ')} than in {settings.recording[0]}")
    if not found:
        raise UserError("--recording names no recording")
    return found


def timings(settings: Settings, header: Header) -> dict[str, float]:
    """Milliseconds of a prediction by each recorded predictor; empty unless the models were given."""
    if settings.target is None or settings.predictor is None:
        return {}
    decoder = Decoder.load(settings.target)
    if decoder.target_hash != header.target_hash:
        raise UserError(f"{settings.target}: not the target that was recorded")
    loaded: dict[str, Predictor] = {
        "previous": Previous(),
        **load_predictors(
            settings.predictor, header.target_hash, decoder.dtype, decoder.target, drafter_hash=header.drafter_hash
        ),
    }
    if missing := header.predictors.keys() - loaded.keys():
        raise UserError(f"{settings.predictor}: predictor '{min(missing)}' was recorded and is not there")
    return {name: 1e3 * seconds(loaded[name], header, settings.repeats) for name in header.predictors}


HEADER = ("recording", "predictor", "overlap", "F1", "count error", "count bias", "rank", "MB a step", "ms a step")


def _cell(interval: Interval) -> str:
    return f"{interval.middle:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def cells_of(one: Judgement, megabytes: Mapping[str, float], times: Mapping[str, float]) -> list[str]:
    figures = [_cell(part) for part in (one.overlap, one.f1, one.count_error, one.count_bias, one.rank)]
    timed = f"{times[one.predictor]:.2f}" if one.predictor in times else "-"
    return [one.recording, one.predictor, *figures, f"{megabytes[one.predictor]:.2f}", timed]


def layer_table(judged: list[Judgement]) -> str:
    layers, depths = (range(len(getattr(judged[0], part))) for part in ("layers", "depths"))
    header = ["recording", "predictor", *(f"layer {i}" for i in layers), *(f"depth {i}" for i in depths)]
    lines = [
        [one.recording, one.predictor, *(f"{part.middle:.3f}" for part in (*one.layers, *one.depths))] for one in judged
    ]
    return markdown_table(header, lines)


def plot(path: Path, judged: list[Judgement]) -> None:
    """By recording: overlap by layer, overlap by depth, and true counts against predicted ones."""
    names = list(dict.fromkeys(one.recording for one in judged))
    figure, axes = plt.subplots(
        len(names), 3, figsize=(12, 1 + 3 * len(names)), layout="constrained", squeeze=False, sharey="col"
    )
    for row, name in zip(axes, names, strict=True):
        largest = 0.0
        for one in (one for one in judged if one.recording == name):
            for axis, part in zip(row, (one.layers, one.depths), strict=False):
                middles = [interval.middle for interval in part]
                errors = [[i.middle - i.low for i in part], [i.high - i.middle for i in part]]
                axis.errorbar(range(len(part)), middles, yerr=np.maximum(errors, 0), label=one.predictor, capsize=2)
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
    require_positive(settings, "repeats")
    if settings.eps <= 0:
        raise UserError(f"--eps {settings.eps} is not positive")
    recordings = load(settings)
    header = next(iter(recordings.values())).header
    times = timings(settings, header)
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
    judged = [
        judge(recording, name, predictor, settings.eps)
        for name, recording in recordings.items()
        for predictor in header.predictors
    ]
    megabytes = {name: cost_model(header, OWN, name, "eagle3").predict / 1e6 for name in header.predictors}
    cells = [cells_of(one, megabytes, times) for one in judged]
    table = Table(*(Column(name) for name in HEADER), title="expert predictors")
    for line in cells:
        table.add_row(*line)
    console.print(table)
    sizes = ", ".join(f"{name}: {len(one.header.prompts)} prompts" for name, one in recordings.items())
    about = {"recordings": sizes, "settings": asdict(settings), **environment()}
    notes = "\n".join(f"- {name}: `{value}`" for name, value in about.items())
    lines = [
        json.dumps(asdict(one) | {"megabytes": megabytes[one.predictor], "milliseconds": times.get(one.predictor)})
        for one in judged
    ]
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        write_text(settings.out / "predictors.jsonl", "\n".join(lines) + "\n")
        write_text(
            settings.out / "predictors.md", "\n".join([markdown_table(HEADER, cells), layer_table(judged), notes, ""])
        )
        plot(settings.out / "predictors.png", judged)
    console.print(f"written to {settings.out}: predictors.jsonl, predictors.md, predictors.png", soft_wrap=True)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
