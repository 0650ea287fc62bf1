"""Conversion streams: its memory follows the largest piece, not the checkpoint."""

import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hf_models import TARGET, edit_json, write_target

ROOT = Path(__file__).parents[2]
LAYERS, LAYER_BYTES_MAX, TOTAL_BYTES_MIN, PEAK_MAX = 24, 150e6, 3e9, 1e9
SHAPE = {"hidden_size": 768, "moe_intermediate_size": 448, "num_experts": 64, "num_hidden_layers": LAYERS}
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


def write_sparse_target(folder: Path) -> None:
    """A checkpoint of zeros: header of a two-layer model's names, widened to `LAYERS` layers; data are a hole."""
    write_target(folder, **(TARGET | {"num_hidden_layers": 1}))
    edit_json(
        folder / "config.json",
        num_local_experts=SHAPE["num_experts"],
        **{k: v for k, v in SHAPE.items() if k != "num_experts"},
    )
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
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    assert end >= TOTAL_BYTES_MIN
    assert end / LAYERS <= LAYER_BYTES_MAX


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure memory")
def test_peak_memory_is_bounded(tmp_path):
    if shutil.disk_usage(tmp_path).free < 5e9:
        pytest.skip("needs 5 GB of disk")
    write_sparse_target(tmp_path / "source")
    command = [sys.executable, "-c", CONVERT_AND_MEASURE, str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "out")
    peak = int(done.stdout)
    assert peak > LAYER_BYTES_MAX / 2  # the measurement works: at least most of a layer is in memory
    assert peak < PEAK_MAX
