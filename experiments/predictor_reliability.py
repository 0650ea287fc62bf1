"""Whether the probabilities that predictors give experts come true, on traces: reliability curves and their error.

Only the learned kinds give any. Each (token, layer, expert) is an event: the expert is among the k that the target
chose, or not. Most are as good as certain not to be, so the k likeliest of each layer are looked at apart too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax import Decoder, UserError
from ecospec_jax.config import RoutingShape
from ecospec_jax.models.predictor import Predictor, ProbabilisticPredictor
from ecospec_jax.training.corpus import is_held_out
from ecospec_jax.training.overlap import evidence_of, groups
from ecospec_jax.training.predictor import Examples, pack, rows_of
from ecospec_jax.training.traces import read_manifest_of, read_traces
from experiments.plots import plt, save_figure
from experiments.tables import markdown_table, write_text
from experiments.train_predictor import TRAINED, check_states

BINS = 10  # of equal width
SEQUENCES, LENGTH = 16, 256  # of a batch; longer sequences are cut, as in training


@dataclass(frozen=True)
class Reliability:
    """Events by predicted probability.

    Attributes:
        events: how many there are in each bin.
        predicted: sum of their probabilities.
        true: how many came true.
    """

    events: Int[np.ndarray, " bins"]
    predicted: Float[np.ndarray, " bins"]
    true: Float[np.ndarray, " bins"]

    def __add__(self, other: "Reliability") -> "Reliability":
        return Reliability(self.events + other.events, self.predicted + other.predicted, self.true + other.true)

    @property
    def error(self) -> float:
        """Expected calibration error: distance of mean probability and share that came true, by bin, weighted."""
        return float(np.abs(self.predicted - self.true).sum() / max(self.events.sum(), 1))

    @property
    def bias(self) -> float:
        """Mean probability less the share that came true."""
        return float((self.predicted - self.true).sum() / max(self.events.sum(), 1))

    @property
    def curve(self) -> tuple[tuple[float, float], ...]:
        """Mean probability and share that came true, of every bin that is not empty."""
        some = self.events > 0
        pairs = zip(self.predicted[some] / self.events[some], self.true[some] / self.events[some], strict=True)
        return tuple((float(said), float(true)) for said, true in pairs)


def reliability(probabilities: Float[np.ndarray, " events"], came_true: Bool[np.ndarray, " events"]) -> Reliability:
    """Events in bins of equal width."""
    places = np.minimum((BINS * probabilities).astype(np.int64), BINS - 1)
    sums = (np.bincount(places, weights, BINS) for weights in (probabilities, came_true))
    return Reliability(np.bincount(places, minlength=BINS), *sums)


@dataclass(frozen=True)
class Trust:
    """How far one predictor's probabilities can be trusted: of all experts, and of the k likeliest of each layer."""

    every: Reliability
    likeliest: Reliability

    def __add__(self, other: "Trust") -> "Trust":
        return Trust(self.every + other.every, self.likeliest + other.likeliest)

    def json(self) -> dict[str, Any]:
        """For a line of results."""
        parts = {name: getattr(self, name) for name in ("every", "likeliest")}
        return {name: {"error": one.error, "bias": one.bias, "curve": one.curve} for name, one in parts.items()}


@partial(nnx.jit, static_argnames="routing")
def _probabilities(
    predictor: Any, examples: Examples, *, routing: RoutingShape
) -> Float[Array, "batch tokens layers experts"]:
    cache = predictor.empty_cache(*examples.tokens_BT.shape)
    return predictor.probabilities(rows_of(examples), cache, evidence_of(examples, routing))


def trust(predictor: ProbabilisticPredictor, examples: Examples, routing: RoutingShape, *, first: int) -> Trust:
    """Of each token from number `first` of a sequence on."""
    said_BTLE = np.asarray(_probabilities(predictor, examples, routing=routing), np.float64)
    counted_BT = np.asarray(examples.live_BT) & (np.arange(said_BTLE.shape[1]) >= first)
    said_NLE, chosen_NLK = said_BTLE[counted_BT], np.asarray(examples.experts_BTLK)[counted_BT]
    true_NLE = np.zeros(said_NLE.shape, bool)
    np.put_along_axis(true_NLE, chosen_NLK, True, axis=-1)
    best_NLK = np.argsort(-said_NLE, axis=-1, kind="stable")[..., : routing.k]
    likeliest = (np.take_along_axis(part, best_NLK, axis=-1) for part in (said_NLE, true_NLE))
    return Trust(reliability(said_NLE.ravel(), true_NLE.ravel()), reliability(*(part.ravel() for part in likeliest)))


def judge_reliability(
    predictors: Mapping[str, Predictor], decoder: Decoder, folder: Path, *, held_out: float, seed: int
) -> dict[str, Trust]:
    """Of those predictors that give probabilities, on the held-out prompts of a folder of traces."""
    giving = {name: one for name, one in predictors.items() if isinstance(one, ProbabilisticPredictor)}
    if not giving:
        raise UserError("--traces: no predictor gives probabilities; those that are counted name experts alone")
    manifest = read_manifest_of(folder, decoder.target_hash)
    families = {name: getattr(one, "config").family for name, one in giving.items()}  # noqa: B009
    check_states(families.values(), decoder, folder, manifest)
    judged = (
        trace
        for trace in read_traces(folder, manifest)
        if is_held_out(trace.data_set, trace.prompt, share=held_out, seed=seed)
    )
    found: dict[str, Trust] = {}
    for part in groups(judged, SEQUENCES):
        examples = pack(part, LENGTH, manifest.routing)
        for name, one in giving.items():
            more = trust(one, examples, manifest.routing, first=TRAINED[families[name]].first)
            found[name] = found[name] + more if name in found else more
    if not found:
        raise UserError(f"{folder}: none of its prompts is held out")
    return found


HEADER = ("predictor", "ECE, all experts", "ECE, k likeliest", "their mean probability", "share true", "tokens")


def reliability_table(found: Mapping[str, Trust], routing: RoutingShape) -> str:
    """A line for each predictor."""
    lines = []
    for name, one in found.items():
        events, share = one.likeliest.events.sum(), float(one.likeliest.true.sum() / one.likeliest.events.sum())
        figures = (one.every.error, one.likeliest.error, share + one.likeliest.bias, share)
        lines.append([name, *(f"{figure:.4f}" for figure in figures), str(events // (routing.layers * routing.k))])
    return markdown_table(HEADER, lines)


def write_reliability(folder: Path, found: Mapping[str, Trust]) -> list[str]:
    """Lines and plot; the names of the files."""
    lines = [json.dumps({"predictor": name} | one.json()) for name, one in found.items()]
    write_text(folder / "calibration.jsonl", "\n".join(lines) + "\n")
    plot(folder / "calibration.png", found)
    return ["calibration.jsonl", "calibration.png"]


def plot(path: Path, found: Mapping[str, Trust]) -> None:
    """Share that came true against predicted probability."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained", sharey=True)
    for axis, part, title in zip(axes, ("every", "likeliest"), ("all experts", "the k likeliest"), strict=True):
        for name, one in found.items():
            axis.plot(*zip(*getattr(one, part).curve, strict=True), marker="o", label=name)
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        axis.set_xlabel("predicted probability")
        axis.set_title(title)
    axes[0].set_ylabel("share chosen by the target")
    axes[0].legend()
    save_figure(figure, path)
