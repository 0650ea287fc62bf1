"""The sections of `experiments.gpu_check`: each a function that yields records. On a CPU they only test themselves."""

import csv
import ctypes
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ecospec_jax import SamplingConfig, SpecConfig
from ecospec_jax.config import Qwen3MoeConfig
from ecospec_jax.decoding import StepPlan, Weights, prefill
from ecospec_jax.kernels import grouped_experts
from ecospec_jax.kernels.grouped_experts.backends import BACKENDS
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.presets import get_preset
from ecospec_jax.selection import likelihood
from ecospec_jax.stepping import fixed_step
from ecospec_jax.verification import sequence_keys
from experiments.environment import environment
from experiments.kernel_peers import package_versions
from experiments.kernel_shapes import (
    QUICK_SHAPES,
    SHAPES,
    STORAGES,
    Shape,
    chained_calls,
    count_distinct,
    draw_ids,
    expert_bytes,
    random_weights,
)

Record = dict[str, Any]
BOUND = 2e-2  # of the largest expected magnitude; bfloat16 rows, activations and results
# Of widths that are whole blocks of fp8 scales, and that are not.
WIDTHS = {"even": (512, 256), "edge": (320, 192)}
# Rows, widths, gpt-oss' layout, rows' dtype.
CASES = (
    (1, "even", False, "bfloat16"),
    (16, "edge", False, "bfloat16"),
    (5, "even", False, "float32"),
    (5, "edge", True, "bfloat16"),
    (16, "even", True, "bfloat16"),
)
SPEED = (
    ("qwen3-30b", "bfloat16"),
    ("qwen3-235b-tp8", "bfloat16"),
    ("gpt-oss-120b-tp8", "mxfp4"),
    ("deepseek-v3.1-tp8", "fp8"),
)
QUICK_SPEED = (("quick", "bfloat16"), ("quick-gpt-oss", "mxfp4"))
NCU_METRIC = "dram__bytes_read.sum"
PROFILE_COMMAND = "_profiled_call"  # of experiments.gpu_check


class Skipped(Exception):
    """A section that cannot run here, and why."""


@dataclass(frozen=True)
class Sizes:
    """How much to measure.

    Attributes:
        shapes, speed: layers by name; (shape, format) pairs.
        rows: of a call.
        calls: chained calls of a timing.
        weight_bytes: layers are stacked until they have so many.
        copy_bytes: of the array that is copied.
        repeats: timings of which the median is taken.
    """

    shapes: dict[str, Shape]
    speed: tuple[tuple[str, str], ...]
    rows: tuple[int, ...]
    calls: int
    weight_bytes: int
    copy_bytes: int
    repeats: int


FULL = Sizes(SHAPES, SPEED, (1, 5, 16), 256, 1 << 30, 1 << 30, 7)
SMOKE = Sizes(QUICK_SHAPES, QUICK_SPEED, (1, 5), 4, 1 << 16, 1 << 20, 2)


def sizes(platform: str) -> Sizes:
    return SMOKE if platform == "cpu" else FULL


def sections(platform: str) -> dict[str, Callable[[], Iterator[Record]]]:
    """All sections of a platform, in their order."""
    own = [name for name, backend in BACKENDS.items() if platform in backend.platforms and name != "reference"]
    own.sort(key=lambda name: name == "xla")  # plain XLA last
    return {
        "device": device,
        **{f"numerics {name}": partial(numerics, platform, name) for name in own},
        **{f"speed {name}": partial(speed, platform, name) for name in own if name != "xla"},
        "dram": partial(dram, platform),
        "launches": launches,
        "tokamax": partial(tokamax, platform),
    }


def attempt(facts: Record, measure: Callable[[], Record]) -> Record:
    """The facts with what was measured, or with the first line of the error that prevented it."""
    try:
        return facts | measure()
    except Exception as error:  # a kernel can fail in any way, and the others are still to be tried
        return facts | {"error": first_line(error)}


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def device() -> Iterator[Record]:
    versions = package_versions("jax-cuda12-plugin", "jax-cuda12-pjrt", "tokamax")
    one = jax.devices()[0]
    capability = getattr(one, "compute_capability", None)
    memory = (one.memory_stats() or {}).get("bytes_limit")
    yield {"kind": one.device_kind, "capability": capability, "memory": memory, "gpu_versions": versions}
    yield dict(environment())


def numerics(platform: str, backend: str) -> Iterator[Record]:
    """A backend in every format it knows against the float32 reference on the same device."""
    for storage in STORAGES if platform == "cpu" else BACKENDS[backend].storages:
        for rows, widths, gpt_oss, dtype in CASES[1::2] if platform == "cpu" else CASES:
            facts = {"backend": backend, "format": storage, "rows": rows, "rows_dtype": dtype, "widths": widths}
            facts |= {"layout": "gpt-oss" if gpt_oss else "split"}
            yield attempt(facts, partial(_error, backend, storage, rows, widths, gpt_oss, dtype))


def _error(backend: str, storage: str, rows: int, widths: str, gpt_oss: bool, dtype: str) -> Record:
    shape = Shape(widths, *WIDTHS[widths], experts=16, k=4, gpt_oss=gpt_oss)
    experts = replace(random_weights(shape, storage, 2), layer=jnp.int32(1))
    random = np.random.default_rng(rows)
    x_TD = jnp.asarray(random.standard_normal((rows, shape.hidden)), dtype)
    ids_TK = draw_ids(random, shape, 1, rows)[0]
    if rows > 1:
        ids_TK[0] = shape.experts  # a dead row
        ids_TK[1, :2] = ids_TK[1, 2], -1
    weights_TK = jnp.asarray(random.uniform(0.1, 0.4, ids_TK.shape), jnp.float32)

    def run(x_TD: jax.Array, backend: str) -> np.ndarray:
        call = jax.jit(partial(grouped_experts, activation=shape.activation, backend=backend))
        return np.asarray(call(x_TD, jnp.asarray(ids_TK), weights_TK, experts), np.float32)

    with jax.default_matmul_precision("highest"):
        expected = run(x_TD.astype(jnp.float32), "reference")
    actual = run(x_TD, backend)
    error = float(np.abs(actual - expected).max() / np.abs(expected).max())
    dead_is_zero = rows == 1 or not actual[0].any()
    return {"difference": error, "ok": bool(error <= BOUND and dead_is_zero), "dead_row_is_zero": dead_is_zero}


def speed(platform: str, backend: str) -> Iterator[Record]:
    """Times of a backend, and of copying and reading memory on the same device in the same run."""
    size = sizes(platform)
    ceiling = _ceiling(size)
    yield {"ceiling": ceiling}
    for name, storage in size.speed:
        shape = size.shapes[name]
        layers = -(-size.weight_bytes // shape.layer_bytes(storage))
        experts = jax.block_until_ready(random_weights(shape, storage, layers))
        run = chained_calls(shape, backend)
        for rows in size.rows:

            def measure(shape: Shape = shape, rows: int = rows, run: Any = run, experts: Any = experts) -> Record:
                one, random = expert_bytes(experts).total, np.random.default_rng(0)
                x_TD = jnp.asarray(random.standard_normal((rows, shape.hidden)), jnp.bfloat16)
                dead = jnp.full((size.calls, rows, shape.k), shape.experts, jnp.int32)
                run(x_TD, dead, experts).block_until_ready()
                samples = []
                for _ in range(size.repeats):
                    ids_NTK = draw_ids(random, shape, size.calls, rows)
                    read = count_distinct(ids_NTK) * one / size.calls
                    ids = jax.block_until_ready(jnp.asarray(ids_NTK))
                    seconds = seconds_of(lambda ids=ids: run(x_TD, ids, experts)) / size.calls
                    empty = seconds_of(lambda: run(x_TD, dead, experts)) / size.calls
                    samples.append((1e6 * seconds, 1e6 * empty, read, read / seconds / 1e9))
                us, us_empty, read, rate = (median(values) for values in zip(*samples, strict=True))
                ratio = {"of_copy": rate / ceiling["copy_gb_per_s"], "of_read": rate / ceiling["read_gb_per_s"]}
                return {"us": us, "us_without_experts": us_empty, "bytes": read, "gb_per_s": rate, **ratio}

            facts = {"backend": backend, "shape": name, "format": storage, "rows": rows, "layers": layers}
            yield attempt(facts, measure)


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def _ceiling(size: Sizes) -> dict[str, float]:
    """Bytes per second of a copy (read and written ones) and of a sum (read ones)."""
    array, turns = jnp.arange(size.copy_bytes // 4, dtype=jnp.uint32), 10
    copy = jax.jit(jnp.copy)

    @jax.jit
    def read(array: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, total: total + jnp.sum(array ^ total), jnp.uint32(0))

    copies = lambda: [copy(array) for _ in range(turns)][-1]  # noqa: E731
    jax.block_until_ready((copies(), read(array)))
    times = [(seconds_of(copies), seconds_of(lambda: read(array))) for _ in range(size.repeats)]
    copied, summed = (median(values) / turns for values in zip(*times, strict=True))
    return {"copy_gb_per_s": 2 * array.nbytes / copied / 1e9, "read_gb_per_s": array.nbytes / summed / 1e9}


def dram(platform: str) -> Iterator[Record]:
    """Bytes that a call reads from DRAM, as NVIDIA's profiler counts them, against the model."""
    if platform == "cpu":
        raise Skipped("not a GPU")
    if (profiler := shutil.which("ncu")) is None:
        raise Skipped("ncu is not on PATH")
    for name, storage in SPEED[0], *SPEED[2:]:
        case = f"{name}:{storage}:5"
        yield attempt({"shape": name, "format": storage, "rows": 5}, partial(_profiled, profiler, case))


def _profiled(profiler: str, case: str) -> Record:
    options = ["--profile-from-start", "off", "--metrics", NCU_METRIC, "--csv", "--print-units", "base"]
    command = [profiler, *options, sys.executable, "-m", "experiments.gpu_check", PROFILE_COMMAND, case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = done.stdout.splitlines()
    model = next((json.loads(line) for line in lines if line.startswith("{")), None)
    found = [row for row in csv.DictReader(line for line in lines if line.startswith('"'))]
    values = [float(row["Metric Value"].replace(",", "")) for row in found if row.get("Metric Name") == NCU_METRIC]
    if model is None or not values:
        complaints = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line or "ERR" in line]
        raise RuntimeError(complaints[0] if complaints else f"ncu counted nothing (exit code {done.returncode})")
    return {"read": sum(values), "kernels": len(values), **model, "ratio": sum(values) / model["bytes"]}


def profiled_call(case: str) -> None:
    """One call of the default backend with the profiler on; prints the bytes that it should read."""
    name, storage, rows = case.split(":")
    shape, random = SHAPES[name], np.random.default_rng(0)
    experts = random_weights(shape, storage, 1)
    ids_TK = draw_ids(random, shape, 1, int(rows))
    x_TD = jnp.asarray(random.standard_normal((int(rows), shape.hidden)), jnp.bfloat16)
    run, ids = chained_calls(shape, None), jnp.asarray(ids_TK)
    run(x_TD, ids, experts).block_until_ready()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuProfilerStart()
    run(x_TD, ids, experts).block_until_ready()
    driver.cuProfilerStop()
    print(json.dumps({"bytes": count_distinct(ids_TK) * expert_bytes(experts).total}), flush=True)


def launches() -> Iterator[Record]:
    """Operations in the compiled program that launch something: of an expert layer, and of a small model's step."""
    shape = Shape("launches", 256, 128, 16, 4)
    ids_TK, weights_TK = jnp.zeros((5, 4), jnp.int32), jnp.ones((5, 4))
    experts = replace(random_weights(shape, "bfloat16", 1), layer=jnp.int32(0))
    x_TD = jnp.ones((5, shape.hidden), jnp.bfloat16)
    layer = jax.jit(grouped_experts).lower(x_TD, ids_TK, weights_TK, experts).compile()
    yield {"what": "an expert layer, 5 rows", "launches": count_launches(layer)}

    config = get_preset("qwen3-30b-a3b")
    assert isinstance(config, Qwen3MoeConfig)
    small = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "experts_per_token": 4}
    found = {}
    for layers in (1, 2):
        one = replace(config, **small, num_heads=4, num_kv_heads=2, vocab_size=512, num_layers=layers)
        target_def, target_state = nnx.split(Qwen3Moe(one, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0)))
        spec = SpecConfig(depth=1, branch=1, budget=0)
        plan = StepPlan(target_def, None, likelihood, spec, SamplingConfig(), ())
        weights, one_B = Weights(target_state, None), jnp.ones(1, jnp.int32)
        prompt_BT, keys_B = jnp.zeros((1, 16), jnp.int32), sequence_keys(0 * one_B, 0 * one_B)
        start = jax.jit(partial(prefill, plan), static_argnames=("capacity",))
        state = jax.eval_shape(partial(start, capacity=64), weights, prompt_BT, 16 * one_B, 32 * one_B, keys_B)
        compiled = jax.jit(partial(fixed_step, plan), donate_argnums=1).lower(weights, state).compile()
        found[layers] = count_launches(compiled)
    yield {"what": "a step of plain decoding, one layer", "launches": found[1]}
    yield {"what": "each further layer", "launches": found[2] - found[1]}


_QUIET = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?[\])}] ?([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def count_launches(compiled: jax.stages.Compiled) -> int:
    """Operations that run on their own; as often as a loop is known to turn, and every branch of a conditional."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in str(compiled.as_text()).splitlines():
        if match := _COMPUTATION.match(line):
            lines = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        else:
            lines.append(line)

    def count(name: str) -> int:
        total = 0
        for line in computations.get(name, ()):
            match = _OPERATION.match(line)
            if match is None or match[1] in _QUIET or match[1].endswith("-done"):
                continue
            turns = _TURNS.search(line)
            if match[1] == "while" and turns is not None:  # the condition is not asked then
                total += int(turns[1]) * sum(map(count, _BODY.findall(line)))
            elif match[1] in ("while", "conditional", "call"):
                called = _CALLED.findall(line)
                for branches in _BRANCHES.findall(line):
                    called += re.findall(r"%?([\w.\-]+)", branches)
                total += sum(map(count, called))
            else:
                total += 1
        return total

    return count(entry)


def tokamax(platform: str) -> Iterator[Record]:
    """`tokamax.ragged_dot`, the public baseline, beside the default backend."""
    if importlib.util.find_spec("tokamax") is None:
        raise Skipped("tokamax is not installed")
    library, size = importlib.import_module("tokamax"), sizes(platform)
    name, storage = size.speed[0]
    shape, turns = size.shapes[name], 20
    experts = random_weights(shape, storage, 1)
    assert isinstance(experts.gate_up, tuple)
    matrices = (*experts.gate_up, experts.down)
    gate, up, down = (matrix.weight[0].swapaxes(1, 2) for matrix in matrices)  # pyright: ignore
    ours = chained_calls(shape, None)

    @jax.jit
    def theirs(x_TD: jax.Array, ids_NTK: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def call(i: jax.Array, y_TD: jax.Array) -> jax.Array:
            ids_P = ids_NTK[i].reshape(-1)
            order_P = jnp.argsort(ids_P)
            row_P = order_P // shape.k
            sizes_E = jnp.bincount(ids_P, length=shape.experts).astype(jnp.int32)
            x_PD = (x_TD + y_TD / 8)[row_P]
            dot = lambda rows, weight: library.ragged_dot(rows, weight, sizes_E)  # noqa: E731
            y_PD = dot(jax.nn.silu(dot(x_PD, gate)) * dot(x_PD, up), down)
            return jnp.zeros_like(x_TD).at[row_P].add((y_PD / shape.k).astype(x_TD.dtype))

        return lax.fori_loop(0, len(ids_NTK), call, jnp.zeros_like(x_TD))

    for rows in size.rows:

        def measure(rows: int = rows) -> Record:
            random, times = np.random.default_rng(0), []
            x_TD = jnp.asarray(random.standard_normal((rows, shape.hidden)), jnp.bfloat16)
            for _ in range(size.repeats + 1):
                ids = jnp.asarray(draw_ids(random, shape, turns, rows))
                mine = seconds_of(lambda ids=ids: ours(x_TD, ids, experts))
                times.append(
                    (1e6 * mine / turns, 1e6 * seconds_of(lambda ids=ids: theirs(x_TD, ids, gate, up, down)) / turns)
                )
            us, their_us = (median(values) for values in zip(*times[1:], strict=True))  # the first compiles
            return {"us": us, "tokamax_us": their_us, "ours_times_as_fast": their_us / us}

        yield attempt({"shape": name, "format": storage, "rows": rows}, measure)
