import json
from pathlib import Path

import pytest

from ecospec_jax import UserError
from experiments.prompts import Prompt, data_set_files, read_prompts

DEMO = Path(__file__).parents[2] / "experiments" / "prompts" / "demo.jsonl"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_reads_turns_answers_and_skips_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "a", "turns": ["x", "y"]}', "", '{"id": "b", "turns": ["z"], "answer": "7"}')
    assert read_prompts(path) == [Prompt(id="a", turns=("x", "y")), Prompt(id="b", turns=("z",), answer="7")]
    assert [prompt.id for prompt in read_prompts(path, limit=1)] == ["a"]


def test_only_newlines_separate_prompts(tmp_path: Path) -> None:
    """JSON allows the other line separators of Unicode within a string."""
    path = write(tmp_path, '{"id": "a", "turns": ["one\u2028two\x85three"]}', '{"id": "b", "turns": ["z"]}')
    assert [prompt.turns for prompt in read_prompts(path)] == [("one\u2028two\x85three",), ("z",)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "line 2"),
        ('{"id": "b"}', "line 2: turns"),
        ('{"id": "b", "turns": []}', "line 2: turns"),
        ('{"id": "b", "turns": ["  "]}', "line 2: turns"),
        ('{"id": "b", "turns": ["x"], "more": 1}', "line 2: more"),
        ('{"id": 3, "turns": ["x"]}', "line 2: id"),
        ('{"id": "a", "turns": ["x"]}', "'a' occurs twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path, '{"id": "a", "turns": ["x"]}', line)
    with pytest.raises(UserError) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00"])
def test_an_empty_or_unreadable_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        read_prompts(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.jsonl"):
        read_prompts(tmp_path / "absent.jsonl")


def test_the_demo_has_24_prompts_of_every_kind() -> None:
    prompts = read_prompts(DEMO)
    assert len(prompts) == 24
    assert sum(len(prompt.turns) == 2 for prompt in prompts) >= 2
    assert sum("Python" in prompt.turns[0] for prompt in prompts) >= 5
    assert all(json.loads(line)["id"] for line in DEMO.read_text().splitlines())


def test_data_sets_by_name_or_stem() -> None:
    """What refuses them is tested with the command that takes them."""
    assert data_set_files(["a/x.jsonl", "y=a/x.jsonl", "z=runs/lr=1/p.jsonl"]) == {
        "x": Path("a/x.jsonl"),
        "y": Path("a/x.jsonl"),
        "z": Path("runs/lr=1/p.jsonl"),
    }
