"""One command for a GPU machine: are the kernels right, how fast are they, what do they read?

    python -m experiments.gpu_check

Needs no more than the project's own dependencies. Each section runs in a process of its own, so that a kernel that
brings its process down does not end the others. A section that is finished is not run again. Exit code 1: a result is
wrong, or a section failed.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from ecospec_jax import UserError
from ecospec_jax.errors import EXIT_BAD_INPUT, reported_as_user_error, run_command
from experiments.gpu_sections import PROFILE_COMMAND, Skipped, first_line, profiled_call, sections
from experiments.tables import write_text

SECTION_SECONDS = 300
SECTION_COMMAND = "_section"


@dataclass(frozen=True)
class Settings:
    """Check and time the kernels on a GPU."""

    platform: Literal["cuda", "cpu"] = "cuda"
    """cpu: tiny sizes, as a test of this script."""
    only: tuple[str, ...] = ()
    """Sections to run, e.g. "numerics triton"; all if none is named."""
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run finished sections again."""
    out: Path = Path("results/gpu_check")
    """Folder for results.jsonl."""

    @property
    def file(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def chosen(self) -> list[str]:
        known = list(sections(self.platform))
        for name in self.only:
            if name not in known:
                raise UserError(f"unknown section '{name}'; known: {', '.join(known)}")
        return list(self.only) or known


Record = dict[str, Any]


def read_records(settings: Settings) -> list[Record]:
    """What earlier runs found, without a last line that an interruption cut off."""
    if not settings.file.exists():
        return []
    with reported_as_user_error(f"{settings.file}: cannot be read", OSError, ValueError):
        text = settings.file.read_text(encoding="utf-8")
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if any(record["platform"] != settings.platform for record in records):
            raise UserError(f"{settings.file}: holds results of another platform; choose another --out")
    return records


def is_finished(records: list[Record], section: str) -> bool:
    return any(record["section"] == section and record.get("status") in ("done", "skipped") for record in records)


def append(settings: Settings, section: str, record: Record) -> None:
    with settings.file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"section": section, "platform": settings.platform, **record}) + "\n")


def run_section(settings: Settings, name: str) -> None:
    """Runs a section in this process; its last record says how it ended."""
    started = time.perf_counter()
    status: Record = {"status": "done"}
    try:
        for record in sections(settings.platform)[name]():
            append(settings, name, record)
    except Skipped as reason:
        status = {"status": "skipped", "reason": str(reason)}
    except Exception as error:  # recorded, so that the other sections are attempted
        status = {"status": "error", "error": first_line(error)}
    append(settings, name, status | {"seconds": round(time.perf_counter() - started, 1)})


def run_apart(settings: Settings, name: str) -> None:
    """Runs a section in a process of its own."""
    command = [sys.executable, "-m", "experiments.gpu_check", SECTION_COMMAND, str(settings.out), name]
    try:
        code = subprocess.run(command, timeout=SECTION_SECONDS).returncode
        if code == EXIT_BAD_INPUT:  # it has said why
            raise SystemExit(code)
        problem = f"its process ended with exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        problem = f"took more than {SECTION_SECONDS} s"
    if problem is not None:
        append(settings, name, {"status": "error", "error": problem})


def problems(records: list[Record]) -> list[str]:
    """Everything that is wrong, one line each."""
    lines = []
    for record in records:
        case = ", ".join(
            str(record[name])
            for name in ("shape", "format", "layout", "widths", "rows", "rows_dtype")
            if name in record
        )
        where = f"{record['section']}{f' ({case})' if case else ''}"
        if "error" in record:
            lines.append(f"{where}: {record['error']}")
        elif record.get("ok") is False:
            lines.append(f"{where}: off by {record['difference']:.4f} of the largest magnitude")
    return lines


def table(records: list[Record], wanted: list[str]) -> Table:
    """One line for what each section found, or for each layer that was timed."""
    shown = Table("section", "what", "figures")
    for section in wanted:
        mine = [record for record in records if record["section"] == section]
        cases = [record for record in mine if "ok" in record or ("error" in record and "backend" in record)]
        if section.startswith("numerics") and cases:
            right = [record for record in cases if record.get("ok")]
            worst = max((record["difference"] for record in cases if "difference" in record), default=float("nan"))
            shown.add_row(section, f"{len(right)} of {len(cases)} right", f"largest difference {worst:.4f}")
        for record in mine:
            layer = f"{record.get('shape')} {record.get('format')} T={record.get('rows')}"
            if "kind" in record:
                shown.add_row(section, record["kind"], f"capability {record['capability']}")
            elif "ceiling" in record:
                ceiling = record["ceiling"]
                figures = f"copy {ceiling['copy_gb_per_s']:.0f} GB/s, read {ceiling['read_gb_per_s']:.0f} GB/s"
                shown.add_row(section, "memory", figures)
            elif "of_copy" in record:
                figures = f"{record['us']:.1f} us ({record['us_without_experts']:.1f} without experts), "
                figures += f"{record['gb_per_s']:.0f} GB/s = {record['of_copy']:.0%} of copy"
                shown.add_row(section, layer, figures)
            elif "kernels" in record:
                shown.add_row(section, layer, f"{record['ratio']:.3f} times the model, {record['kernels']} kernels")
            elif "launches" in record:
                shown.add_row(section, record["what"], f"{record['launches']} launches")
            elif "tokamax_us" in record:
                figures = f"ours {record['us']:.1f} us, tokamax {record['tokamax_us']:.1f} us"
                shown.add_row(section, layer, figures)
            elif record.get("status") == "skipped":
                shown.add_row(section, "skipped", record["reason"])
    return shown


def run(settings: Settings) -> None:
    if settings.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    wanted, console = settings.chosen, Console()
    kept = read_records(settings)
    todo = [name for name in wanted if settings.force or not is_finished(kept, name)]
    kept = [record for record in kept if record["section"] not in todo]
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
        write_text(settings.file, "".join(json.dumps(record) + "\n" for record in kept))
        for name in wanted:
            console.print(f"{name}{'' if name in todo else ': finished before'}")
            if name in todo:
                (run_section if settings.platform == "cpu" else run_apart)(settings, name)
    records = read_records(settings)
    wrong = problems([record for record in records if record["section"] in wanted])
    console.print(table(records, wanted))
    for line in wrong:
        console.print(f"ERROR: {line}", style="bold red", soft_wrap=True)
    if wrong:
        raise SystemExit(1)
    console.print(f"all is well; written to {settings.file}")


def main() -> None:
    match sys.argv[1:]:
        case [command, out, name] if command == SECTION_COMMAND:
            if jax.default_backend() != "gpu":
                raise UserError("JAX finds no GPU here; --platform cpu tests this script without one")
            run_section(Settings(out=Path(out)), name)
        case [command, case] if command == PROFILE_COMMAND:
            profiled_call(case)
        case _:
            run(tyro.cli(Settings, description=__doc__))


if __name__ == "__main__":
    run_command(main)
