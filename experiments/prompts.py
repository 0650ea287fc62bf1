"""Prompt files: one JSON object a line, `{"id", "turns": [..], "answer"?}`."""

from collections.abc import Sequence
from pathlib import Path

import pydantic

from ecospec_jax import UserError
from experiments.options import named_paths


class Prompt(pydantic.BaseModel, frozen=True, extra="forbid"):
    """A prompt of one or more user turns; later turns continue from the model's own answers."""

    id: str
    turns: tuple[str, ...] = pydantic.Field(min_length=1)
    answer: str | None = None


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Reads a prompt file; a bad line is a `UserError` with its number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON strings may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(Prompt.model_validate_json(line))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{path}: line {number}: {where + ': ' if where else ''}{first['msg']}") from error
        if any(not turn.strip() for turn in prompts[-1].turns):
            raise UserError(f"{path}: line {number}: turns: an empty turn")
    if not prompts:
        raise UserError(f"{path}: holds no prompts")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"{path}: id '{prompt.id}' occurs twice")
        seen.add(prompt.id)
    return prompts[:limit]


def data_set_files(named: Sequence[str]) -> dict[str, Path]:
    """Files by data set from `NAME=FILE`, or from a `FILE` without `=`, whose data set is called by its stem."""
    if not named:
        raise UserError("--prompts names no file")
    return named_paths(
        named,
        lambda path: path.stem,
        malformed="--prompts {each}: neither FILE nor NAME=FILE",
        twice="--prompts: two data sets are called '{name}'; call one otherwise, by NAME=FILE",
    )
