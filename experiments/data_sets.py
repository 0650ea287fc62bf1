"""Prompts of the published data sets by name, from a folder of prompt files or from the Hugging Face Hub."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecospec_jax import UserError
from ecospec_jax.errors import reported_as_user_error
from experiments.prompts import Prompt, data_set_files, read_prompts

DEMO = Path(__file__).parent / "prompts" / "demo.jsonl"
NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Published:
    """Where a data set is on the Hub, and how a line of it becomes a prompt.

    Attributes:
        path, config, split: as `datasets.load_dataset` takes them.
        columns: those that are read; MMStar's images are not.
        turns: of a line.
        answer: column of the answer, if there is one.
    """

    path: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    turns: Callable[[Mapping[str, Any]], Sequence[str]]
    answer: str | None = None


PUBLISHED = {
    "gsm8k": Published(
        "openai/gsm8k", "main", "test", ("question", "answer"), lambda line: [line["question"]], "answer"
    ),
    "humaneval": Published(
        "openai/openai_humaneval",
        None,
        "test",
        ("prompt", "canonical_solution"),
        lambda line: ["Complete the following Python function.\n" + line["prompt"]],
        "canonical_solution",
    ),
    "mmstar": Published(
        "Lin-Chen/MMStar", None, "val", ("question", "answer"), lambda line: [line["question"]], "answer"
    ),
    "aime25": Published(
        "math-ai/aime25", None, "test", ("problem", "answer"), lambda line: [line["problem"]], "answer"
    ),
    "math500": Published(
        "HuggingFaceH4/MATH-500", None, "test", ("problem", "answer"), lambda line: [line["problem"]], "answer"
    ),
    "amc22_23": Published(
        "AI-MO/aimo-validation-amc", None, "train", ("problem", "answer"), lambda line: [line["problem"]], "answer"
    ),
    "mt_bench": Published("HuggingFaceH4/mt_bench_prompts", None, "train", ("prompt",), lambda line: line["prompt"]),
}
PAPER = tuple(PUBLISHED)


def read_data_sets(named: Sequence[str], data: Path | None, limit: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by data set.

    Args:
        named: each NAME, FILE or NAME=FILE. What has no `=`, no folder and no ending is a NAME: NAME.jsonl of `data`,
            or one of `PUBLISHED`.
        data: folder of prompt files.
        limit: use only the first prompts of each.
    """
    found = [_file_of(each, data) for each in named]
    files = data_set_files(
        [each if file is None else f"{each}={file}" for each, file in zip(named, found, strict=True)]
    )
    return {
        name: read_prompts(path, limit) if path != _ON_THE_HUB else _from_hub(name, limit)
        for name, path in files.items()
    }


_ON_THE_HUB = Path("https://huggingface.co/datasets")


def _file_of(each: str, data: Path | None) -> Path | None:
    """The file of a NAME; None where `each` says itself which it is."""
    if NAME.fullmatch(each) is None:
        return None
    if data is not None and (data / f"{each}.jsonl").exists():
        return data / f"{each}.jsonl"
    if each not in PUBLISHED:
        where = "no --data folder is given" if data is None else f"{data} has no {each}.jsonl"
        raise UserError(f"--prompts {each}: {where}, and the Hub's data sets known here are {', '.join(PUBLISHED)}")
    return _ON_THE_HUB


def _from_hub(name: str, limit: int | None) -> list[Prompt]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"--prompts {name}: needs --data, a folder with {name}.jsonl, or the package `datasets` (pip install "
            "'ecospec-jax[data]')"
        ) from error
    source = PUBLISHED[name]
    with reported_as_user_error(f"--prompts {name}: {source.path} cannot be loaded", Exception):
        lines = load_dataset(source.path, source.config, split=source.split).select_columns(list(source.columns))
        lines = lines if limit is None else lines.select(range(min(limit, len(lines))))
        return [
            Prompt(
                id=f"{name}/{number}",
                turns=tuple(source.turns(line)),
                answer=None if source.answer is None else str(line[source.answer]),
            )
            for number, line in enumerate(lines)
        ]
