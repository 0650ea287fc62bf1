"""Conversion streams: its memory follows the largest tensor of experts, not the layer or the checkpoint."""

import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hf_deepseek_v3 import CONFIG, blocks, layer_matrices
from tests.hf_gpt_oss import write_plain
from tests.hf_models import edit_json, write_target

ROOT = Path(__file__).parents[2]
LAYERS, TOTAL_BYTES_MIN = 6, 1.3e9
SHAPE = {"hidden_size": 768, "moe_intermediate_size": 448, "num_experts": 128, "num_hidden_layers": LAYERS}
PROCESS_BYTES = 350e6  # of a process that has converted a tiny model
TENSORS_IN_MEMORY = 4  # the largest one, and what Orbax makes of it: two to three are measured
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
CONVERT_AND_MEASURE = """
import sys, threading, time
from pathlib import Path
from convert import convert

peak, done = 0, threading.Event()
def sample():
    global peak
    while not done.is_set():
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = max(peak, sum(int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem")))
        time.sleep(0.002)
thread = threading.Thread(target=sample)
thread.start()
convert(Path(sys.argv[1]), Path(sys.argv[2]))
done.set()
thread.join()
print(peak)
"""


def write_qwen3_moe(folder: Path) -> float:
    """An expert a tensor; returns the bytes of all experts' largest matrix."""
    write_target(folder, num_hidden_layers=1)
    sizes = {key: value for key, value in SHAPE.items() if key != "num_experts"}
    edit_json(folder / "config.json", num_local_experts=SHAPE["num_experts"], **sizes)
    hidden, inner, experts = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"], SHAPE["num_experts"]
    shapes = {"model.embed_tokens.weight": (67, hidden), "lm_head.weight": (67, hidden), "model.norm.weight": (hidden,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{x}_norm.weight": (10,) for x in "qk"}
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (rows, hidden) for x, rows in (("q", 60), ("k", 20), ("v", 20))}
        shapes |= {f"{layer}self_attn.o_proj.weight": (hidden, 60), f"{layer}mlp.gate.weight": (experts, hidden)}
        for e in range(experts):
            shapes |= {f"{layer}mlp.experts.{e}.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
            shapes[f"{layer}mlp.experts.{e}.down_proj.weight"] = (hidden, inner)
    write_zeros(folder, {name: ("BF16", shape) for name, shape in shapes.items()})
    return 2 * experts * inner * hidden


def write_gpt_oss(folder: Path) -> float:
    """All experts of a layer in one tensor, which has to be transposed; returns the bytes of the largest."""
    write_plain(folder, num_hidden_layers=1)
    hidden, inner, experts = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"], SHAPE["num_experts"]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_local_experts": experts}
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    edit_json(folder / "config.json", num_hidden_layers=LAYERS, layer_types=kinds, **sizes)
    shapes = {"model.embed_tokens.weight": (71, hidden), "lm_head.weight": (71, hidden), "model.norm.weight": (hidden,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for x, rows, columns in (("q", 60, hidden), ("k", 20, hidden), ("v", 20, hidden), ("o", hidden, 60)):
            shapes |= {f"{layer}self_attn.{x}_proj.weight": (rows, columns), f"{layer}self_attn.{x}_proj.bias": (rows,)}
        shapes |= {f"{layer}self_attn.sinks": (6,), f"{layer}mlp.router.weight": (experts, hidden)}
        shapes[f"{layer}mlp.router.bias"] = (experts,)
        for kind, inputs, outputs in (("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
            shapes[f"{layer}mlp.experts.{kind}_proj"] = (experts, inputs, outputs)
            shapes[f"{layer}mlp.experts.{kind}_proj_bias"] = (experts, outputs)
    write_zeros(folder, {name: ("BF16", shape) for name, shape in shapes.items()})
    return 2 * experts * 2 * inner * hidden


def write_deepseek_v3(folder: Path) -> float:
    """FP8, an expert and its factors a tensor each; returns the bytes of all experts' largest matrix."""
    hidden, inner, experts, layers = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"], 256, 6
    config = CONFIG | SHAPE | {"num_hidden_layers": layers, "n_routed_experts": experts, "n_group": 4}
    del config["num_experts"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes: Shapes = {f"{name}.weight": ("BF16", (71, hidden)) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = ("BF16", (hidden,))
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, shape in layer_matrices(config, i).items():
            shapes[f"{layer}{name}.weight"] = ("F8_E4M3", shape)
            shapes[f"{layer}{name}.weight_scale_inv"] = ("F32", blocks(shape))
        sizes = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        sizes |= {"self_attn.q_a_layernorm": config["q_lora_rank"], "self_attn.kv_a_layernorm": config["kv_lora_rank"]}
        shapes |= {f"{layer}{name}.weight": ("BF16", (size,)) for name, size in sizes.items()}
        if i >= config["first_k_dense_replace"]:
            shapes[f"{layer}mlp.gate.weight"] = ("BF16", (experts, hidden))
            shapes[f"{layer}mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
    write_zeros(folder, shapes)
    return experts * inner * hidden


def write_zeros(folder: Path, shapes: Shapes) -> None:
    """A file of tensors whose data are a hole; wider numbers come first, so that all are aligned."""
    header, end, widths = {}, 0, {"F32": 4, "BF16": 2, "F8_E4M3": 1}
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -widths[item[1][0]]):
        begin, end = end, end + widths[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    assert end >= TOTAL_BYTES_MIN


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure memory")
@pytest.mark.parametrize("write", [write_qwen3_moe, write_gpt_oss, write_deepseek_v3])
def test_peak_memory_is_bounded(tmp_path, write):
    if shutil.disk_usage(tmp_path).free < 3e9:
        pytest.skip("needs 3 GB of disk")
    largest = write(tmp_path / "source")
    command = [sys.executable, "-c", CONVERT_AND_MEASURE, str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "out")
    peak = int(done.stdout)
    assert peak > PROCESS_BYTES / 2 + largest  # the measurement works
    assert peak < PROCESS_BYTES + TENSORS_IN_MEMORY * largest < TOTAL_BYTES_MIN
