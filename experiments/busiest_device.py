"""Under expert parallelism all devices wait for the busiest: does it pay that selection counts that device's experts?

    python -m experiments.busiest_device --recording recordings/tiny/*.npz --devices 2 4 8 --out results/busiest_device

Replays `ecospec` with the plain count of new experts and with that of the busiest device (`SpecConfig.device_experts`)
on recorded trees and routing. Every second prompt is for choosing eps; figures are of the others, paired by batch.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from ecospec_jax import SpecConfig, UserError
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.methods import Method
from ecospec_jax.selection import cost_aware, likelihood
from experiments.environment import environment
from experiments.intervals import Interval, ratio_interval
from experiments.options import require_positive
from experiments.recording import Recording, read_recordings
from experiments.replay import Replay
from experiments.replay_contenders import Contender, Knobs, cheapest, likeliest
from experiments.replay_costs import OWN, cost_model
from experiments.replay_walk import Steps
from experiments.tables import markdown_table, notes, write_text

PLAIN, BUSIEST = "all new experts", "those of the busiest device"


@dataclass(frozen=True)
class Settings:
    """Compare counting all new experts with counting those of the busiest device."""

    recording: tuple[Path, ...]
    """Files that `python -m experiments.recording` wrote, all of the same models and settings."""
    devices: tuple[int, ...] = (2, 4, 8)
    """Devices that the experts are split among by id, in equal parts."""
    predictor: str = "oracle"
    """What selection takes for a node's experts: a recorded predictor, or the truth."""
    budget: int = SpecConfig.budget
    """Candidate nodes verified beside the root."""
    eps: tuple[float, ...] = (0.25, 1.0, 4.0)
    """Of the cost-aware score; the best for training prompts is taken."""
    batch_size: int = 1
    """Prompts that step together and share their experts."""
    out: Path = Path("results/busiest_device")
    """Folder for busiest_device.jsonl and busiest_device.md."""


@dataclass(frozen=True)
class Use:
    """What the steps of each batch did.

    Attributes:
        steps, verifications, tokens: of the batch; of its sequences; tokens that these emitted.
        pairs: distinct (layer, expert) pairs of all devices, summed over steps.
        busiest: the same of the device that has most of them in each layer.
    """

    steps: np.ndarray
    verifications: np.ndarray
    tokens: np.ndarray
    pairs: np.ndarray
    busiest: np.ndarray


def use_of(recording: Recording, order_GB: np.ndarray, steps: Steps, devices: int) -> Use:
    """Counts true experts; device d has an equal share of them, by ascending id."""
    emitted_GTB, chosen_GTBN = np.asarray(steps.emitted_GTB), np.asarray(steps.chosen_GTBN)
    live_GTB = emitted_GTB > 0
    at_GTB = recording.starts[order_GB][:, None] + np.cumsum(emitted_GTB, axis=1) - emitted_GTB
    experts, shape = recording.header.routing.experts, live_GTB.shape[:2]
    busiest, pairs = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for group, step in zip(*np.nonzero(live_GTB.any(axis=2)), strict=True):
        live_B = live_GTB[group, step]
        rows_BR = np.concatenate([live_B[:, None], chosen_GTBN[group, step]], axis=1)
        sets_XLW = recording.experts[at_GTB[group, step][live_B]][rows_BR[live_B]]
        used_LE = np.unpackbits(np.bitwise_or.reduce(sets_XLW, axis=0).view(np.uint8), axis=-1, bitorder="little")
        by_device_LG = used_LE[:, :experts].reshape(len(used_LE), devices, -1).sum(axis=2)
        pairs[group, step], busiest[group, step] = by_device_LG.sum(), by_device_LG.max(axis=1).sum()
    return Use(
        steps=live_GTB.any(axis=2).sum(axis=1),
        verifications=live_GTB.sum(axis=(1, 2)),
        tokens=emitted_GTB.sum(axis=(1, 2)),
        pairs=pairs.sum(axis=1),
        busiest=busiest.sum(axis=1),
    )


def contender(settings: Settings, recording: Recording, eps: float, device_experts: int | None) -> Contender:
    """`ecospec` with one way of counting."""
    spec = recording.header.spec(budget=settings.budget)
    spec = replace(spec, eps=eps, device_experts=device_experts)
    method = Method("ecospec", cost_aware, predictor=settings.predictor)
    return Contender("ecospec", method, spec, f"eps {eps:g}", cheapest, Knobs(settings.budget, eps))


def check(settings: Settings, recording: Recording) -> None:
    """Refuses what the recording cannot answer."""
    require_positive(settings, "batch_size", "budget")
    routing = recording.header.routing
    if not settings.devices or not settings.eps:
        raise UserError("--devices and --eps need at least one value each")
    for devices in settings.devices:
        if devices < 1 or routing.experts % devices:
            raise UserError(f"--devices: {routing.experts} experts do not divide among {devices} devices")
    if settings.predictor not in {*recording.header.predictors, "oracle"}:
        known = ", ".join(["oracle", *recording.header.predictors])
        raise UserError(f"--predictor: '{settings.predictor}' was not recorded; known: {known}")
    for eps in settings.eps:
        contender(settings, recording, eps, None)  # refuses sizes that cannot be


HEADER = ("devices", "selection counts", "eps", "tau", "U", "of the busiest", "over likelihood", "over plain count")


@dataclass(frozen=True)
class Line:
    """Held-out figures of one way of selecting.

    Attributes:
        eps: of the score; 0 for `likelihood`, which has none.
        tau: tokens a verification of a sequence.
        u, busiest: distinct experts a step in the mean layer, of all devices and of the busiest.
        over_likelihood, over_plain: the busiest device's experts for the same answers, over those of another selection.
    """

    devices: int
    counts: str
    eps: float
    tau: Interval
    u: Interval
    busiest: Interval
    over_likelihood: Interval
    over_plain: Interval

    def cells(self) -> list[str]:
        eps = f"{self.eps:g}" if self.eps else ""
        figures = (self.tau, self.u, self.busiest, self.over_likelihood, self.over_plain)
        return [str(self.devices), self.counts, eps, *(figure.cell() for figure in figures)]


def compare(settings: Settings, recording: Recording, devices: int, replay: Replay) -> list[Line]:
    """What `likelihood` and both ways of counting do to the busiest device."""
    routing, held, train = recording.header.routing, slice(replay.train, None), slice(replay.train)
    cost = cost_model(recording.header, OWN, None, "free")

    def use(one: Contender) -> Use:
        return use_of(recording, replay.order_GB, replay.steps(one, cost), devices)

    spec = recording.header.spec(budget=settings.budget)
    baseline = Contender("likelihood", Method("likelihood", likelihood), spec, "", likeliest, Knobs(settings.budget))
    chosen = {"likelihood": (0.0, use(baseline))}
    for counts, device_experts in ((PLAIN, None), (BUSIEST, routing.experts // devices)):
        tried = {eps: use(contender(settings, recording, eps, device_experts)) for eps in settings.eps}
        chosen[counts] = min(tried.items(), key=lambda one: one[1].busiest[train].sum())  # for the same answers
    others = {counts: one.busiest[held] for counts, (_, one) in chosen.items()}
    return [
        Line(
            devices=devices,
            counts=counts,
            eps=eps,
            tau=ratio_interval(one.tokens[held], one.verifications[held]),
            u=ratio_interval(one.pairs[held] / routing.layers, one.steps[held]),
            busiest=ratio_interval(one.busiest[held] / routing.layers, one.steps[held]),
            over_likelihood=ratio_interval(one.busiest[held], others["likelihood"]),
            over_plain=ratio_interval(one.busiest[held], others[PLAIN]),
        )
        for counts, (eps, one) in chosen.items()
    ]


def run(settings: Settings) -> None:
    console = Console()
    recording = read_recordings(settings.recording)
    check(settings, recording)
    replay = Replay(recording, settings.batch_size)
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
    lines = [line for devices in track(settings.devices) for line in compare(settings, recording, devices, replay)]
    table = markdown_table(HEADER, [line.cells() for line in lines])
    prompts = len(recording.header.prompts)
    about = {
        "recording": replace(recording.header, prompts=()),
        "prompts": f"{(prompts + 1) // 2} to choose eps, {prompts // 2} held out, {len(recording.roots)} positions",
        "settings": asdict(settings),
        **environment(),
    }
    remark = "Experts in the mean layer, held-out prompts, 95 % bootstrap intervals over batches.\n"
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        write_text(settings.out / "busiest_device.jsonl", "".join(json.dumps(asdict(line)) + "\n" for line in lines))
        write_text(settings.out / "busiest_device.md", "\n".join([remark, table, notes(about)]) + "\n")
    console.print(table, soft_wrap=True, markup=False, highlight=False)
    console.print(f"written to {settings.out}: busiest_device.jsonl, busiest_device.md", soft_wrap=True)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
