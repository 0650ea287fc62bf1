import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments import decode
from tests.complaints import complaint
from tests.tiny import compiling_quickly

ROOT = Path(__file__).parents[2]
QUICK_COMPILATION = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
PROMPTS = [
    {"id": "one", "turns": ["Tom has 3 apples and buys 4 more. How many has he?"]},
    {"id": "two", "turns": ["What is 5 times 6?", "And twice that?"]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "experiments.decode", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=600, env=QUICK_COMPILATION
    )


def test_decodes_both_turns_with_both_methods_and_writes_everything(
    converted_tiny: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--target", converted_tiny, "--prompts", prompts, "--out", out, "--max-new-tokens", 12)
    done = run(*options, "--methods", "ar,likelihood", "--stop", "zebra", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert "likelihood and ar: identical tokens on all 2 prompts" in done.stdout
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["method"]) for line in lines] == [
        ("one", "ar"),
        ("one", "likelihood"),
        ("two", "ar"),
        ("two", "likelihood"),
    ]
    assert [len(line["answers"]) for line in lines] == [1, 1, 2, 2]
    assert all(len(answer["tokens"]) == 12 for line in lines for answer in line["answers"])
    assert lines[0]["settings"]["seed"] == 0 and lines[0]["versions"]["jax"] and lines[0]["machine"]["cores"]
    assert {"table.md", "speed.png", "experts.png"} <= {path.name for path in out.iterdir()}


def test_streams_the_text_that_it_records(converted_tiny: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--target", converted_tiny, "--text", "What is 5 times 6?", "--out", out, "--max-new-tokens", 10)
    done = run(*options, "--methods", "likelihood", "--stream")
    assert done.returncode == 0, done.stderr
    answer = json.loads((out / "results.jsonl").read_text())["answers"][0]["text"]
    assert answer and answer.strip() in done.stdout


def test_padded_experts_give_the_same_answers_and_more_bytes(
    converted_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {}
    for pad_ffn in (0, 16):
        out = tmp_path / str(pad_ffn)
        options = {"methods": "ar,likelihood", "max_new_tokens": 12, "ignore_eos": True, "pad_ffn": pad_ffn}
        with compiling_quickly():
            decode.run(decode.Settings(target=converted_tiny, text="What is 5 times 6?", out=out, **options))
        assert ("experts: 0.0503 GB" in capsys.readouterr().out) == (pad_ffn > 0)
        lines[pad_ffn] = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    for plain, padded in zip(lines[0], lines[16], strict=True):
        assert padded["answers"] == plain["answers"] and padded["settings"]["pad_ffn"] == 16
        assert padded["bytes_per_token"] > plain["bytes_per_token"]


def test_expert_size_is_compared_with_the_cache() -> None:
    assert decode.expert_size(2.1e9, None) == "experts: 2.1 GB"
    assert decode.expert_size(2.1e9, 32 * 2**20) == "experts: 2.1 GB, 62.6 times the last-level cache"
    small = "experts: 0.05 GB, 1.5 times the last-level cache (at least 10 times is recommended)"
    assert decode.expert_size(5e7, 32 * 2**20) == small


def truncated(converted_tiny: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "broken"
    shutil.copytree(converted_tiny, copy)
    largest = max((copy / "target" / "top").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    return copy


def complaint_of(settings: decode.Settings, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the job as the command does; returns its one line of complaint."""
    return complaint(lambda: decode.run(settings), capsys)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"temperature": -1}, "temperature must not be negative"),
        ({"budget": 99}, "budget must be in 0..10"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"eps": 0}, "eps must be positive"),
        ({"buffer": "magic"}, "unknown expert buffer 'magic'"),
        ({"methods": "ar,magic"}, "unknown method 'magic'"),
        ({"methods": " "}, "--methods names no method"),
        ({"max_new_tokens": 2000}, "and 2000 new ones exceed the model's context of 1024"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"methods": "ecospec"}, "needs the predictor 'backbone'"),
        ({"batch_size": 0}, "batch size must be at least 1"),
        ({"batch_size": 2, "stream": True}, "--stream"),
        ({"layers": 2}, "--layers goes with --random-weights"),
        ({"acceptance": 0.5}, "--acceptance goes with --random-weights"),
        ({"prompts": None}, "--prompts"),
        ({"prompts": None, "text": " "}, "--text is empty"),
        ({"prompts": Path("absent.jsonl")}, "absent.jsonl"),
        ({"target": None}, "--target"),
        ({"target": None, "random_weights": "gpt-9"}, "unknown config 'gpt-9'"),
        ({"target": Path("absent")}, "absent"),
        ({"pad_ffn": -1}, "cannot be padded by -1 hidden units"),
        ({"pad_ffn": 10**9}, "GB more memory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    converted_tiny: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    complaint: str,
) -> None:
    out = tmp_path / "out"
    good = {"target": converted_tiny, "prompts": prompts, "methods": "ar,likelihood", "out": out}
    assert complaint in complaint_of(decode.Settings(**(good | options)), capsys)
    assert not out.exists()


def test_a_truncated_checkpoint_is_named(
    converted_tiny: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = decode.Settings(target=truncated(converted_tiny, tmp_path), prompts=prompts, methods="ar", out=out)
    assert "target/top" in complaint_of(settings, capsys)
    assert not out.exists()


def test_an_unwritable_folder_is_named(
    converted_tiny: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    settings = decode.Settings(target=converted_tiny, prompts=prompts, methods="ar", out=tmp_path / "file" / "out")
    assert str(tmp_path / "file") in complaint_of(settings, capsys)


def test_the_command_reports_bad_input_in_one_line(prompts: Path, tmp_path: Path) -> None:
    done = run("--target", tmp_path / "absent", "--prompts", prompts, "--out", tmp_path / "out")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "absent" in done.stderr


HEARING_INTERRUPTS = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.decode", run_name="__main__", alter_sys=True)
"""


def test_an_interrupt_leaves_valid_results(converted_tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": str(i), "turns": [f"What is {i} + {i}?"]}) for i in range(2000)))
    out = tmp_path / "out"
    options = command("--target", converted_tiny, "--prompts", prompts, "--methods", "ar", "--out", out)
    # A test run in the background ignores interrupts, and so would its children.
    listening = [sys.executable, "-c", HEARING_INTERRUPTS, *options[options.index("experiments.decode") + 1 :]]
    process = subprocess.Popen(
        listening, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=QUICK_COMPILATION
    )
    try:
        results, deadline = out / "results.jsonl", time.monotonic() + 240
        while time.monotonic() < deadline and not (results.exists() and results.read_text().count("\n") >= 2):
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and b"interrupted" in stderr
    lines = results.read_text().splitlines()
    assert 2 <= len(lines) < 2000
    assert all(json.loads(line)["method"] == "ar" for line in lines)
    assert not (out / "table.md").exists()
