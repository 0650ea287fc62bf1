"""How much a better expert predictor is worth: speed against the share of experts that it gets right.

    python -m experiments.predictor_sensitivity --recording recordings/tiny/*.npz --out results/sensitivity

Methods are replayed (`experiments.replay`) with the target's true routing, corrupted until set shares of it are left,
and with every predictor of the recording, which may be one at several stages of its training. Settings are chosen on
half of the prompts, for each predictor anew; figures are of the other half. The paper's Tables 8 and 9.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from jaxtyping import UInt32
from rich.console import Console
from rich.progress import Progress

from ecospec_jax import UserError
from ecospec_jax.errors import reported_as_user_error, run_command
from experiments.environment import environment
from experiments.intervals import Interval, difference_interval
from experiments.plots import plt, save_figure
from experiments.predictor_metrics import agreement
from experiments.recording import Recording, read_recordings
from experiments.replay import Outcome, Replay
from experiments.replay_contenders import Contender, contenders
from experiments.replay_costs import Draft, cost_model
from experiments.tables import markdown_table, notes, write_text

ORACLE = "oracle"


@dataclass(frozen=True)
class Settings:
    """How much a better expert predictor is worth."""

    recording: tuple[Path, ...]
    """Files that `python -m experiments.recording` wrote, all of the same models and settings."""
    overlaps: tuple[float, ...] = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Shares of the true experts that corrupted labels keep."""
    costs: str = "qwen3-235b-a22b"
    """Cost model: `own` (bytes of the recorded model) or the ratios of a full target."""
    draft: Draft = "free"
    """Whether drafting costs the bytes of an EAGLE-3 head of the published shape, or nothing."""
    budgets: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Sizes of fixed trees; the largest caps `rate`."""
    eps: tuple[float, ...] = (0.25, 4.0)
    """Added to the count of new experts in the cost-aware score."""
    seed: int = 0
    """Seed of the corruption."""
    out: Path = Path("results/sensitivity")
    """Folder for sensitivity.jsonl, sensitivity.md and sensitivity.png."""


@dataclass(frozen=True)
class Point:
    """One predictor, one method.

    Attributes:
        predictor: a recorded one, or `kept 0.40` for corrupted labels.
        corrupted: whether it is the latter.
        overlap: share of the true experts that it names, over all rows.
        gain: speed less that of `likelihood` at its best budget, paired by prompt.
        outcome: all figures at the best setting.
    """

    method: str
    predictor: str
    corrupted: bool
    overlap: float
    gain: Interval
    outcome: Outcome


def corrupted(
    true: UInt32[np.ndarray, "... words"], experts: int, keep: float, random: np.random.Generator
) -> UInt32[np.ndarray, "... words"]:
    """Each true expert stays with probability `keep`, else another that is not true takes its place."""
    bits = np.unpackbits(true.view(np.uint8), axis=-1, bitorder="little")[..., :experts].astype(bool)
    draws = random.random((2, *bits.shape), np.float32)
    kept = bits & (draws[0] < keep)
    missing = bits.sum(axis=-1) - kept.sum(axis=-1)
    order = np.argsort(np.where(bits, -1.0, draws[1]), axis=-1)[..., ::-1]  # the untrue first, shuffled
    places = np.zeros_like(bits)
    np.put_along_axis(places, order, np.arange(experts) < missing[..., None], axis=-1)
    padded = np.zeros((*bits.shape[:-1], 32 * true.shape[-1]), bool)
    padded[..., :experts] = kept | places
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def line_up(settings: Settings, recording: Recording, predictor: str) -> dict[str, list[Contender]]:
    """Settings of `likelihood`, and by method those that go by the bits of a predictor."""
    header = recording.header
    found = contenders(
        header.spec(budget=max(settings.budgets)),
        header.routing,
        [predictor],
        budgets=settings.budgets,
        eps=settings.eps,
        paper_predictor=predictor,
    )
    methods = {name: name for name in ("likelihood", "ecospec", "ecospec-calibrated")} | {f"rate {predictor}": "rate"}
    grouped: dict[str, list[Contender]] = {name: [] for name in methods.values()}
    for one in found:
        if one.family in methods:
            grouped[methods[one.family]].append(replace(one, family=methods[one.family]))
    return grouped


def cost_model_of(settings: Settings, recording: Recording) -> Any:
    """Predicting costs nothing here, so that predictors differ in what they say alone."""
    return cost_model(recording.header, settings.costs, None, settings.draft)


def with_corrupted(settings: Settings, recording: Recording) -> tuple[Recording, dict[str, bool]]:
    """The recording with corrupted labels as further forecasts; and which forecasts those are."""
    random = np.random.default_rng(settings.seed)
    experts = recording.header.routing.experts
    made = {f"kept {keep:.2f}": corrupted(recording.experts, experts, keep, random) for keep in settings.overlaps}
    kinds = dict.fromkeys(recording.forecasts, False) | dict.fromkeys(made, True) | {ORACLE: True}
    return replace(recording, forecasts=recording.forecasts | made), kinds


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The least overlap from which on gains are above 0, between points by straight lines; None if the last is not."""
    ordered = sorted(points)
    if ordered[-1][1] <= 0:
        return None
    for (low, below), (high, above) in zip(reversed(ordered[:-1]), reversed(ordered), strict=False):
        if below <= 0:
            return low + (high - low) * -below / (above - below)
    return ordered[0][0]


def gap(points: Sequence[Point], predictor: str) -> dict[str, float]:
    """What `ecospec-calibrated` misses with a predictor: to true routing, and from there to the best set there is.

    The best set is `rate`'s, which is exhaustive in pools of up to ten nodes.
    """
    speed = {(one.method, one.predictor): one.outcome.speed.middle for one in points}
    informed = speed["ecospec-calibrated", ORACLE]
    return {
        "speed": speed["ecospec-calibrated", predictor],
        "predictor error": informed - speed["ecospec-calibrated", predictor],
        "greedy search and fixed size": speed["rate", ORACLE] - informed,
    }


HEADER = ("method", "predictor", "overlap", "speed", "less likelihood", "tau", "U", "nodes", "best setting")


def cells_of(point: Point) -> list[str]:
    one = point.outcome
    figures = [f"{point.overlap:.3f}", one.speed.cell(), point.gain.cell("+")]
    return [
        point.method,
        point.predictor,
        *figures,
        f"{one.tau:.2f}",
        f"{one.u:.2f}",
        f"{one.nodes:.2f}",
        one.contender.setting,
    ]


def plot(path: Path, points: Sequence[Point], likeliest: Outcome) -> None:
    """Speed, tau and U against overlap: lines for corrupted labels, crosses for predictors."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    figures = {
        "tokens per cost over plain decoding": lambda one: one.speed.middle,
        "tokens per verification": lambda one: one.tau,
        "distinct experts per layer and step": lambda one: one.u,
    }
    for axis, (label, value) in zip(axes, figures.items(), strict=True):
        for index, method in enumerate(dict.fromkeys(one.method for one in points)):
            mine = sorted((one for one in points if one.method == method), key=lambda one: one.overlap)
            for made, style in ((True, {"marker": "o"}), (False, {"linestyle": "none", "marker": "x"})):
                some = [one for one in mine if one.corrupted == made]
                axis.plot(
                    [one.overlap for one in some],
                    [value(one.outcome) for one in some],
                    color=f"C{index}",
                    label=method if made else None,
                    **style,
                )
        axis.axhline(value(likeliest), color="black", linewidth=0.8, label="likelihood")
        axis.set_xlabel("share of true experts predicted")
        axis.set_ylabel(label)
    axes[0].legend()
    save_figure(figure, path)


def run(settings: Settings) -> None:
    console = Console()
    if not settings.budgets or not settings.eps:
        raise UserError("--budgets and --eps need at least one value each")
    if min(settings.budgets) < 1:
        raise UserError("--budgets must be at least 1")
    for keep in settings.overlaps:
        if not 0 <= keep <= 1:
            raise UserError(f"--overlaps {keep} is not in 0..1")
    recording, kinds = with_corrupted(settings, read_recordings(settings.recording))
    # Refuses what cannot be before anything is written.
    lined_up = {predictor: line_up(settings, recording, predictor) for predictor in kinds}
    cost, replay = cost_model_of(settings, recording), Replay(recording)
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
    plain = replay.plain_costs(cost)[replay.train :]

    def best_of(some: Sequence[Contender]) -> Outcome:
        return max((replay.outcome(one, cost) for one in some), key=lambda one: one.train_speed)

    likeliest = best_of(lined_up[ORACLE]["likelihood"])
    points: list[Point] = []
    with Progress(console=console) as progress:
        task = progress.add_task("replaying", total=len(kinds))
        for predictor, made in kinds.items():
            progress.update(task, description=predictor)
            sizes = agreement(recording.forecasts.get(predictor, recording.experts), recording.experts)
            overlap = float(sizes.hits.sum() / sizes.true.sum())
            for method in ("ecospec", "ecospec-calibrated", "rate"):
                best = best_of(lined_up[predictor][method])
                gain = difference_interval(plain, best.costs, likeliest.costs)
                points.append(Point(method, predictor, made, overlap, gain, best))
            progress.advance(task)
    write(settings, recording, points, likeliest)
    console.print(f"written to {settings.out}: sensitivity.jsonl, sensitivity.md, sensitivity.png", soft_wrap=True)


def write(settings: Settings, recording: Recording, points: Sequence[Point], likeliest: Outcome) -> None:
    """Lines, tables and plot."""
    parts = [
        f"`likelihood` at its best ({likeliest.contender.setting}): {likeliest.speed.cell()} times plain decoding, "
        f"tau {likeliest.tau:.2f}, U {likeliest.u:.2f}.\n",
        markdown_table(HEADER, [cells_of(one) for one in points]),
    ]
    for method in dict.fromkeys(one.method for one in points):
        made = [(one.overlap, one.gain.middle) for one in points if one.method == method and one.corrupted]
        least = crossing(made)
        pays = "at no overlap" if least is None else f"from an overlap of {least:.2f} on"
        parts.append(f"- `{method}` beats `likelihood` {pays} (corrupted labels).")
    gaps = {name: gap(points, name) for name in recording.header.predictors}
    columns = ("predictor", "speed", "predictor error", "greedy search and fixed size")
    lines = [[name, *(f"{value:+.3f}" for value in parts_of.values())] for name, parts_of in gaps.items()]
    parts.append(f"\nWhat `ecospec-calibrated` misses:\n\n{markdown_table(columns, lines)}")
    prompts = len(recording.header.prompts)
    about = {
        "prompts": f"{(prompts + 1) // 2} for training, {prompts // 2} held out, {len(recording.roots)} positions",
        "settings": asdict(settings),
        **environment(),
    }
    parts.append(notes(about))
    records = [
        json.dumps(
            {"predictor": one.predictor, "corrupted": one.corrupted, "overlap": one.overlap, "gain": asdict(one.gain)}
            | one.outcome.json()
        )
        for one in points
    ]
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        write_text(settings.out / "sensitivity.jsonl", "\n".join(records) + "\n")
        write_text(settings.out / "sensitivity.md", "\n".join(parts) + "\n")
        plot(settings.out / "sensitivity.png", points, likeliest)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
