"""The command on two processes of four devices each: tokens of one process, and one process's output."""

import json
from pathlib import Path
from typing import Any

import pytest

from convert import convert
from ecospec_jax import Decoder, SamplingConfig
from experiments import decode
from tests.complaints import complaint
from tests.hf_models import write_target
from tests.processes import free_port, start_python
from tests.tiny import compiling_quickly

TEXT, NEW_TOKENS, SEED, TEMPERATURE = "What is 5 times 6?", 8, 3, 0.7
SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "moe_intermediate_size": 20,
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "source", **SHAPE)
    convert(folder / "source", folder / "converted")
    return folder / "converted"


def test_two_processes_decode_as_one(converted: Path, tmp_path: Path) -> None:
    command = ["-m", "experiments.decode", "--target", converted, "--layout", "tp2ep4", "--text", TEXT, "--ignore-eos"]
    command += ["--methods", "ar", "--max-new-tokens", NEW_TOKENS, "--seed", SEED, "--temperature", TEMPERATURE]
    command += ["--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2]
    running = [
        start_python(*command, "--process-id", index, "--out", tmp_path / str(index), devices=4) for index in range(2)
    ]
    said = []
    for process in running:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        said.append(out)
    assert "written to" in said[0] and said[1] == ""
    assert (tmp_path / "0" / "table.md").exists() and not (tmp_path / "1").exists()
    record = json.loads((tmp_path / "0" / "results.jsonl").read_text())
    assert len(record["machine"]["devices"]) == 8
    with compiling_quickly():
        alone = Decoder.load(converted).generate(
            [list(TEXT.encode())],
            method="ar",
            sampling=SamplingConfig(temperature=TEMPERATURE),
            seed=[SEED],
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )
    assert record["answers"][0]["tokens"] == list(alone.generations[0].tokens)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"distributed": True}, "--distributed needs --layout"),
        ({"processes": 2}, "go with --distributed"),
        ({"layout": "ep2000"}, "layout 'ep2000' asks for 2000 devices; there are"),
        ({"layout": "rows"}, "unknown layout 'rows'"),
    ],
)
def test_bad_input_is_one_line(
    converted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    line: str,
) -> None:
    settings = decode.Settings(target=converted, text=TEXT, methods="ar", out=tmp_path / "out", **options)
    assert line in complaint(lambda: decode.start(settings), capsys)
    assert not (tmp_path / "out").exists()
