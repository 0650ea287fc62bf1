"""What is read from a compiled program, and bad input; compilation itself is tested in tests/aot."""

import subprocess
import sys
from pathlib import Path

import pytest

from ecospec_jax.presets import get_preset
from experiments.mesh_layouts import collectives

ROOT = Path(__file__).parents[2]

HLO = """
  %all-reduce.5 = bf16[5,2880]{1,0} all-reduce(%fusion), channel_id=1, replica_groups={{0,1}}
  %all-reduce-start.1 = f32[5,16]{1,0} all-reduce-start(%fusion.2), channel_id=2
  %all-reduce-done.1 = f32[5,16]{1,0} all-reduce-done(%all-reduce-start.1)
  %all-gather-start = ((f32[2]{0}, s32[2]{0}), (f32[16]{0}, s32[16]{0})) all-gather-start(%a, %b), channel_id=8
  %all-gather-done = (f32[16]{0}, s32[16]{0}) all-gather-done(%all-gather-start)
  %fusion = bf16[5,2880]{1,0} fusion(%all-reduce.5), kind=kLoop, calls=%all-reduce_computation
  %collective-permute.1 = pred[3]{0} collective-permute(%p), source_target_pairs={{0,1}}
"""


def test_collectives_are_counted_once_with_the_bytes_of_their_results() -> None:
    found, moved = collectives(HLO)
    assert found == {"all-reduce": 2, "all-gather": 1, "collective-permute": 1}
    assert moved == 5 * 2880 * 2 + 5 * 16 * 4 + 16 * 4 + 16 * 4 + 3


def test_the_first_layers_of_a_target() -> None:
    assert get_preset("gpt-oss-120b", 5).sliding_layers == (0, 2, 4)
    assert get_preset("qwen3-235b-a22b").num_layers == 94


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--targets", "gpt-5"], "unknown config 'gpt-5'; known: qwen3-30b-a3b"),
        (["--rows", "0"], "--rows needs positive numbers"),
        (["--device", "abacus"], "unknown device 'abacus'; known: h200, a100"),
    ],
)
def test_bad_input(tmp_path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "experiments.mesh_layouts", "--out", str(tmp_path / "out"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "out").exists()
