"""Experts whose hidden units do not divide among devices get zeros behind them, and compute what they did.

One process of two virtual devices restores the same checkpoints onto one device and onto both.
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder
from ecospec_jax.checkpoint import FORMAT, Manifest, parameters, piece_name, save_piece, write_manifest
from ecospec_jax.config import ModelConfig
from ecospec_jax.models import TARGETS
from ecospec_jax.presets import get_preset
from ecospec_jax.sharding import Layout, Placement
from tests import tiny
from tests.processes import start_python

CASES: dict[str, tuple[ModelConfig, int]] = {  # and the width on two devices
    "odd": (replace(tiny.TARGET, num_heads=4, moe_intermediate_size=11), 2 * 6),
    "more than a kernel's tile": (replace(tiny.TARGET, num_heads=4, moe_intermediate_size=140), 2 * 128),
    "three mxfp4 blocks": (
        replace(tiny.GPT_OSS, hidden_size=32, moe_intermediate_size=96, expert_storage="mxfp4"),
        2 * 64,
    ),
    "fp8 within a block": (
        replace(
            tiny.DEEPSEEK,
            storage="fp8",
            num_heads=2,
            qk_nope_head_dim=128,
            qk_rope_head_dim=128,
            v_head_dim=128,
            moe_intermediate_size=320,
        ),
        2 * 256,
    ),
}
PROMPT = [3, 17, 8, 22, 5, 11, 1]


def convert(folder: Path, config: ModelConfig) -> None:
    """What a conversion of random weights writes."""
    model, pieces = TARGETS[config.family](config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)), {}
    for path, variable in parameters(model).items():
        pieces.setdefault(piece_name("target", path), {})[path] = np.asarray(variable.get_value())
    records = {name: save_piece(folder / name, tensors) for name, tensors in pieces.items()}
    write_manifest(folder, Manifest(FORMAT, "random", None, "", config, None, (), records, {}, ""))


def compare(folder: Path) -> None:
    for name, (config, width) in CASES.items():
        convert(folder / name, config)
        alone = Decoder.load(folder / name, dtype="float32")
        apart = Decoder.load(folder / name, dtype="float32", placement=Placement.create("tp2"))
        assert apart.target.config == replace(config, moe_intermediate_size=width)
        padded = 0
        ours = parameters(apart.target)
        for path, variable in parameters(alone.target).items():
            stored, value = np.asarray(variable.get_value()), np.asarray(ours[path].get_value())
            rest = [(0, more - size) for size, more in zip(stored.shape, value.shape, strict=True)]
            padded += any(after for _, after in rest)
            np.testing.assert_array_equal(value.astype(np.float32), np.pad(stored, rest).astype(np.float32), path)
        assert padded >= 3 * len(config.moe_layers)  # gate, up and down, or more
        logits = apart.next_token_logits(PROMPT)
        np.testing.assert_allclose(logits, alone.next_token_logits(PROMPT), rtol=0, atol=1e-5 * np.abs(logits).max())
        print(name, flush=True)


def test_padded_experts_compute_what_they_did(tmp_path: Path) -> None:
    process = start_python("-m", "tests.test_padded_layouts", tmp_path, devices=2)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert out.splitlines() == list(CASES)


@pytest.mark.parametrize(
    ("preset", "name", "width"),
    [
        ("gpt-oss-120b", "ep8", 2880),
        ("gpt-oss-120b", "tp2ep4", 2 * 1472),  # 45 blocks each, made whole tiles of 64
        ("gpt-oss-120b", "tp4ep2", 4 * 768),
        ("gpt-oss-120b", "tp8", 8 * 384),
        ("qwen3-30b-a3b", "tp8", 8 * 128),
        ("qwen3-235b-a22b", "tp8", 1536),
        ("deepseek-v3.1", "tp8", 2048),
    ],
)
def test_widths_of_published_targets(preset: str, name: str, width: int) -> None:
    assert Layout.named(name).fitted(get_preset(preset)).moe_intermediate_size == width


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
