"""Compile whole decoding steps of full-size targets for devices that are absent, from shapes alone, layout by layout.

    python -m experiments.mesh_layouts --targets gpt-oss-120b --layouts ep8 --out results/mesh_layouts

The step drafts with an EAGLE-3 head of the published proportions, selects by likelihood, verifies and commits. It needs
the `aot` extra (`make test-aot` installs it into `.venv-aot`). Finished cases in `--out` are kept.
"""

import json
import math
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from rich.console import Console

from ecospec_jax import SamplingConfig, SpecConfig, UserError
from ecospec_jax.ahead_of_time import target as described
from ecospec_jax.cache import KVCache
from ecospec_jax.checkpoint import borrow, borrowed_parameters, parameters
from ecospec_jax.config import DrafterConfig, ModelConfig
from ecospec_jax.decoding import DecodeState, StepPlan, Weights, prefill
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.models import abstract
from ecospec_jax.presets import drafter_for, get_preset
from ecospec_jax.program import state_shardings
from ecospec_jax.selection import likelihood
from ecospec_jax.sharding import Placement, spread
from ecospec_jax.stepping import fixed_step
from experiments.environment import environment
from experiments.tables import markdown_table, write_text

DTYPE = jnp.dtype(jnp.bfloat16)
PROMPT = 32  # rows of the prefill that gives the state its shapes
_COLLECTIVE = re.compile(
    r" = (?P<type>\(.*?\)|\S+) (?P<name>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-done)?\("
)
_ARRAY = re.compile(r"([a-z]+\d+\w*|pred)\[([\d,]*)\]")


@dataclass(frozen=True)
class Settings:
    """Compile whole decoding steps of full-size targets for absent devices."""

    targets: tuple[str, ...] = ("gpt-oss-120b",)
    """Published shapes."""
    layouts: tuple[str, ...] = ("ep8",)
    """Mesh layouts; a layout that cannot serve a target is reported with the reason."""
    device: str = "h200"
    """h200, a100, or a TPU topology such as v5e:2x4."""
    rows: tuple[int, ...] = (5,)
    """Rows of one verification: the root and the nodes beside it."""
    capacity: int = 4096
    """Slots of the cache."""
    layers: int | None = None
    """Only so many decoder layers of the target."""
    out: Path = Path("results/mesh_layouts")
    """Folder for mesh_layouts.jsonl and mesh_layouts.md."""


@dataclass(frozen=True)
class Case:
    """What is compiled."""

    target: str
    layout: str
    device: str
    rows: int
    capacity: int
    layers: int


@dataclass(frozen=True)
class Compiled:
    """What one device holds and does in a step; bytes.

    Attributes:
        weights, cache, temporaries: on one device.
        drafter: on one device, without what it borrows from the target.
        checkpoint: the target's weights as they are stored, on all devices together.
        collectives: how many of each kind a step has.
        collective_bytes: of their results, on one device.
        seconds: that lowering and compiling took.
    """

    weights: int
    drafter: int
    cache: int
    temporaries: int
    checkpoint: int
    collectives: dict[str, int]
    collective_bytes: int
    seconds: float


def placed(config: ModelConfig | DrafterConfig, placement: Placement) -> Any:
    """A module without values: its shapes know where they belong."""
    module = abstract(config, DTYPE)
    spread(module, placement)
    for variable in parameters(module).values():
        shape = variable.get_value()
        sharding = placement.sharding(variable.get_metadata()["logical_axes"], shape.shape)
        variable.set_value(shape.update(sharding=sharding))
    return module


def abstract_state(plan: StepPlan, weights: Weights, placement: Placement, capacity: int) -> DecodeState:
    """Shapes of the state behind a prefill of one sequence, that know where they belong."""
    shape = jax.ShapeDtypeStruct
    tokens, count = shape((1, PROMPT), jnp.int32), shape((1,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(partial(prefill, plan, capacity=capacity), weights, tokens, count, count, keys)

    def stored(cache: KVCache | None) -> KVCache | None:
        # On the CPU that this runs on, caches would be wider (`cache.storage_dtype`).
        return jax.tree.map(lambda part: part.update(dtype=DTYPE) if part.ndim else part, cache)

    state = replace(state, target_cache=stored(state.target_cache), draft_cache=stored(state.draft_cache))
    return jax.tree.map(lambda part, at: part.update(sharding=at), state, state_shardings(placement, state))


def device_bytes(tree: Any) -> int:
    """Bytes of shapes on one device."""
    return sum(part.dtype.itemsize * math.prod(part.sharding.shard_shape(part.shape)) for part in jax.tree.leaves(tree))


def collective_results(hlo: str) -> list[tuple[str, list[tuple[str, int]]]]:
    """The collectives of a program by kind, each with the dtypes and sizes of its results on one device."""
    return [
        (
            match["name"],
            [
                (dtype, math.prod(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in _ARRAY.findall(match["type"])
            ],
        )
        for match in _COLLECTIVE.finditer(hlo)
    ]


def collectives(hlo: str) -> tuple[Counter[str], int]:
    """How many collectives a program has, by kind, and the bytes of their results on one device."""
    found = collective_results(hlo)
    moved = sum(_itemsize(dtype) * size for _, results in found for dtype, size in results)
    return Counter(name for name, _ in found), moved


def _itemsize(hlo_dtype: str) -> int:
    bits = re.search(r"\d+", hlo_dtype)
    return 1 if bits is None else -(-int(bits[0]) // 8)


def compile_case(case: Case) -> Compiled:
    """Lowers and compiles the step; a layout that cannot serve the target is a `UserError`."""
    config = get_preset(case.target, case.layers)
    devices = described(case.device)
    placement = Placement.create(case.layout, list(devices.devices)).for_model(config)
    drafter = drafter_for(config)
    lender, head = placed(config, placement), placed(drafter, placement.replicated)
    borrow(head, drafter, lender)
    (target_graph, target_state), (drafter_graph, drafter_state) = nnx.split(lender), nnx.split(head)
    spec = SpecConfig(budget=case.rows - 1)
    plan = StepPlan(target_graph, drafter_graph, likelihood, spec, SamplingConfig(), eos_ids=(0,), placement=placement)
    weights = Weights(target_state, drafter_state)
    state = abstract_state(plan, weights, placement, case.capacity)
    started = time.perf_counter()
    shardings = jax.tree.map(lambda part: part.sharding, state)
    compiled = devices.compile(partial(fixed_step, plan), weights, state, donate_argnums=1, out_shardings=shardings)
    seconds = time.perf_counter() - started
    memory, own = compiled.memory_analysis(), parameters(head)
    assert memory is not None
    found, moved = collectives(compiled.as_text() or "")
    return Compiled(
        weights=device_bytes(target_state),
        drafter=device_bytes([own[path].get_value() for path in own.keys() - borrowed_parameters(drafter)]),
        cache=device_bytes((state.target_cache, state.draft_cache)),
        temporaries=memory.temp_size_in_bytes,
        checkpoint=sum(part.dtype.itemsize * part.size for part in jax.tree.leaves(target_state)),
        collectives=dict(found),
        collective_bytes=moved,
        seconds=seconds,
    )


HEADER = (
    "target",
    "layout",
    "device",
    "rows",
    "weights GB",
    "of checkpoint GB",
    "drafter GB",
    "cache GB",
    "temporaries",
    "collectives",
    "MB moved",
)


def table_line(case: Case, done: Compiled | str) -> list[str]:
    name = [case.target, case.layout, case.device, str(case.rows)]
    if isinstance(done, str):
        return [*name, *[""] * (len(HEADER) - 5), done]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.collectives.items()))
    return [
        *name,
        f"{done.weights / 1e9:.2f}",
        f"{done.checkpoint / 1e9:.1f}",
        f"{done.drafter / 1e9:.2f}",
        f"{done.cache / 1e9:.2f}",
        f"{done.temporaries / 1e6:.0f} MB",
        kinds,
        f"{done.collective_bytes / 1e6:.2f}",
    ]


def read_finished(file: Path) -> dict[Case, Compiled | str]:
    """Cases of an earlier run."""
    if not file.exists():
        return {}
    with reported_as_user_error(f"{file}: no results of this command", OSError, ValueError, KeyError, TypeError):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return {
            Case(**line["case"]): line["refused"] if line.get("refused") else Compiled(**line["compiled"])
            for line in lines
        }


def run(settings: Settings) -> None:
    jax.config.update("jax_platforms", "cpu")  # the compilers are plugins that would look for their devices
    console = Console()
    if min(settings.rows, default=0) < 1:
        raise UserError("--rows needs positive numbers")
    for name in settings.targets:  # refuses what is unknown before anything is compiled
        get_preset(name, settings.layers)
    try:
        described(settings.device)
    except (ModuleNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    cases = [
        Case(name, layout, settings.device, rows, settings.capacity, get_preset(name, settings.layers).num_layers)
        for name in settings.targets
        for layout in settings.layouts
        for rows in settings.rows
    ]
    file = settings.out / "mesh_layouts.jsonl"
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
    results = read_finished(file)
    for case in cases:
        if case not in results:
            with console.status(f"{case.target} {case.layout}, {case.rows} rows"):
                try:
                    results[case] = compile_case(case)
                except UserError as error:
                    results[case] = f"refused: {error}"
                except ValueError as error:
                    if not str(error).startswith("backend"):  # a kernel that does not take these sizes
                        raise
                    results[case] = f"refused: {error}"
        console.print(*table_line(case, results[case]), soft_wrap=True)
        lines = []
        for one, done in results.items():
            outcome = {"refused": done} if isinstance(done, str) else {"compiled": asdict(done)}
            lines.append(json.dumps({"case": asdict(one), **outcome, **environment()}))
        cells = [table_line(one, done) for one, done in results.items()]
        with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
            write_text(file, "\n".join(lines) + "\n")
            write_text(settings.out / "mesh_layouts.md", markdown_table(HEADER, cells) + "\n")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
