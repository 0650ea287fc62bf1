"""The CPU benchmarks at tiny sizes: what they record, not how fast anything is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ecospec_jax import UserError
from ecospec_jax.kernels import native
from experiments import bench_kernels, bench_model
from experiments.kernel_shapes import (
    QUICK_SHAPES,
    SHAPES,
    STORAGES,
    chained_calls,
    count_distinct,
    draw_ids,
    draw_ids_from_pools,
    expert_bytes,
    random_weights,
)
from experiments.read_ceiling import ReadCeiling

ROOT = Path(__file__).parents[2]
needs_routines = pytest.mark.skipif(native.unavailable() is not None, reason="no C++ compiler")


def run_quick(module: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """In a process of its own, since the command binds its process to one core."""
    command = [sys.executable, "-m", f"experiments.{module}", "--quick", "--repeats", "2", "--out", str(out), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@needs_routines
def test_kernel_records(tmp_path: Path) -> None:
    """Every line has positive figures, the peers that apply, and bytes that fit its distinct experts."""
    formats = ("--formats", "bfloat16", "mxfp4")
    records = run_quick("bench_kernels", tmp_path, "--shapes", "quick", "--rows", "3", *formats)
    lines = [record for record in records if record["part"] == "layer"]
    assert [(line["format"], line["rows_dtype"]) for line in lines] == [
        ("bfloat16", "bfloat16"),
        ("mxfp4", "bfloat16"),
        ("mxfp4", "float32"),
    ]
    for line in lines:
        for name in ("ms", "gb_per_s", "read_gb_per_s", "ratio", "ratio_plain", "ratio_prefetch"):
            assert line[name] > 0
        one = expert_bytes(random_weights(QUICK_SHAPES["quick"], line["format"], 1)).total
        assert line["bytes"] == pytest.approx(line["distinct"] * one)
        assert 2 <= line["distinct"] <= 6 and line["calls"] >= 2
        assert line["machine"] and line["versions"]
    with_torch = importlib.util.find_spec("torch") is not None
    for name in bench_kernels.PEERS:
        peer = lines[0]["peers"][name]
        if name.startswith("transformers") and not with_torch:
            assert "not installed" in peer["missing"]
        else:
            assert peer["ms"] > 0 and peer["ratio"] > 0
    assert set(lines[1]["peers"]) == {"xla"} and lines[2]["peers"] == {}
    assert all(record["equal"] for record in records if record["part"] == "traffic")
    (swept,) = (record for record in records if record["part"] == "distinct")
    assert len(swept["distinct"]) == len(swept["ms"]) and swept["r2"] <= 1 and min(swept["ms"]) > 0
    assert (tmp_path / "distinct.png").stat().st_size and "| quick | mxfp4 |" in (tmp_path / "table.md").read_text()


@needs_routines
def test_model_records(tmp_path: Path) -> None:
    """The verification's experts are those that were read; a missing peer says so."""
    options = ("--layers", "1", "--verifications", "2", "--new-tokens", "4")
    verification, *decoding = run_quick("bench_model", tmp_path, *options)
    assert verification["experts_counted"] == verification["experts_expected"]
    assert verification["ms"] > 0 and verification["ratio"] > 0 and 2 <= verification["u"] <= 8
    assert [record["name"] for record in decoding] == ["ours", *bench_model.PEERS]
    for record in decoding:
        assert "not installed" in record["missing"] if "missing" in record else record["tokens_per_second"] > 0
        assert record.get("same_first_tokens", 1) >= 1
    assert "| llama.cpp |" in (tmp_path / "table.md").read_text()


@needs_routines
@pytest.mark.parametrize("name", QUICK_SHAPES)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "mxfp4", "fp8"])
def test_traffic_equals_the_model(name: str, storage: str) -> None:
    """What the routines count is what the benchmark divides by, biases apart."""
    shape = QUICK_SHAPES[name]
    experts = random_weights(shape, storage, 2)
    ids_NTK = draw_ids(np.random.default_rng(0), shape, 3, 4)
    x_TD = jax.numpy.ones((4, shape.hidden))
    with native.count_traffic() as counted:
        chained_calls(shape, "cpu")(x_TD, ids_NTK, experts).block_until_ready()
    distinct, one = count_distinct(ids_NTK), expert_bytes(experts)
    assert (counted[0].experts, counted[0].weight_bytes) == (distinct, distinct * one.matrices)
    assert one.total * 2 * shape.experts == sum(leaf.nbytes for leaf in jax.tree.leaves(experts))
    assert shape.layer_bytes(storage) == one.total * shape.experts


@pytest.mark.parametrize("name", QUICK_SHAPES)
def test_chained_calls(name: str) -> None:
    """All calls run, each in its layer, each on the result of the one before."""
    shape = QUICK_SHAPES[name]
    experts = random_weights(shape, "float32", 2)
    ids_NTK = draw_ids(np.random.default_rng(0), shape, 3, 4)
    x_TD = jax.random.normal(jax.random.key(1), (4, shape.hidden))
    run = chained_calls(shape, "reference")
    expected = x_TD * 0
    for call in range(3):
        own = jax.tree.map(lambda part, call=call: part[call % 2 : call % 2 + 1], experts)
        expected = run(x_TD + expected / 8, ids_NTK[call : call + 1], own)
    np.testing.assert_allclose(run(x_TD, ids_NTK, experts), expected, rtol=1e-4, atol=1e-4)


def test_ids() -> None:
    """Fresh ones at every call; pools give exactly as many distinct experts as asked for."""
    shape, random = SHAPES["medium"], np.random.default_rng(0)
    ids_NTK = draw_ids(random, shape, 6, 16)
    assert all(len(set(row)) == shape.k for row in ids_NTK.reshape(-1, shape.k))
    assert len({ids.tobytes() for ids in ids_NTK}) == 6
    for pool in (1, 2, 17, 64):
        ids_NTK = draw_ids_from_pools(random, shape, 3, 16, pool)
        assert [len(np.unique(ids)) for ids in ids_NTK] == [pool] * 3 and ids_NTK.shape == (3, 16, 4)


@needs_routines
def test_read_ceiling_goes_round() -> None:
    """Reads that are longer than the buffer, and reads of odd sizes, take some time and end."""
    ceiling = ReadCeiling(1 << 16)
    for size in (1, 100, 1 << 16, (1 << 18) + 3):
        assert ceiling.seconds(size).best >= 0
    assert ceiling.seconds(1 << 24).plain > 0


def test_bad_options(tmp_path: Path) -> None:
    """One line each, before anything is measured or written."""
    for options, complaint in (
        ({"shapes": ("huge",)}, "unknown shape 'huge'; known: reference"),
        ({"rows": (0,)}, "--rows"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"core": 100000}, "--core 100000 cannot be used"),
    ):
        with pytest.raises(UserError, match=complaint):
            bench_kernels.run(bench_kernels.Settings(out=tmp_path / "out", **options))
    with pytest.raises(UserError, match="--layers"):
        bench_model.run(bench_model.Settings(layers=0, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_fit_their_formats(name: str) -> None:
    """Whole blocks of mxfp4; formats that exist."""
    shape = SHAPES[name]
    assert set(shape.storages) <= set(STORAGES)
    assert "mxfp4" not in shape.storages or shape.hidden % 32 == shape.ffn % 32 == 0
    assert all(shape.layer_bytes(storage) > 0 for storage in shape.storages)
