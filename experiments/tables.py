"""Markdown tables, and text files that appear complete."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table with its trailing newline."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(line) + " |" for line in cells)]) + "\n"


def notes(values: Mapping[str, object]) -> str:
    """What a result was made with, a line each."""
    return "\n".join(f"- {name}: `{value}`" for name, value in values.items())


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name, then renames."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
