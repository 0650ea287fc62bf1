"""Routing traces on disk: token ids and the experts the target chose for each, in compressed shards with a manifest.

    FOLDER/manifest.json          what was traced, and the shards with their hashes; rewritten after each shard
    FOLDER/shard-00000.parquet    sequences of some prompts of one data set

A shard is a Parquet file (zstd) of one row a sequence: `data_set`, `prompt`, `prompt_length`, `tokens` (int32 `[T]`),
`experts` (uint16 `[T, L, K]`, flat) and, if a drafter took part, `states` (float16 `[T, S, H]`, flat). Its schema
carries the `ShardHeader`, so it can be read alone. The routing of a token is recorded at the token that is processed,
so it is the label of that very token.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pydantic
from jaxtyping import Float, Int
from pyarrow import parquet

from ecospec_jax.config import STRICT, RoutingShape, from_json, to_json
from ecospec_jax.errors import UserError, reported_as_user_error

FORMAT = 2
MANIFEST = "manifest.json"
_HEADER = b"ecospec_jax"  # key of the schema's metadata
_ROWS = 16  # sequences of a row group: what is decompressed at a time


@dataclass(frozen=True)
class Trace:
    """One traced sequence.

    Attributes:
        data_set: name of the data set that the prompt belongs to.
        prompt: id of the prompt within its data set; all sequences of a prompt share it.
        prompt_length: tokens of the prompt.
        tokens_T: int32, prompt and answer.
        experts_TLK: uint16, chosen experts of each token and MoE layer, best first.
        states_TSH: float16, the drafter's states that would propose each token (`training/states.py`), if they are
            held.
    """

    data_set: str
    prompt: str
    prompt_length: int
    tokens_T: Int[np.ndarray, " tokens"]
    experts_TLK: Int[np.ndarray, "tokens layers k"]
    states_TSH: Float[np.ndarray, "tokens states hidden"] | None = None


@dataclass(frozen=True)
class StateShape:
    """A drafter's states of a token: `states` vectors of `hidden` numbers, and whose they are."""

    states: int
    hidden: int
    drafter_hash: str
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class ShardHeader:
    """What it takes to read a shard.

    Attributes:
        format: version of this layout.
        target_hash: of the target that was traced (`Manifest.target_hash`).
        vocab_size: the target's.
        routing: shape of the labels.
        states: shape of the drafter's states; None if there are none.
    """

    format: int
    target_hash: str
    vocab_size: int
    routing: RoutingShape
    states: StateShape | None
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class Shard:
    """A file of traces.

    Attributes:
        file: its name.
        sha256: of its bytes.
        data_set: of all its prompts.
        sequences: how many of each prompt.
        tokens: of all sequences.
    """

    file: str
    sha256: str
    data_set: str
    sequences: dict[str, int]
    tokens: int
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class TraceManifest(ShardHeader):
    """What a folder of traces holds.

    Attributes:
        recipe: how sequences were generated; a run with another recipe does not continue this one.
        shards: complete ones.
    """

    recipe: dict[str, str]
    shards: tuple[Shard, ...] = ()

    @property
    def header(self) -> ShardHeader:
        """That of every shard."""
        return ShardHeader(**{part.name: getattr(self, part.name) for part in fields(ShardHeader)})

    @property
    def prompts(self) -> set[tuple[str, str]]:
        """Data set and id of the prompts that are done."""
        return {(shard.data_set, prompt) for shard in self.shards for prompt in shard.sequences}


def read_manifest(folder: Path) -> TraceManifest:
    """Reads `manifest.json`."""
    file = folder / MANIFEST
    with reported_as_user_error(f"{file}: cannot be read", OSError, ValueError):
        values = json.loads(file.read_text())
    # First of all, since the rest of another format says nothing.
    if isinstance(values, dict) and values.get("format") != FORMAT:
        raise UserError(f"{file}: format {values.get('format')} is not {FORMAT}; collect the traces again")
    return from_json(TraceManifest, values, str(file))


def read_manifest_of(folder: Path, target_hash: str) -> TraceManifest:
    """The same, of traces that must be this very target's."""
    manifest = read_manifest(folder)
    if manifest.target_hash != target_hash:
        raise UserError(f"{folder}: traces of another target (hash {manifest.target_hash[:12]})")
    return manifest


def write_manifest(folder: Path, manifest: TraceManifest) -> None:
    """Writes `manifest.json` at once and complete."""
    new = folder / f"{MANIFEST}.new"
    new.write_text(json.dumps(to_json(manifest), indent=1) + "\n")
    new.replace(folder / MANIFEST)


def _schema(header: ShardHeader) -> pa.Schema:
    kinds = {
        "data_set": pa.string(),
        "prompt": pa.string(),
        "prompt_length": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "experts": pa.list_(pa.uint16()),
    }
    if header.states is not None:
        kinds["states"] = pa.list_(pa.float16())
    columns = [pa.field(name, kind, nullable=False) for name, kind in kinds.items()]
    return pa.schema(columns, metadata={_HEADER: json.dumps(to_json(header)).encode()})


def write_shard(folder: Path, manifest: TraceManifest, traces: Sequence[Trace]) -> Shard:
    """Writes the next shard, traces of one data set, at once and complete."""
    (data_set,) = {trace.data_set for trace in traces}
    file = folder / f"shard-{len(manifest.shards):05d}.parquet"
    new, header = file.with_suffix(".new"), manifest.header
    for row, trace in enumerate(traces):
        _check(header, trace, f"{file}: row {row}")
    schema = _schema(header)
    with parquet.ParquetWriter(new, schema, compression="zstd") as writer:
        for first in range(0, len(traces), _ROWS):
            rows = traces[first : first + _ROWS]
            columns = {
                "data_set": [trace.data_set for trace in rows],
                "prompt": [trace.prompt for trace in rows],
                "prompt_length": [trace.prompt_length for trace in rows],
                "tokens": [trace.tokens_T for trace in rows],
                "experts": [trace.experts_TLK.ravel() for trace in rows],
                "states": [trace.states_TSH.ravel() for trace in rows if trace.states_TSH is not None],
            }
            arrays = [pa.array(columns[column.name], column.type) for column in schema]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    with new.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    new.replace(file)
    sequences = dict(Counter(trace.prompt for trace in traces))
    return Shard(file.name, sha256, data_set, sequences, sum(len(trace.tokens_T) for trace in traces))


def read_traces(folder: Path, manifest: TraceManifest, *, data_sets: Collection[str] | None = None) -> Iterator[Trace]:
    """Traces of some data sets, or of all, in the order they were written; one shard is held at a time."""
    for shard in manifest.shards:
        if data_sets is None or shard.data_set in data_sets:
            yield from read_shard(folder, manifest, shard)


def read_shard(folder: Path, manifest: TraceManifest, shard: Shard) -> Iterator[Trace]:
    """Traces of a shard, in order. They own their arrays and keep nothing of the shard.

    Raises:
        UserError: the shard is absent or damaged, of another target, or not what its manifest says; before any trace,
            unless a single row is wrong.
    """
    file, header = folder / shard.file, manifest.header
    with reported_as_user_error(f"{file}: cannot be read", OSError):
        content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise UserError(f"{file}: the shard was changed or damaged after it was written; collect the traces again")
    with reported_as_user_error(f"{file}: is no Parquet file that can be read", pa.ArrowException, OSError):
        table = parquet.ParquetFile(pa.BufferReader(content))
        found = table.schema_arrow
    _check_header(header, found, file)
    with reported_as_user_error(f"{file}: cannot be read", pa.ArrowException, OSError):
        names = table.read(columns=["data_set", "prompt"]).to_pydict()
    wanted = {(shard.data_set, prompt): count for prompt, count in shard.sequences.items()}
    if Counter(zip(names["data_set"], names["prompt"], strict=True)) != wanted:
        raise UserError(f"{file}: holds other prompts than {MANIFEST} says")
    row = 0
    for group in range(table.num_row_groups):
        with reported_as_user_error(f"{file}: row group {group} cannot be read", pa.ArrowException, OSError):
            rows = table.read_row_group(group).combine_chunks()
        for values in zip(*(_values(rows[column.name]) for column in _schema(header)), strict=True):
            yield _unfolded(header, *values, where=f"{file}: row {row}")
            row += 1


def _check_header(header: ShardHeader, found: pa.Schema, file: Path) -> None:
    """That a shard's own schema is the one that its manifest promises."""
    with reported_as_user_error(f"{file}: the schema's metadata cannot be read", KeyError, ValueError):
        values = json.loads((found.metadata or {})[_HEADER])
    own = from_json(ShardHeader, values, f"{file}: the schema's metadata")
    if own.target_hash != header.target_hash:
        raise UserError(f"{file}: a shard of another target (hash {own.target_hash[:12]})")
    if own != header:
        raise UserError(f"{file}: {own} differs from the manifest's {header}")
    for column in _schema(header):
        if column.name not in found.names:
            raise UserError(f"{file}: column '{column.name}' is missing")
        if (kind := found.field(column.name)).type != column.type or kind.nullable:
            raise UserError(f"{file}: column '{column.name}' is {kind.type}, not {column.type}")


def _values(column: pa.ChunkedArray) -> Iterator[Any]:
    """A column by row: text, numbers or arrays."""
    (array,) = column.chunks
    if not pa.types.is_list(array.type):
        yield from array.to_pylist()
        return
    values, ends = array.values.to_numpy(), array.offsets.to_numpy()
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        yield values[start:end].copy()  # a view would keep the whole row group


def _unfolded(
    header: ShardHeader,
    data_set: str,
    prompt: str,
    prompt_length: int,
    tokens_T: np.ndarray,
    experts: np.ndarray,
    states: np.ndarray | None = None,
    *,
    where: str,
) -> Trace:
    """A row as a trace; `where` begins the complaint about one whose sizes are wrong."""

    def folded(name: str, flat: np.ndarray, *shape: int) -> np.ndarray:
        with reported_as_user_error(f"{where}: '{name}'", ValueError):
            return flat.reshape(len(tokens_T), *shape)

    kept = header.states
    experts_TLK = folded("experts", experts, header.routing.layers, header.routing.k)
    states_TSH = None if states is None or kept is None else folded("states", states, kept.states, kept.hidden)
    trace = Trace(data_set, prompt, prompt_length, tokens_T, experts_TLK, states_TSH)
    _check(header, trace, where)
    return trace


def _check(header: ShardHeader, trace: Trace, where: str) -> None:
    """That a trace has the header's shapes and ranges."""
    length, routing, kept = len(trace.tokens_T), header.routing, header.states
    states = None if trace.states_TSH is None else trace.states_TSH.shape
    shapes = {
        "experts": (trace.experts_TLK.shape, (length, routing.layers, routing.k)),
        "states": (states, kept and (length, kept.states, kept.hidden)),
    }
    for name, (found, wanted) in shapes.items():
        if found != wanted:
            raise UserError(f"{where}: '{name}' has shape {found}, not {wanted}")
    if not 0 <= trace.prompt_length <= length or not length:
        raise UserError(f"{where}: a prompt of {trace.prompt_length} tokens in a sequence of {length}")
    ranges = {"tokens": (trace.tokens_T, header.vocab_size), "experts": (trace.experts_TLK, routing.experts)}
    for name, (ids, count) in ranges.items():
        if ids.min() < 0 or ids.max() >= count:
            raise UserError(f"{where}: '{name}' holds ids outside 0..{count - 1}")
