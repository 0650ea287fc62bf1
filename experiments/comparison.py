"""Runs of experiments against each other, and beside the published figures, in tables."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ecospec_jax.config import RoutingShape
from ecospec_jax.presets import PRESETS
from experiments.batches import by_prompt, median_difference, median_ratio, paired
from experiments.harness import Header, Measurement, Scalar, differences
from experiments.intervals import Interval, median_interval
from experiments.published import PUBLISHED, PublishedMethod

FIGURES = {"tokens_per_second": "tokens/s", "tau": "tau", "u": "U", "verify_ms": "verify ms", "step_ms": "step ms"}
PLAIN, BASELINE, COST_AWARE = "ar", "likelihood", "ecospec"
PAPER: dict[str, Scalar] = {
    "temperature": 0,
    "batch_size": 1,
    "depth": 3,
    "branch": 2,
    "budget": 4,
    "shared_buffer": False,
}
UNDEFINED = "-"
Figures = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Table:
    """Cells of text."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Results:
    """What a run measured."""

    name: str
    header: Header
    measurements: Sequence[Measurement]

    @property
    def cases(self) -> list[dict[str, Scalar]]:
        """What methods decoded prompts with, all data sets together."""
        found: dict[str, dict[str, Scalar]] = {}
        for one in self.measurements:
            if one.prompt is not None and "method" in one.case:
                case = without_data_set(one)
                found.setdefault(json.dumps(case, sort_keys=True), case)
        return list(found.values())

    def figures(self, value: str, case: Mapping[str, Scalar]) -> Figures:
        """By data set and prompt: of this case and no other."""
        return by_prompt((one for one in self.measurements if without_data_set(one) == case), value)

    def middle(self, value: str, case: Mapping[str, Scalar]) -> Interval:
        """Median over the prompts of this case and no other."""
        return median_interval(list(self.figures(value, case).values()))

    def setting(self, name: str, case: Mapping[str, Scalar]) -> Scalar:
        """Of a case, or else of the whole run; decoding is greedy where neither says otherwise."""
        return case.get(name, self.header.settings.get(name, 0 if name == "temperature" else None))


def without_data_set(one: Measurement) -> dict[str, Scalar]:
    return {name: value for name, value in one.case.items() if name != "data_set"}


def overview(runs: Sequence[Results]) -> Table:
    """What each run is, and in what it differs from the first of the same experiment."""
    lines = []
    for run in runs:
        first = next(one for one in runs if one.header.experiment == run.header.experiment)
        other = ", ".join(differences(first.header, run.header))
        told = UNDEFINED if first is run else f"{first.name}: {other or 'nothing'}"
        lines.append([run.name, run.header.experiment, str(len(run.measurements)), told])
    return Table(["run", "experiment", "measurements", "differs from"], lines)


def same_experiment(runs: Sequence[Results]) -> dict[str, Table]:
    """For each experiment of several runs, what they measured in the same case, paired with the first of them."""
    tables = {}
    for experiment in dict.fromkeys(run.header.experiment for run in runs):
        first, *others = (run for run in runs if run.header.experiment == experiment)
        lines = []
        for case in first.cases:
            if having := [run for run in others if case in run.cases]:
                lines.append([described(case), first.name, *middles(first, case), *[UNDEFINED] * 3])
                lines += [
                    [described(case), run.name, *middles(run, case), *against(run, first, case)] for run in having
                ]
        if lines:
            header = ["case", "run", *FIGURES.values(), f"speed over {first.name}", "tau, difference", "U, difference"]
            tables[experiment] = Table(header, lines)
    return tables


def described(case: Mapping[str, Scalar]) -> str:
    return ", ".join(str(value) if name == "method" else f"{name} {value}" for name, value in case.items())


def middles(run: Results, case: Mapping[str, Scalar]) -> list[str]:
    return [cell(run.middle(name, case)) for name in FIGURES]


def against(run: Results, first: Results, case: Mapping[str, Scalar]) -> list[str]:
    """Ratio of speeds, differences of tau and U, batch by batch; undefined where the batches are not the same."""
    prompts = [
        {name: value for name, value in one.header.hashes.items() if name.startswith("prompts ")}
        for one in (run, first)
    ]
    if prompts[0] != prompts[1] or run.setting("batch_size", case) != first.setting("batch_size", case):
        return [UNDEFINED] * 3
    return [
        cell(ratio(run.figures("tokens_per_second", case), first.figures("tokens_per_second", case))),
        *(cell(difference(run.figures(name, case), first.figures(name, case)), "+") for name in ("tau", "u")),
    ]


def ratio(mine: Figures, theirs: Figures) -> Interval:
    return median_ratio(paired(*common(mine, theirs)))


def difference(mine: Figures, theirs: Figures) -> Interval:
    return median_difference(paired(*common(mine, theirs)))


def common(mine: Figures, theirs: Figures) -> tuple[Figures, Figures]:
    """Of the batches that both have: one run may have been interrupted."""
    return {k: v for k, v in mine.items() if k in theirs}, {k: v for k, v in theirs.items() if k in mine}


def cell(interval: Interval, sign: str = "") -> str:
    return interval.cell(sign) if math.isfinite(interval.middle) else UNDEFINED


# ---------------------------------------------------------------------------------------------------------------------
# Beside the paper


def published(runs: Sequence[Results]) -> Table:
    """Methods over plain decoding: the published averages, then the runs' cases of the paper's setting."""
    lines = []
    for target, methods in PUBLISHED.items():
        per_token = RoutingShape.of(PRESETS[target]).k
        for one in methods:
            figures = (one.speedup, one.tau, one.u, one.u / per_token, one.overlap)
            lines.append([f"published: {target}", one.method, *(number(value, digits=2) for value in figures)])
    for run, cases in papers_cases(runs):
        for method in (BASELINE, COST_AWARE):
            if method in cases:
                lines.append([run.name, method, *over_plain(run, cases[method], cases.get(PLAIN))])
    return Table(["source", "method", "speed over plain", "tau", "U", "U over plain", "overlap"], lines)


def over_plain(run: Results, case: Mapping[str, Scalar], plain: Mapping[str, Scalar] | None) -> list[str]:
    def over(name: str) -> str:
        return UNDEFINED if plain is None else cell(ratio(run.figures(name, case), run.figures(name, plain)))

    tau, u, overlap = (cell(run.middle(name, case)) for name in ("tau", "u", "overlap"))
    return [over("tokens_per_second"), tau, u, over("u"), overlap]


def published_gain(runs: Sequence[Results]) -> Table:
    """What cost-aware selection changes: `ecospec` over `likelihood`, published and in the runs."""
    names = ("tokens_per_second", "tau", "u", "verify_ms", "bytes_per_step")
    lines = []
    for target, methods in PUBLISHED.items():
        base, mine = (next(one for one in methods if one.method == wanted) for wanted in (BASELINE, COST_AWARE))
        ratios = [mine_is / base_is for mine_is, base_is in zip(of(mine), of(base), strict=True)]
        lines.append([f"published: {target}", *(number(value, digits=3) for value in ratios)])
    for run, cases in papers_cases(runs):
        if BASELINE in cases and COST_AWARE in cases:
            both = [[run.figures(name, cases[method]) for method in (COST_AWARE, BASELINE)] for name in names]
            lines.append([run.name, *(cell(ratio(*pair)) for pair in both)])
    return Table(["ecospec over likelihood", "speed", "tau", "U", "verify time", "bytes"], lines)


def of(one: PublishedMethod) -> tuple[float, ...]:
    return one.speedup, one.tau, one.u, one.verify_seconds, one.gigabytes


def papers_cases(runs: Iterable[Results]) -> list[tuple[Results, dict[str, dict[str, Scalar]]]]:
    """Cases by method of the runs that decoded as the paper did: its tree, one prompt at a time, greedily."""
    found = []
    for run in runs:
        cases = {
            str(case["method"]): case
            for case in run.cases
            if case.keys() <= {"method", *PAPER}
            and all(run.setting(name, case) == wanted for name, wanted in PAPER.items())
        }
        if cases:
            found.append((run, cases))
    return found


def number(value: float, *, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else UNDEFINED
