"""Compare methods and settings on a recording, under the costs of any target, without running a model.

    python -m experiments.replay --recording recordings/tiny/*.npz --costs own qwen3-235b-a22b --out results/replay

Every second prompt is for training: settings are chosen there, and what methods learn begins there. Figures are of the
other prompts. Speed is tokens per unit of cost, over that of plain decoding.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from ecospec_jax import SpecConfig, UserError
from ecospec_jax.cost import CostModel
from ecospec_jax.errors import reported_as_user_error, run_command
from experiments.environment import environment
from experiments.intervals import Interval, difference_interval, error_bars, ratio_interval
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.recording import Recording, read_recordings
from experiments.replay_contenders import Contender, contenders
from experiments.replay_costs import OWN, Draft, cost_model
from experiments.replay_walk import NOBODY, Steps, make_plan, make_tape, padded, walk
from experiments.tables import markdown_table, notes, write_text

PAPER_BUDGET, PAPER_FAMILIES = SpecConfig.budget, ("likelihood", "ecospec")


@dataclass(frozen=True)
class Settings:
    """Compare methods and settings on a recording, under the costs of any target."""

    recording: tuple[Path, ...]
    """Files that `python -m experiments.recording` wrote, all of the same models and settings."""
    costs: tuple[str, ...] = (OWN, "qwen3-235b-a22b")
    """Cost models: `own` (bytes of the recorded model) or the ratios of a full target."""
    draft: Draft = "eagle3"
    """Whether drafting costs the bytes of an EAGLE-3 head of the published shape, or nothing."""
    budgets: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)
    """Sizes of fixed trees; the largest caps the methods that choose the size."""
    eps: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0)
    """Added to the count of new experts in the cost-aware score."""
    buffer: str = SpecConfig.buffer
    """Experts that cost-aware selection takes as paid for: empty, root or previous."""
    baseline: str = "likelihood"
    """Family that the others are compared with, pair by pair."""
    batch_size: int = 1
    """Prompts that step together and share their experts."""
    out: Path = Path("results/replay")
    """Folder for replay.jsonl, replay.md and replay.png."""


@dataclass(frozen=True)
class Outcome:
    """Held-out figures of one contender under one cost model.

    Attributes:
        costs: of each held-out batch.
        train_speed, speed: over plain decoding.
        nodes, tau: nodes beside the root and tokens, per verification of a sequence.
        u: distinct experts per layer and step.
        drafted: share of steps that drafted.
    """

    contender: Contender
    costs: np.ndarray
    train_speed: float
    speed: Interval
    nodes: float
    u: float
    tau: float
    drafted: float

    def json(self) -> dict[str, Any]:
        one = self.contender
        return {
            "family": one.family,
            "bits": one.bits,
            "setting": one.setting,
            "spec": asdict(one.spec),
            "train_speed": self.train_speed,
            "speed": asdict(self.speed),
            "nodes": self.nodes,
            "u": self.u,
            "tau": self.tau,
            "drafted": self.drafted,
        }


class Replay:
    """A recording in the order it is replayed in: batches of training prompts first."""

    def __init__(self, recording: Recording, batch: int = 1) -> None:
        """There must be a prompt for each half."""
        prompts = len(recording.header.prompts)
        if prompts < 2:
            raise UserError("a replay needs at least 2 prompts: one to choose settings on, one to judge them on")
        halves = [batches(np.arange(first, prompts, 2), batch) for first in (0, 1)]
        self.recording, self.order_GB, self.train = recording, np.concatenate(halves), len(halves[0])
        self._tapes: dict[str | None, Any] = {}
        self._steps: dict[Any, Steps] = {}

    def steps(self, contender: Contender, cost: CostModel) -> Steps:
        """What the contender does; only one that weighs costs is walked again for another cost model."""
        method = contender.method
        if not method.adaptive:
            cost = cost_model(self.recording.header, OWN, contender.bits, "free")
        key = (contender, cost)
        if key not in self._steps:
            if contender.bits not in self._tapes:
                self._tapes[contender.bits] = make_tape(self.recording, contender.bits, self.order_GB)
            plan = make_plan(self.recording, method, contender.spec, cost)
            walked, _ = walk(
                self.recording,
                plan,
                self._tapes[contender.bits],
                tunable=contender.tunable,
                knobs=contender.knobs,
                clairvoyant=contender.clairvoyant,
            )
            self._steps[key] = jax.device_get(walked)
        return self._steps[key]

    def plain_costs(self, cost: CostModel) -> np.ndarray:
        """Cost of each batch when decoded plainly."""
        counts_GB = np.where(self.order_GB == NOBODY, 0, np.diff(self.recording.starts)[self.order_GB])
        roots_GBTLW = padded(self.recording, self.recording.experts[:, 0], self.order_GB, int(counts_GB.max()))
        pairs_GT = np.bitwise_count(np.bitwise_or.reduce(roots_GBTLW, axis=1)).sum(axis=(2, 3), dtype=np.float64)
        rows_GT = (np.arange(roots_GBTLW.shape[2]) < counts_GB[..., None]).sum(axis=1)
        return ((cost.fixed + cost.per_expert * pairs_GT + cost.per_row * rows_GT) * (rows_GT > 0)).sum(axis=1)

    def outcome(self, contender: Contender, cost: CostModel) -> Outcome:
        """Replays, and makes the figures of the held-out half."""
        steps, held = self.steps(contender, cost), slice(self.train, None)
        live_GTB = steps.emitted_GTB > 0
        nodes_GT, sequences_GT = steps.chosen_GTBN.sum(axis=(2, 3)), live_GTB.sum(axis=2)
        spent_GT = cost.fixed + cost.per_expert * steps.pairs_GT.astype(np.float64)
        spent_GT += cost.per_row * (sequences_GT + nodes_GT) + steps.drafted_GT * (cost.draft + cost.predict)
        costs, plain = np.where(sequences_GT > 0, spent_GT, 0.0).sum(axis=1), self.plain_costs(cost)
        passes, sequences = int((sequences_GT > 0)[held].sum()), int(sequences_GT[held].sum())
        return Outcome(
            contender=contender,
            costs=costs[held],
            train_speed=float(plain[: self.train].sum() / max(costs[: self.train].sum(), 1e-30)),
            speed=ratio_interval(plain[held], costs[held]),
            nodes=float(nodes_GT[held].sum() / max(sequences, 1)),
            u=float(steps.pairs_GT[held].sum() / max(passes, 1) / cost.moe_layers),
            tau=float(steps.emitted_GTB[held].sum() / max(sequences, 1)),
            drafted=float((steps.drafted_GT & (sequences_GT > 0))[held].sum() / max(passes, 1)),
        )


def batches(prompts_Q: np.ndarray, batch: int) -> np.ndarray:
    """`[G, batch]`; the last batch may have places without a prompt."""
    missing = -len(prompts_Q) % batch
    return np.concatenate([prompts_Q, np.full(missing, NOBODY)]).reshape(-1, batch)


def best_of(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """Of each family the setting that was best on the training prompts; of the paper's two, at its budget as well."""
    groups: dict[str, list[Outcome]] = {}
    for family in dict.fromkeys(one.contender.family for one in outcomes):
        groups[family] = [one for one in outcomes if one.contender.family == family]
        at_paper_budget = [one for one in groups[family] if one.contender.knobs.budget == PAPER_BUDGET]
        if family in PAPER_FAMILIES and at_paper_budget:
            groups[f"{family}, budget {PAPER_BUDGET}"] = at_paper_budget
    return {name: max(group, key=lambda one: one.train_speed) for name, group in groups.items()}


HEADER = ("selection", "bits", "best setting", "drafted", "nodes", "U", "tau", "speed", "less baseline")


def table_cells(best: dict[str, Outcome], plain: np.ndarray, baseline: str) -> list[list[str]]:
    """One line a family; differences are paired by batch."""
    cells = []
    for name, one in best.items():
        less = "" if name == baseline else difference_interval(plain, one.costs, best[baseline].costs).cell("+")
        figures = [f"{one.nodes:.2f}", f"{one.u:.2f}", f"{one.tau:.2f}", one.speed.cell(), less]
        setting = one.contender.setting
        cells.append([name, one.contender.bits or "", setting, f"{one.drafted:.2f}", *figures])
    return cells


def plot(path: Path, best: dict[str, dict[str, Outcome]]) -> None:
    """Speeds of all families, one panel a cost model."""
    figure, axes = plt.subplots(1, len(best), figsize=(1 + 4.5 * len(best), 4), layout="constrained", squeeze=False)
    for axis, (target, families) in zip(axes[0], best.items(), strict=True):
        names, speeds = list(families), [one.speed for one in families.values()]
        middles = [speed.middle for speed in speeds]
        axis.barh(names, middles, xerr=error_bars(speeds), capsize=3, color=[f"C{i}" for i in range(len(names))])
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(target)
        axis.set_xlabel("tokens per cost over plain decoding")
    save_figure(figure, path)


def line_up(settings: Settings, recording: Recording) -> list[Contender]:
    """The contenders that the recording allows."""
    header = recording.header
    if not settings.budgets or not settings.eps or not settings.costs:
        raise UserError("--budgets, --eps and --costs need at least one value each")
    if max(settings.budgets) < 1:
        raise UserError("--budgets names no budget above 0")
    found = contenders(
        header.spec(buffer=settings.buffer, budget=max(settings.budgets)),
        header.routing,
        list(header.predictors),
        budgets=settings.budgets,
        eps=settings.eps,
        paper_predictor=next((name for name in ("backbone", "token_table") if name in header.predictors), "oracle"),
    )
    families = {one.family for one in found}
    if settings.baseline not in families:
        raise UserError(f"unknown baseline '{settings.baseline}'; known: {', '.join(sorted(families))}")
    return found


def run(settings: Settings) -> None:
    console = Console()
    require_positive(settings, "batch_size")
    recording = read_recordings(settings.recording)
    found = line_up(settings, recording)
    for target in settings.costs:  # refuses what is unknown before anything is written
        cost_model(recording.header, target, None, settings.draft)
    replay = Replay(recording, settings.batch_size)
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
    best: dict[str, dict[str, Outcome]] = {}
    parts, lines = [], []
    with Progress(console=console) as progress:
        task = progress.add_task("replaying", total=len(found) * len(settings.costs))
        for target in settings.costs:
            outcomes = []
            for one in found:
                progress.update(task, description=f"{target}: {one.family} {one.setting}")
                outcomes.append(replay.outcome(one, cost_model(recording.header, target, one.bits, settings.draft)))
                progress.advance(task)
            lines += [json.dumps({"costs": target, "draft": settings.draft, **one.json()}) for one in outcomes]
            best[target] = best_of(outcomes)
            plain = replay.plain_costs(cost_model(recording.header, target, None, settings.draft))[replay.train :]
            cells = table_cells(best[target], plain, settings.baseline)
            parts.append(f"## Costs of {target}, drafting {settings.draft}\n\n{markdown_table(HEADER, cells)}")
            show(console, target, cells)
    prompts = len(recording.header.prompts)
    about = {
        "recording": replace(recording.header, prompts=()),
        "prompts": f"{(prompts + 1) // 2} for training, {prompts // 2} held out, {len(recording.roots)} positions",
        "settings": asdict(settings),
        **environment(),
    }
    remark = "Speed: tokens per cost over plain decoding, held-out prompts, 95 % bootstrap interval over batches.\n"
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        write_text(settings.out / "replay.jsonl", "\n".join(lines) + "\n")
        write_text(settings.out / "replay.md", "\n".join([remark, *parts, notes(about)]) + "\n")
        plot(settings.out / "replay.png", best)
    console.print(f"written to {settings.out}: replay.jsonl, replay.md, replay.png", soft_wrap=True)


def show(console: Console, title: str, cells: list[list[str]]) -> None:
    """The table on the terminal."""
    table = Table(*(Column(name) for name in HEADER), title=title)
    for line in cells:
        table.add_row(*line)
    console.print(table)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
