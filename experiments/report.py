"""From records to a table on the terminal, a Markdown file and plots."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from ecospec_jax import Generation  # noqa: E402
from ecospec_jax.cost import ByteModel  # noqa: E402
from ecospec_jax.errors import reported_as_user_error  # noqa: E402
from ecospec_jax.metrics import DecodeStats  # noqa: E402
from ecospec_jax.profiling import STAGES  # noqa: E402
from experiments.intervals import Interval, median_interval  # noqa: E402


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
        method: str, prompt: str, batch: int, answers: Sequence[Generation], stats: DecodeStats, bytes_read: ByteModel
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
            "rows": finite(self.stats.rows),
            "bytes_per_step": finite(self.bytes_per_step),
            "bytes_per_token": finite(self.bytes_per_token),
            "stats": dataclasses.asdict(self.stats),
        }


def finite(value: float) -> float | None:
    """JSON has no nan: an undefined figure is null."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Row:
    """One method's line of the table."""

    method: str
    figures: dict[str, Interval]
    stages: dict[str, Interval]


COLUMNS = {
    "tokens_per_second": ("tokens/s", 1.0, 0),
    "speedup": ("speedup", 1.0, 2),
    "tau": ("tau", 1.0, 2),
    "u": ("U", 1.0, 2),
    "bytes_per_step": ("MB/step", 1e-6, 2),
    "bytes_per_token": ("MB/token", 1e-6, 2),
}


def summarise(methods: list[str], records: list[Record], stages: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Medians over batches of prompts; speedup is paired batch by batch with the first method."""
    batches = {method: {r.batch: r for r in records if r.method == method} for method in methods}
    baseline = batches[methods[0]]
    rows = []
    for method in methods:
        mine = batches[method].values()
        figures = {
            "tokens_per_second": [r.stats.tokens_per_second for r in mine],
            "speedup": [r.stats.tokens_per_second / baseline[r.batch].stats.tokens_per_second for r in mine],
            "tau": [r.stats.tau for r in mine],
            "u": [r.stats.u for r in mine],
            "bytes_per_step": [r.bytes_per_step for r in mine],
            "bytes_per_token": [r.bytes_per_token for r in mine],
        }
        rows.append(
            Row(
                method,
                {name: median_interval(values) for name, values in figures.items()},
                {stage: median_interval([times[stage] for times in stages[method]]) for stage in STAGES},
            )
        )
    return rows


def same_tokens(methods: list[str], records: list[Record]) -> list[str]:
    """One line per method: whether its tokens are the first method's."""
    baseline = {r.prompt: r.tokens for r in records if r.method == methods[0]}
    lines = []
    for method in methods[1:]:
        different = [r.prompt for r in records if r.method == method and r.tokens != baseline[r.prompt]]
        verdict = (
            f"identical tokens on all {len(baseline)} prompts"
            if not different
            else f"DIFFERENT tokens on {len(different)} of {len(baseline)} prompts: {', '.join(different[:5])}"
        )
        lines.append(f"{method} and {methods[0]}: {verdict}")
    return lines


def _cell(interval: Interval, scale: float, digits: int) -> str:
    if not math.isfinite(interval.median):
        return "-"
    low, high = interval.low * scale, interval.high * scale
    return f"{interval.median * scale:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table_cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells as text."""
    header = ["method", *(title for title, _, _ in COLUMNS.values()), *(f"{stage} ms" for stage in STAGES)]
    cells = [
        [
            row.method,
            *(_cell(row.figures[name], scale, digits) for name, (_, scale, digits) in COLUMNS.items()),
            *(f"{row.stages[stage].median:.2f}" for stage in STAGES),
        ]
        for row in rows
    ]
    return header, cells


def write_report(
    out: Path,
    methods: list[str],
    records: list[Record],
    stages: dict[str, list[dict[str, float]]],
    common: dict[str, Any],
    console: Console,
) -> None:
    """Prints the table and writes `table.md` and the plots into `out`."""
    rows = summarise(methods, records, stages)
    verdicts = same_tokens(methods, records)
    header, cells = table_cells(rows)

    table = Table(title="medians over prompts [95 % interval]; stage times are from a separate staged pass")
    for title in header:
        table.add_column(title, justify="left" if title == "method" else "right")
    for line in cells:
        table.add_row(*line)
    console.print(table)
    for verdict in verdicts:
        console.print(verdict)

    with reported_as_user_error(f"{out}: cannot be written", OSError):
        _write(out / "table.md", _markdown(header, cells, verdicts, common))
        _plot(out / "speed.png", rows)
        _plot_layers(out / "experts.png", methods, records)
    console.print(f"written to {out}: results.jsonl, table.md, speed.png, experts.png")


def _markdown(header: list[str], cells: list[list[str]], verdicts: list[str], common: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(line) + " |" for line in cells]
    lines += ["", "Medians over prompts [95 % bootstrap interval]; stage times are from a separate staged pass.", ""]
    lines += [f"- {verdict}" for verdict in verdicts]
    lines += [f"- {name}: `{value}`" for name, value in common.items()]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_name(path.name + ".partial")
    figure.savefig(temporary, format="png", dpi=150)
    plt.close(figure)
    temporary.replace(path)


def _plot(path: Path, rows: list[Row]) -> None:
    panels = ("speedup", "tau", "u", "bytes_per_token")
    figure, axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 3), layout="constrained")
    names = [row.method for row in rows]
    for axis, panel in zip(axes, panels, strict=True):
        title, scale, _ = COLUMNS[panel]
        values = [row.figures[panel] for row in rows]
        medians = [value.median * scale for value in values]
        errors = [
            [(value.median - value.low) * scale for value in values],
            [(value.high - value.median) * scale for value in values],
        ]
        axis.bar(names, medians, yerr=errors, capsize=4, color=[f"C{i}" for i in range(len(rows))])
        axis.set_title(title)
    _save(figure, path)


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
    _save(figure, path)
