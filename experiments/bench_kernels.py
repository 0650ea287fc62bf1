"""Expert layers on one CPU thread, against what the same thread can read, and against other implementations.

    python -m experiments.bench_kernels

Run it on an idle machine. Every repeat draws fresh experts and times the kernel, the reads and the peers one after the
other; ratios are medians of the repeats' own ratios, so that a drifting machine hits both sides alike.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Column, Table

from ecospec_jax import UserError
from ecospec_jax.errors import reported_as_user_error, run_command
from ecospec_jax.kernels import ExpertWeights, native
from experiments.environment import environment
from experiments.kernel_peers import Peer, applicable_peers, build_peers, package_versions, torch_missing
from experiments.kernel_shapes import (
    QUICK_SHAPES,
    SHAPES,
    STORAGES,
    Shape,
    chained_calls,
    count_distinct,
    draw_ids,
    draw_ids_from_pools,
    expert_bytes,
    random_weights,
)
from experiments.one_thread import one_thread
from experiments.options import require_positive
from experiments.plots import plt, save_figure
from experiments.read_ceiling import ReadCeiling, beyond_cache
from experiments.tables import markdown_table, write_text

MOST_BYTES = 6e9  # of a layer
CALL_BYTES = 2e9  # a timing reads at least this much, in as many chained calls as that takes
MOST_CALLS = 256
PATIENCE = 0.1  # seconds; peers whose call takes longer are timed less often, after the others
SLOW_REPEATS = 2
DISTINCT_SHAPE, DISTINCT_STORAGE, DISTINCT_ROWS = "medium", "bfloat16", 16
PEERS = ("xla", "transformers eager", "transformers grouped_mm", "gather", "ragged_dot")


@dataclass(frozen=True)
class Settings:
    """Time expert layers on one CPU thread."""

    shapes: tuple[str, ...] = ()
    """Layers to time; all if none is named."""
    formats: tuple[Literal["float32", "bfloat16", "mxfp4", "fp8"], ...] = STORAGES
    """Storage formats, where the shape is meant for them."""
    rows: tuple[int, ...] = (1, 2, 5, 9, 16)
    """Rows of a call: T."""
    repeats: int = 9
    """Timings that medians are taken of."""
    peers: bool = True
    """Time other implementations too."""
    core: int | None = None
    """The core to run on; the last allowed one if not given."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Tiny layers that say nothing about speed, as a test of this script."""
    out: Path = Path("results/bench_kernels")
    """Folder for results.jsonl, table.md and distinct.png."""

    @property
    def chosen(self) -> list[Shape]:
        known = QUICK_SHAPES if self.quick else SHAPES
        for name in self.shapes:
            if name not in known:
                raise UserError(f"unknown shape '{name}'; known: {', '.join(known)}")
        return [known[name] for name in self.shapes or known]


class Bench:
    """A shape's weights in one format, and the reads they are compared with."""

    def __init__(self, settings: Settings, shape: Shape, storage: str) -> None:
        cached = shape.cached or settings.quick
        size = shape.layer_bytes(storage)
        all_bytes = size if cached else beyond_cache()
        self.settings, self.shape, self.storage = settings, shape, storage
        self.layers = -(-all_bytes // size)
        self.experts: ExpertWeights = jax.block_until_ready(random_weights(shape, storage, self.layers))
        self.bytes = expert_bytes(self.experts)
        self.ceiling = ReadCeiling(all_bytes)
        self.run = chained_calls(shape, None)
        self.random = np.random.default_rng(0)

    def rows_dtypes(self) -> tuple[str, ...]:
        """Of activations: the usual one, and float32 for quantised weights."""
        return {"float32": ("float32",), "bfloat16": ("bfloat16",)}.get(self.storage, ("bfloat16", "float32"))

    def calls(self, distinct: float) -> int:
        """Chained calls of a timing."""
        wanted = CALL_BYTES / 100 if self.settings.quick else CALL_BYTES
        return int(min(MOST_CALLS, max(2, -(-wanted // (distinct * self.bytes.total)))))

    def x(self, rows: int, dtype: str) -> jax.Array:
        return jnp.asarray(self.random.standard_normal((rows, self.shape.hidden)), dtype)

    def seconds(self, x_TD: jax.Array, ids_NTK: np.ndarray) -> float:
        """All calls."""
        ids = jax.block_until_ready(jnp.asarray(ids_NTK))
        started = time.perf_counter()
        self.run(x_TD, ids, self.experts).block_until_ready()
        return time.perf_counter() - started

    def line(self, rows: int, dtype: str, peers: list[Peer], missing: dict[str, Any]) -> dict[str, Any]:
        """One line of the table. Peers in `missing` are absent from `peers` for a reason."""
        shape, x_TD = self.shape, self.x(rows, dtype)
        expected = shape.experts * (1 - (1 - shape.k / shape.experts) ** rows)
        calls = self.calls(expected)
        draw = lambda count: draw_ids(self.random, shape, count, rows)  # noqa: E731
        self.seconds(x_TD, draw(calls))
        quick_peers, slow_peers = [], []
        for peer in peers:
            peer.seconds(x_TD, draw(1))  # compiles
            (slow_peers if peer.seconds(x_TD, draw(1)) > PATIENCE else quick_peers).append(peer)

        samples: list[dict[str, float]] = []
        times: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for _ in range(self.settings.repeats):
            ids_NTK = draw(calls)
            distinct = count_distinct(ids_NTK)
            read = distinct * self.bytes.total
            seconds, reads = self.seconds(x_TD, ids_NTK), self.ceiling.seconds(read)
            sample = {"distinct": distinct / calls, "bytes": read / calls, "ms": 1e3 * seconds / calls}
            sample |= {"gb_per_s": read / seconds / 1e9, "read_gb_per_s": read / reads.best / 1e9}
            sample |= {"ratio_plain": seconds / reads.plain, "ratio_prefetch": seconds / reads.prefetch}
            samples.append(sample | {"ratio": seconds / reads.best})
            for peer in quick_peers:
                times[peer.name].append(1e3 * peer.seconds(x_TD, ids_NTK) / calls)
        mine = [sample["ms"] for sample in samples]
        figures = {name: median(sample[name] for sample in samples) for name in samples[0]}
        ratios = sorted(sample["ratio"] for sample in samples)

        # Apart, so that nothing else pays for what they do to caches and the scheduler.
        for peer in slow_peers:
            times[peer.name] = [1e3 * peer.seconds(x_TD, draw(1)) for _ in range(SLOW_REPEATS)]
        measured = {peer.name: {"ms": median(times[peer.name])} for peer in peers}
        for peer in quick_peers:
            pairs = zip(times[peer.name], mine, strict=True)
            measured[peer.name]["ratio"] = median(theirs / ours for theirs, ours in pairs)
        for peer in slow_peers:
            measured[peer.name]["ratio"] = measured[peer.name]["ms"] / figures["ms"]
        return {
            "part": "layer",
            **self.facts(rows, dtype),
            "calls": calls,
            **figures,
            "ratio_range": [ratios[0], ratios[-1]],
            "peers": measured | missing,
        }

    def facts(self, rows: int, dtype: str) -> dict[str, Any]:
        names = ("hidden", "ffn", "experts", "k", "cached")
        facts = {name: getattr(self.shape, name) for name in names}
        return {"shape": self.shape.name, **facts, "format": self.storage, "rows": rows, "rows_dtype": dtype} | {
            "layers": self.layers
        }

    def traffic(self) -> dict[str, Any]:
        """What the routines say that they have read, against the model."""
        rows = max(self.settings.rows)
        ids_NTK = draw_ids(self.random, self.shape, self.layers, rows)
        with native.count_traffic() as counted:
            self.seconds(self.x(rows, self.rows_dtypes()[0]), ids_NTK)
        distinct = count_distinct(ids_NTK)
        expected = {"experts": distinct, "weight_bytes": distinct * self.bytes.matrices}  # biases are not counted
        found = dataclasses.asdict(counted[0])
        facts = {"part": "traffic", "shape": self.shape.name, "format": self.storage}
        return facts | {"counted": found, "expected": expected, "equal": found == expected}

    def distinct_sweep(self) -> dict[str, Any]:
        """Time of a call by the number of distinct experts, with a fitted line."""
        rows, x_TD = DISTINCT_ROWS, self.x(DISTINCT_ROWS, self.rows_dtypes()[0])
        most = min(self.shape.experts, rows * self.shape.k)
        counts = sorted({1, 2, *(round(most * part / 16) for part in range(1, 17))} - {0})
        samples: dict[int, list[float]] = {count: [] for count in counts}
        for repeat in range(self.settings.repeats + 1):
            for count in self.random.permutation(counts).tolist():
                calls = self.calls(count)
                ids_NTK = draw_ids_from_pools(self.random, self.shape, calls, rows, count)
                seconds = self.seconds(x_TD, ids_NTK) / calls
                if repeat:  # the first compiles
                    samples[count].append(1e3 * seconds)
        times = [median(samples[count]) for count in counts]
        slope, intercept = np.polyfit(counts, times, 1)
        error = np.asarray(times) - (intercept + slope * np.asarray(counts))
        return {
            "part": "distinct",
            **self.facts(rows, self.rows_dtypes()[0]),
            "distinct": counts,
            "ms": times,
            "intercept_ms": float(intercept),
            "slope_ms": float(slope),
            "r2": float(1 - error.var() / np.var(times)),
        }


def measure(settings: Settings, console: Console) -> Iterator[dict[str, Any]]:
    for shape in settings.chosen:
        for storage in settings.formats:
            if storage not in shape.storages:
                continue
            if shape.layer_bytes(storage) > MOST_BYTES:
                console.print(f"{shape.name} in {storage}: left out, a layer has {shape.layer_bytes(storage)} bytes")
                continue
            yield from measure_layer(settings, shape, storage)


def measure_layer(settings: Settings, shape: Shape, storage: str) -> Iterator[dict[str, Any]]:
    """All lines of a shape in one format; its weights are gone afterwards."""
    bench = Bench(settings, shape, storage)
    yield bench.traffic()
    if (settings.quick or shape.name == DISTINCT_SHAPE) and storage == DISTINCT_STORAGE:
        yield bench.distinct_sweep()
    for dtype in bench.rows_dtypes():
        peers, missing = [], {}
        if settings.peers and dtype == bench.rows_dtypes()[0]:
            peers = list(build_peers(shape, storage, bench.experts))
            names = set(applicable_peers(shape, storage)) - {peer.name for peer in peers}
            missing = {name: {"missing": torch_missing()} for name in sorted(names)}
        for rows in settings.rows:
            yield bench.line(rows, dtype, peers, missing)


NAMES = ["shape", "format", "rows", "T"]
FIGURES = ["distinct", "ms", "GB/s", "/ read"]


def names(record: dict[str, Any]) -> list[str]:
    return [record["shape"], record["format"], record["rows_dtype"], str(record["rows"])]


def figures(record: dict[str, Any]) -> list[str]:
    ratio = f"{record['ratio']:.2f}" + (" (cache)" if record["cached"] else "")
    return [f"{record['distinct']:.1f}", f"{record['ms']:.3f}", f"{record['gb_per_s']:.1f}", ratio]


def peer_cell(record: dict[str, Any], name: str) -> str:
    peer = record["peers"].get(name)
    if peer is None:
        return "-"
    return peer["missing"] if "missing" in peer else f"{peer['ratio']:.2f}x"


def remarks(records: list[dict[str, Any]]) -> list[str]:
    """What the other parts found."""
    lines = []
    for record in records:
        where = f"{record['shape']}, {record['format']}"
        if record["part"] == "distinct":
            lines.append(
                f"{where}, T = {record['rows']}: {record['intercept_ms']:.3f} ms + {record['slope_ms']:.4f} ms "
                f"for each distinct expert, r2 = {record['r2']:.4f}"
            )
        if record["part"] == "traffic" and not record["equal"]:
            lines.append(f"ERROR: {where}: counted {record['counted']}, expected {record['expected']}")
    return lines


def plot(path: Path, record: dict[str, Any]) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
    counts = np.asarray(record["distinct"])
    axis.scatter(counts, record["ms"], s=14)
    axis.plot(counts, record["intercept_ms"] + record["slope_ms"] * counts, label=f"line, r2 = {record['r2']:.4f}")
    axis.set(xlabel="distinct experts", ylabel="ms a call", ylim=(0, None), xlim=(0, None))
    axis.set_title(f"{record['shape']}, {record['format']}, {record['rows']} rows", fontsize=10)
    axis.legend()
    save_figure(figure, path)


def report(settings: Settings, records: list[dict[str, Any]], common: dict[str, Any], console: Console) -> None:
    layers = [record for record in records if record["part"] == "layer"]
    left = [names(record) for record in layers]
    parts = {tuple(FIGURES): [figures(record) for record in layers]}
    if settings.peers:
        parts[PEERS] = [[peer_cell(record, name) for name in PEERS] for record in layers]
    for header, right in parts.items():  # each fits on a terminal
        titles = [title.replace("transformers", "torch") for title in header]
        table = Table(*NAMES, *(Column(title, justify="right", overflow="fold") for title in titles))
        for line in zip(left, right, strict=True):
            table.add_row(*line[0], *line[1])
        console.print(table)
    notes = [
        "/ read: time over that of the better of a plain and a prefetching read of as many bytes; peers: over ours.",
        *remarks(records),
    ]
    for note in notes:
        console.print(note, style="bold red" if note.startswith("ERROR") else None, soft_wrap=True)
    header = [*NAMES, *(title for titles in parts for title in titles)]
    lines = [[cell for part in line for cell in part] for line in zip(left, *parts.values(), strict=True)]
    facts = [*notes, *(f"{name}: `{value}`" for name, value in common.items())]
    write_text(
        settings.out / "table.md", markdown_table(header, lines) + "\n" + "".join(f"- {fact}\n" for fact in facts)
    )
    for record in records:
        if record["part"] == "distinct":
            plot(settings.out / "distinct.png", record)


def run(settings: Settings) -> None:
    require_positive(settings, "repeats")
    if not settings.rows or min(settings.rows) < 1:
        raise UserError("--rows needs numbers that are at least 1")
    shapes = settings.chosen
    core = one_thread(settings.core)
    if (reason := native.unavailable()) is not None:
        raise UserError(f"there is nothing to time: {reason}")
    console = Console()
    common = {
        "core": core,
        "variant": native.variant(),
        "settings": json.loads(json.dumps(dataclasses.asdict(settings), default=str)),
        "peer_versions": package_versions("torch", "transformers"),
        **environment(),
    }
    console.print(f"core {core}, {native.variant()}; {', '.join(shape.name for shape in shapes)}")
    records = []
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
        results = (settings.out / "results.jsonl").open("w", encoding="utf-8")
    with results:
        for record in measure(settings, console):
            results.write(json.dumps(record | common) + "\n")
            results.flush()
            records.append(record)
            if record["part"] == "layer":
                console.print(" ".join([*names(record), *figures(record)]), highlight=False)
    report(settings, records, common, console)
    if any(record["part"] == "traffic" and not record["equal"] for record in records):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
