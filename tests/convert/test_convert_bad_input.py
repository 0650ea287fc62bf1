"""Sources that cannot be used: one line that names file and tensor or key, exit code 2, nothing left behind."""

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convert import convert
from ecospec_jax.errors import UserError
from tests.hf_models import edit_json, edit_tensors, write_target

ROOT = Path(__file__).parents[2]
Q = "model.layers.3.self_attn.q_proj.weight"
EXPERT = "model.layers.3.mlp.experts.4.up_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write_target(folder / "source")
    return folder / "source"


@pytest.fixture
def source(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "source"))


def edit_header(file: Path, edit) -> None:
    """Rewrites the JSON header of a safetensors file, the data untouched."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def truncate(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


def shard(folder: Path) -> Path:
    """Turns the folder's single file into a shard with an index, which is returned."""
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    return index


def edit_index(folder: Path, **edit) -> None:
    index = shard(folder)
    edit_json(index, weight_map={k: v for k, v in (json.loads(index.read_text())["weight_map"] | edit).items() if v})


def config(**edit):
    return lambda folder: edit_json(folder / "config.json", **edit)


def tensors(**edit):
    return lambda folder: edit_tensors(folder, edit)


def header(edit):
    return lambda folder: edit_header(folder / "model.safetensors", edit)


FILE = "model.safetensors"
BAD = {
    "missing tensor": (tensors(**{Q: None}), f"{FILE}: tensor {Q} is missing"),
    "missing expert": (tensors(**{EXPERT: None}), f"{FILE}: tensor {EXPERT} is missing"),
    "extra expert": (
        tensors(**{EXPERT.replace(".4.", ".7."): torch.ones(18, 24)}),
        f"{FILE}: tensor {EXPERT.replace('.4.', '.7.')} has no place in qwen3_moe",
    ),
    "unused tensor": (tensors(extra=torch.ones(1)), f"{FILE}: tensor extra has no place in qwen3_moe"),
    "shape": (tensors(**{Q: torch.ones(60, 23)}), f"{FILE}: tensor {Q} has shape (60, 23), not (60, 24)"),
    "expert shape": (tensors(**{EXPERT: torch.ones(24, 18)}), f"tensor {EXPERT} has shape (24, 18), not (18, 24)"),
    "dtype": (tensors(**{Q: torch.ones(60, 24).to(torch.int8)}), f"{FILE}: tensor {Q} has dtype I8, not BF16 or F16"),
    "mixed experts": (tensors(**{EXPERT: torch.ones(18, 24).half()}), f"tensor {EXPERT} has another dtype than"),
    "truncated data": (lambda folder: truncate(folder, -7), f"{FILE}: truncated within tensor"),
    "truncated header": (lambda folder: truncate(folder, 100), f"{FILE}: truncated, or no safetensors file"),
    "empty file": (lambda folder: truncate(folder, 0), f"{FILE}: truncated, or no safetensors file"),
    "short offsets": (
        header(lambda h: h[Q].update(data_offsets=[h[Q]["data_offsets"][0], h[Q]["data_offsets"][1] - 4])),
        f"{FILE}: tensor {Q} of shape (60, 24) and dtype F32 cannot have 5756 bytes",
    ),
    "overlap": (
        header(lambda h: h[Q].update(data_offsets=[at - 4 for at in h[Q]["data_offsets"]])),
        "overlaps another or leaves a gap before it",
    ),
    "negative shape": (header(lambda h: h[Q].update(shape=[-60, -24])), f"tensor {Q} of shape (-60, -24)"),
    "unknown dtype": (header(lambda h: h[Q].update(dtype="F6")), f"{FILE}: tensor {Q} has the unknown dtype F6"),
    "no offsets": (header(lambda h: h[Q].pop("data_offsets")), f"{FILE}: tensor {Q} is ill described"),
    "no weights": (
        lambda folder: (folder / FILE).unlink(),
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "shard gone": (lambda folder: edit_index(folder, extra="model-2.safetensors"), "model-2.safetensors: no such file"),
    "index too long": (
        lambda folder: edit_index(folder, extra="model-1.safetensors"),
        "model-1.safetensors: no tensor extra, though model.safetensors.index.json lists it",
    ),
    "index too short": (
        lambda folder: edit_index(folder, **{Q: None}),
        f"{Q} is not listed in model.safetensors.index",
    ),
    "index ill formed": (lambda folder: shard(folder).write_text("[]"), "index.json: no 'weight_map'"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: no such file"),
    "config ill formed": (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read"),
    "model type": (config(model_type="llama"), "config.json: model_type: 'llama' is not supported, only qwen3_moe"),
    "no model type": (config(model_type=...), "config.json: model_type: missing"),
    "activation": (config(hidden_act="gelu"), "config.json: hidden_act: 'gelu' is not supported, only 'silu'"),
    "sliding window": (config(use_sliding_window=True), "config.json: use_sliding_window: True is not supported"),
    "no experts": (config(num_local_experts=...), "config.json: num_experts or num_local_experts: missing"),
    "contradiction": (config(num_experts=9), "config.json: num_local_experts: 7 contradicts num_experts"),
    "ill typed": (config(head_dim="10"), "config.json: head_dim: '10' is no int"),
    "size zero": (config(hidden_size=0), "config.json: hidden_size: 0 is not positive"),
    "no norm_topk_prob": (config(norm_topk_prob=...), "config.json: norm_topk_prob: missing"),
    "odd head_dim": (config(head_dim=11), "config.json: head_dim must be even"),
    "no theta": (config(rope_parameters=...), "config.json: rope_theta: missing"),
    "two ropes": (
        config(rope_scaling={"type": "linear", "factor": 2.0}),
        "config.json: rope_scaling: {'type': 'linear'",
    ),
    "two thetas": (config(rope_theta=7.0), "config.json: rope_parameters.rope_theta: contradicts"),
    "rope type": (
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "config.json: rope_parameters.rope_type: 'longrope' is not supported",
    ),
    "rope key missing": (
        config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        "config.json: rope_parameters.original_max_position_embeddings: missing",
    ),
    "rope key unknown": (
        config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}),
        "config.json: rope_parameters.mrope_section: not known for rope type 'default'",
    ),
    "eos beyond": (config(eos_token_id=67), "config.json: eos_token_id: 67 is no token id"),
    "no eos": (config(eos_token_id=...), "config.json: eos_token_id: missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_source_is_refused_before_anything_is_written(tmp_path, source, case):
    damage, message = BAD[case]
    (source / "generation_config.json").unlink()
    damage(source)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        convert(source, tmp_path / "out")
    assert str(error.value).count(str(source)) == 1
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_pickles_are_refused_with_a_recipe_that_works(tmp_path, source):
    wanted = convert(source, tmp_path / "wanted").source_hash
    state = load_file(source / FILE)
    torch.save(dict(list(state.items())[:50]), source / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(list(state.items())[50:]), source / "pytorch_model-00002-of-00002.bin")
    (source / FILE).unlink()
    with pytest.raises(UserError, match="pytorch_model-00001-of-00002.bin: PyTorch pickles are not read") as error:
        convert(source, tmp_path / "out")
    recipe = str(error.value).split("first: ")[1].replace("python -c", f"{sys.executable} -c")
    subprocess.run(recipe, shell=True, check=True)
    assert convert(source, tmp_path / "out").source_hash == wanted


def test_taken_and_unwritable_destinations(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out.partial: cannot write: .*Not a directory"):
        convert(source, tmp_path / "file/out")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken: already exists; remove it or choose another name"):
        convert(source, tmp_path / "taken")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial/mine.txt").write_text("precious")
    with pytest.raises(UserError, match="other.partial: in the way"):
        convert(source, tmp_path / "other")
    assert (tmp_path / "other.partial/mine.txt").read_text() == "precious"


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "nowhere", "a/b/c"])
def test_no_such_folder(tmp_path, name):
    with pytest.raises(UserError, match=f"{name}: no such folder"):
        convert(name, tmp_path / "out")


@pytest.mark.parametrize("case", ["missing tensor", "model type"])
def test_command_line_exits_with_2_and_one_line(tmp_path, source, case):
    damage, message = BAD[case]
    damage(source)
    command = [sys.executable, "-m", "convert", str(source), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert not list(tmp_path.glob("out*"))


def test_command_line_converts(tmp_path, source, drafter_source):
    command = [sys.executable, "-m", "convert", str(source), str(tmp_path / "out"), "--drafter", str(drafter_source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'out'}: {1 + 8 * 4 + 1} pieces")
    assert (tmp_path / "out/manifest.json").is_file()
