"""From records to a table on the terminal, a Markdown file and plots."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ecospec_jax import Generation
from ecospec_jax.cost import CostModel
from ecospec_jax.errors import reported_as_user_error
from ecospec_jax.methods import get_method
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.profiling import STAGES
from experiments.intervals import Interval, error_bars, mean_interval, median_interval
from experiments.plots import plt, save_figure
from experiments.tables import markdown_table, write_text


@dataclass(frozen=True)
class Record:
    """One prompt decoded with one method. Figures are of the batch that the prompt was decoded in.

    Attributes:
        method, prompt: names.
        batch: index of the batch's first prompt.
        answers: one a turn.
        stats: of the batch, all turns together.
        bytes_per_step: modelled weight bytes of a mean verification.
    """

    method: str
    prompt: str
    batch: int
    answers: tuple[Generation, ...]
    stats: DecodeStats
    bytes_per_step: float

    @staticmethod
    def create(
        method: str, prompt: str, batch: int, answers: Sequence[Generation], stats: DecodeStats, bytes_read: CostModel
    ) -> "Record":
        return Record(method, prompt, batch, tuple(answers), stats, bytes_read.step(stats.u))

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_step * self.stats.verifications / self.stats.emitted if self.stats.emitted else math.nan

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(answer.tokens for answer in self.answers)

    def json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "method": self.method,
            "batch": self.batch,
            "answers": [dataclasses.asdict(answer) for answer in self.answers],
            "tokens_per_second": finite(self.stats.tokens_per_second),
            "tau": finite(self.stats.tau),
            "u": finite(self.stats.u),
            "predicted_u": finite(self.stats.predicted_u),
            "overlap": finite(self.stats.overlap),
            "marginal_error": finite(self.stats.marginal_error),
            "rows": finite(self.stats.rows),
            "draft_u": finite(self.stats.draft_u),
            "bytes_per_step": finite(self.bytes_per_step),
            "bytes_per_token": finite(self.bytes_per_token),
            "stats": dataclasses.asdict(self.stats),
        }


def finite(value: float) -> float | None:
    """JSON has no nan: an undefined figure is null."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Row:
    """One method's line of the table; `oracle` marks methods whose predictor's time is not counted."""

    method: str
    oracle: bool
    figures: dict[str, Interval]
    stages: dict[str, Interval]

    @property
    def title(self) -> str:
        return f"{self.method}*" if self.oracle else self.method


COLUMNS = {
    "tokens_per_second": ("tokens/s", 1.0, 0),
    "speedup": ("speedup", 1.0, 2),
    "tau": ("tau", 1.0, 2),
    "u": ("U", 1.0, 2),
    "predicted_u": ("U predicted", 1.0, 2),
    "overlap": ("overlap", 1.0, 2),
    "marginal_error": ("marginal error", 1.0, 2),
    "bytes_per_step": ("MB/step", 1e-6, 2),
    "bytes_per_token": ("MB/token", 1e-6, 2),
    "draft_u": ("U draft", 1.0, 2),
}
OF_PREDICTIONS = ("predicted_u", "overlap", "marginal_error")
NOTES = (
    "Medians over prompts [95 % bootstrap interval]; stage times are from a separate staged pass.",
    "* an experiment: sees the target's true routing by an extra pass; its share of the staged times is not counted.",
)
NOTE_ON_DRAFTING = (
    "U draft: distinct experts of its own that the drafter reads per verification. MB/step and MB/token are those of "
    "the target alone."
)


def summarise(methods: list[str], records: list[Record], stages: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Medians over batches of prompts; speedup is paired batch by batch with the first method."""
    batches = {method: {r.batch: r.stats for r in records if r.method == method} for method in methods}
    staged = {
        method: {stage: median_interval([times[stage] for times in stages[method]]) for stage in STAGES}
        for method in methods
    }

    def throughput(method: str, stats: DecodeStats) -> float:
        times = {stage: interval.middle for stage, interval in staged[method].items()}
        counted = 1 - times["predict"] / sum(times.values()) if is_oracle(method) else 1.0
        return stats.emitted / (stats.decode_seconds * counted) if stats.emitted else math.nan

    baseline = {batch: throughput(methods[0], stats) for batch, stats in batches[methods[0]].items()}
    rows = []
    for method in methods:
        mine = batches[method]
        speeds = {batch: throughput(method, stats) for batch, stats in mine.items()}
        figures = {
            "tokens_per_second": list(speeds.values()),
            "speedup": [speed / baseline[batch] for batch, speed in speeds.items()],
            "bytes_per_step": [r.bytes_per_step for r in records if r.method == method],
            "bytes_per_token": [r.bytes_per_token for r in records if r.method == method],
            **{
                name: [getattr(stats, name) for stats in mine.values()]
                for name in ("tau", "u", "draft_u", *OF_PREDICTIONS)
            },
        }
        if get_method(method).adaptive:  # its plain steps predict nothing, which these figures would count as misses
            figures |= {name: [math.nan] * len(mine) for name in OF_PREDICTIONS}
        intervals = {name: median_interval(figures[name]) for name in COLUMNS}
        rows.append(Row(method, is_oracle(method), intervals, staged[method]))
    return rows


def is_oracle(method: str) -> bool:
    return get_method(method).predictor == "oracle"


@dataclass(frozen=True)
class Difference:
    """Where a method's tokens first leave the baseline's."""

    method: str
    prompt: str
    turn: int
    place: int


def first_differences(methods: list[str], records: list[Record]) -> list[Difference]:
    """One entry per method and prompt whose tokens are not the first method's."""
    baseline = {r.prompt: r.tokens for r in records if r.method == methods[0]}
    found = []
    for record in records:
        for turn, (mine, theirs) in enumerate(zip(record.tokens, baseline[record.prompt], strict=True)):
            if mine != theirs:
                pairs = enumerate(zip(mine, theirs, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
                found.append(Difference(record.method, record.prompt, turn, place))
                break
    return found


def same_tokens(methods: list[str], records: list[Record]) -> list[str]:
    """One line per method: whether its tokens are the first method's."""
    prompts = len({record.prompt for record in records})
    differences = first_differences(methods, records)
    lines = []
    for method in methods[1:]:
        different = [d.prompt for d in differences if d.method == method]
        verdict = (
            f"identical tokens on all {prompts} prompts"
            if not different
            else f"DIFFERENT tokens on {len(different)} of {prompts} prompts: {', '.join(different[:5])}"
        )
        lines.append(f"{method} and {methods[0]}: {verdict}")
    return lines


def paired_u(methods: list[str], records: list[Record]) -> list[str]:
    """Mean difference in U of each informed method to `likelihood`, paired by batch of prompts."""
    if "likelihood" not in methods:
        return []
    u = {method: {r.batch: r.stats.u for r in records if r.method == method} for method in methods}
    lines = []
    for method in methods:
        if get_method(method).predictor is not None:
            difference = mean_interval([u[method][batch] - u["likelihood"][batch] for batch in u[method]])
            lines.append(
                f"U of {method} minus likelihood, paired: {difference.middle:+.3f} "
                f"[{difference.low:+.3f}, {difference.high:+.3f}]"
            )
    return lines


UNDEFINED = "-"


def _cell(interval: Interval, scale: float, digits: int, separator: str) -> str:
    if not math.isfinite(interval.middle):
        return UNDEFINED
    low, high = interval.low * scale, interval.high * scale
    return f"{interval.middle * scale:.{digits}f}{separator}[{low:.{digits}f}, {high:.{digits}f}]"


def table_cells(rows: list[Row], names: Sequence[str], separator: str) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the named columns and stages; `separator` stands between a median and its interval."""
    header = ["method", *(COLUMNS[name][0] if name in COLUMNS else f"{name} ms" for name in names)]
    cells = []
    for row in rows:
        line = [row.title]
        for name in names:
            if name in COLUMNS:
                _, scale, digits = COLUMNS[name]
                line.append(_cell(row.figures[name], scale, digits, separator))
            else:
                line.append(f"{row.stages[name].middle:.2f}")
        cells.append(line)
    return header, cells


# Groups of columns that fit on a terminal of 80 characters.
TERMINAL_TABLES = (
    ("tokens_per_second", "speedup", "tau", "u"),
    ("bytes_per_step", "bytes_per_token"),
    ("predicted_u", "overlap", "marginal_error"),
    ("draft_u",),
    STAGES,
)


def write_report(
    out: Path,
    methods: list[str],
    records: list[Record],
    stages: dict[str, list[dict[str, float]]],
    on_tokens: list[str],
    common: dict[str, Any],
    console: Console,
) -> None:
    """Prints the table, in parts that fit a terminal, and writes `table.md` and the plots into `out`."""
    rows = summarise(methods, records, stages)
    verdicts = on_tokens + paired_u(methods, records)
    notes: list[str] = [*(NOTES if any(row.oracle for row in rows) else NOTES[:1])]
    columns = list(COLUMNS)
    if any(math.isfinite(row.figures["draft_u"].middle) for row in rows):
        notes.append(NOTE_ON_DRAFTING)
    else:
        columns.remove("draft_u")

    for names in TERMINAL_TABLES:
        header, cells = table_cells(rows, names, separator="\n")
        if all(cell == UNDEFINED for line in cells for cell in line[1:]):
            continue
        table = Table(*(Column(title, justify="left" if title == "method" else "right") for title in header))
        for line in cells:
            table.add_row(*line)
        console.print(table)
    for line in (*notes, *verdicts):
        console.print(line, soft_wrap=True)

    header, cells = table_cells(rows, [*columns, *STAGES], separator=" ")
    with reported_as_user_error(f"{out}: cannot be written", OSError):
        write_text(out / "table.md", _markdown(header, cells, [*notes, *verdicts], common))
        _plot(out / "speed.png", rows)
        _plot_layers(out / "experts.png", methods, records)
    console.print(f"written to {out}: results.jsonl, table.md, speed.png, experts.png", soft_wrap=True)


def _markdown(header: list[str], cells: list[list[str]], remarks: list[str], common: dict[str, Any]) -> str:
    lines = [f"- {remark}" for remark in remarks] + [f"- {name}: `{value}`" for name, value in common.items()]
    return markdown_table(header, cells) + "\n" + "\n".join(lines) + "\n"


def _plot(path: Path, rows: list[Row]) -> None:
    panels = ("speedup", "tau", "u", "bytes_per_token")
    figure, axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 3), layout="constrained")
    names = [row.title for row in rows]
    for axis, panel in zip(axes, panels, strict=True):
        title, scale, _ = COLUMNS[panel]
        values = [row.figures[panel] for row in rows]
        medians = [value.middle * scale for value in values]
        axis.bar(names, medians, yerr=error_bars(values) * scale, capsize=4, color=[f"C{i}" for i in range(len(rows))])
        axis.set_title(title)
        axis.tick_params(axis="x", rotation=30)
    save_figure(figure, path)


def _plot_layers(path: Path, methods: list[str], records: list[Record]) -> None:
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    for method in methods:
        batches = list({r.batch: r.stats for r in records if r.method == method}.values())
        total = sum(batches[1:], start=batches[0])
        if total.verifications:
            axis.plot([n / total.verifications for n in total.distinct_by_layer], marker="o", label=method)
    axis.set_xlabel("MoE layer")
    axis.set_ylabel("distinct experts per verification")
    axis.set_ylim(bottom=0)
    axis.legend()
    save_figure(figure, path)
