"""A converted model comes onto its devices shard by shard: no process holds much more than its own devices do.

Measured in two processes of four devices each, on a model so large that one full copy would show.
"""

import math
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.checkpoint import (
    FORMAT,
    Manifest,
    load_target,
    parameters,
    piece_name,
    read_manifest,
    save_piece,
    stored_parameters,
    write_manifest,
)
from ecospec_jax.config import Qwen3MoeConfig, RopeConfig
from ecospec_jax.distributed import Cluster
from ecospec_jax.errors import UserError
from ecospec_jax.sharding import Placement
from tests.processes import free_port, start_python

CONFIG = Qwen3MoeConfig(
    vocab_size=72,
    hidden_size=320,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=10,
    intermediate_size=48,
    moe_intermediate_size=256,
    num_experts=64,
    experts_per_token=3,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_positions=128,
)
BF16 = jnp.dtype(jnp.bfloat16)
PROCESSES = 2
PIECES_IN_MEMORY = 8  # of the largest, which is an eighteenth of the model: each device decodes its own chunks
LIBRARIES_BYTES = 50e6  # what the first restore of a process loads


def numbers() -> Iterator[tuple[str, np.ndarray]]:
    """The model's parameters, the same in every process."""
    rng = np.random.default_rng(0)
    for path, variable in stored_parameters(CONFIG, BF16)[1].items():
        value = variable.get_value()
        bits = rng.integers(0, 2**14, value.shape, dtype=np.uint16)
        yield path, bits.view(BF16).astype(value.dtype)  # all below 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a conversion writes of them."""
    folder, pieces = tmp_path_factory.mktemp("converted"), {}
    for path, value in numbers():
        pieces.setdefault(piece_name("target", path), {})[path] = value
    records = {name: save_piece(folder / name, tensors) for name, tensors in pieces.items()}
    write_manifest(folder, Manifest(FORMAT, "random", None, "", CONFIG, None, (), records, {}, ""))
    return folder


def damaged(folder: Path) -> tuple[Path, str]:
    """A copy whose second piece, the one that process 1 checks, is cut short; and that piece's name."""
    copy = Path(shutil.copytree(folder, folder.with_name("damaged"), copy_function=os.link))
    piece = list(dict.fromkeys(piece_name("target", path) for path, _ in numbers()))[1]
    largest = max((copy / piece).rglob("*"), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.unlink()  # what it is linked to stays
    largest.write_bytes(content[:-100])
    return copy, piece


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure memory")
def test_a_process_holds_its_shards_and_a_few_pieces(folder: Path) -> None:
    pieces = read_manifest(folder).pieces.values()
    sizes = [sum(jnp.dtype(t.dtype).itemsize * math.prod(t.shape) for t in piece.tensors.values()) for piece in pieces]
    arguments = [folder, *damaged(folder), f"127.0.0.1:{free_port()}"]
    running = [
        start_python("-m", "tests.test_sharded_restore", *arguments, index, devices=8 // PROCESSES)
        for index in range(PROCESSES)
    ]
    for process in running:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        peak, held = map(int, out.splitlines()[-1].split())
        assert sum(sizes) / PROCESSES < held < 1.1 * sum(sizes) / PROCESSES
        assert held < peak < held + PIECES_IN_MEMORY * max(sizes) + LIBRARIES_BYTES
        assert PIECES_IN_MEMORY * max(sizes) + LIBRARIES_BYTES < sum(sizes)  # so that one copy of all would show


def anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))


def restore_and_measure(folder: Path, damaged: Path, piece: str, coordinator: str, process: int) -> None:
    """Prints the most memory that restoring took and what the shards are; then another layout, and what is refused."""
    Cluster(coordinator, PROCESSES, process).join()
    manifest = read_manifest(folder)
    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 8 // PROCESSES
    before, done = anonymous_bytes(), threading.Event()
    samples = [before]

    def sample() -> None:
        while not done.wait(0.002):
            samples.append(anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    target = load_target(folder, manifest, BF16, Placement.create("ep8"))
    done.set()
    thread.join()
    values = [variable.get_value() for variable in parameters(target).values()]
    print(max(samples) - before, sum(shard.data.nbytes for value in values for shard in value.addressable_shards))
    elsewhere = parameters(load_target(folder, manifest, BF16, Placement.create("tp2ep4")))
    for path, expected in numbers():
        for found in (parameters(target)[path], elsewhere[path]):
            for shard in found.get_value().addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], err_msg=path)
    with pytest.raises(UserError, match=f"{damaged}/{piece}/.*: the file was changed or damaged"):
        load_target(damaged, manifest, BF16, Placement.create("ep8"))
    with pytest.raises(UserError, match="takes 4 of 8 devices, all of 1 of the 2 processes"):
        Placement.create("ep4")
    jax.distributed.shutdown()


if __name__ == "__main__":
    restore_and_measure(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
