"""Data sets by name: from a folder, from the Hub (made up here), and what is refused."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecospec_jax import UserError
from experiments.data_sets import PUBLISHED, read_data_sets
from experiments.prompts import Prompt

LINES = {
    "openai/gsm8k": [{"question": f"{i} + 1?", "answer": f"#### {i + 1}", "extra": 0} for i in range(3)],
    "openai/openai_humaneval": [{"prompt": "def f():", "canonical_solution": " pass", "task_id": "0", "test": ""}],
    "Lin-Chen/MMStar": [{"question": "Which?\nOptions: A: x", "answer": "A", "image": b"..", "index": 0}],
    "math-ai/aime25": [{"problem": "p", "answer": "70", "id": "0"}],
    "HuggingFaceH4/MATH-500": [{"problem": "p", "answer": "\\pi", "solution": ""}],
    "AI-MO/aimo-validation-amc": [{"problem": "p", "answer": 142.0, "url": ""}],
    "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["first", "second"], "category": "writing", "reference": []}],
}


class Lines(list):
    """As much of `datasets.Dataset` as is used."""

    def select_columns(self, columns: list[str]) -> "Lines":
        return Lines({name: line[name] for name in columns} for line in self)

    def select(self, places: Any) -> "Lines":
        return Lines(self[place] for place in places)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    asked = []

    def load_dataset(path: str, config: str | None, split: str) -> Lines:
        asked.append((path, config, split))
        return Lines(LINES[path])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def write(folder: Path, name: str, *ids: str) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"id": one, "turns": [one]}) + "\n" for one in ids))
    return path


def test_names_files_and_named_files(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    write(tmp_path, "gsm8k", "g0", "g1")
    write(tmp_path, "own", "o0")
    other = write(tmp_path, "other", "x0", "x1")
    found = read_data_sets(["gsm8k", "own", str(other), f"again={other}"], tmp_path, limit=1)
    assert {name: [prompt.id for prompt in prompts] for name, prompts in found.items()} == {
        "gsm8k": ["g0"],
        "own": ["o0"],
        "other": ["x0"],
        "again": ["x0"],
    }
    assert hub == []


def test_what_the_folder_lacks_comes_from_the_hub(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    write(tmp_path, "aime25", "a0")
    found = read_data_sets(["aime25", "gsm8k", "mt_bench"], tmp_path, limit=2)
    assert [prompt.id for prompt in found["aime25"]] == ["a0"]
    assert found["gsm8k"] == [Prompt(id=f"gsm8k/{i}", turns=(f"{i} + 1?",), answer=f"#### {i + 1}") for i in range(2)]
    assert found["mt_bench"] == [Prompt(id="mt_bench/0", turns=("first", "second"))]
    assert hub == [("openai/gsm8k", "main", "test"), ("HuggingFaceH4/mt_bench_prompts", None, "train")]


def test_every_published_data_set_becomes_prompts(hub: list[tuple[Any, ...]]) -> None:
    found = read_data_sets(list(PUBLISHED), None)
    assert found.keys() == PUBLISHED.keys() and all(found.values())
    assert found["humaneval"][0].turns == ("Complete the following Python function.\ndef f():",)
    assert found["mmstar"][0].turns == ("Which?\nOptions: A: x",) and found["amc22_23"][0].answer == "142.0"


def test_without_data_and_package_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="^--prompts gsm8k: needs --data, .*package `datasets`"):
        read_data_sets(["gsm8k"], None)
    with pytest.raises(UserError, match="^--prompts magic: no --data folder is given"):
        read_data_sets(["magic"], None)
    with pytest.raises(UserError, match=f"^--prompts magic: {tmp_path} has no magic.jsonl"):
        read_data_sets(["magic"], tmp_path)
    with pytest.raises(UserError, match="two data sets are called 'gsm8k'"):
        read_data_sets(["gsm8k", "gsm8k=x.jsonl"], None)
    with pytest.raises(UserError, match="names no file"):
        read_data_sets([], None)


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match="^--prompts gsm8k: openai/gsm8k cannot be loaded: no route$"):
        read_data_sets(["gsm8k"], None)
