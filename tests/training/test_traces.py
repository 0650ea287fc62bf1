"""Routing traces on disk: what is written is read again, a shard at a time; anything else is one line."""

import hashlib
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ecospec_jax.config import RoutingShape
from ecospec_jax.errors import UserError
from ecospec_jax.training import traces
from ecospec_jax.training.traces import (
    FORMAT,
    MANIFEST,
    StateShape,
    Trace,
    TraceManifest,
    read_manifest,
    read_traces,
    write_manifest,
    write_shard,
)
from tests.made_up_traces import ROUTING, STATES, VOCAB, make_trace, write_traces

# More sequences in the first shard than a row group holds.
GROUPS = [
    [make_trace("p0", 5, 0), make_trace("p0", 1, 1), make_trace("ü 1", 9, 2)]
    + [make_trace(f"m{i}", 3, 10 + i) for i in range(40)],
    [make_trace("p0", 4, 3, data_set="two")],
    [make_trace("p3", 7, 4), make_trace("p3", 7, 5)],
]


def same(ours: Trace, wanted: Trace) -> None:
    assert (ours.data_set, ours.prompt, ours.prompt_length) == (wanted.data_set, wanted.prompt, wanted.prompt_length)
    arrays = [(ours.tokens_T, wanted.tokens_T), (ours.experts_TLK, wanted.experts_TLK)]
    assert (ours.states_TSH is None) == (wanted.states_TSH is None)
    if ours.states_TSH is not None:
        arrays.append((ours.states_TSH, wanted.states_TSH))
    for found, expected in arrays:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "traces"
    write_traces(folder, GROUPS)
    return folder


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "traces"))


def test_round_trip(pristine) -> None:
    """Values, dtypes and order; the manifest says what is there, and no temporary file stays."""
    manifest = read_manifest(pristine)
    assert manifest.target_hash == "ab" * 32 and (manifest.vocab_size, manifest.routing) == (VOCAB, ROUTING)
    many = {f"m{i}": 1 for i in range(40)}
    assert [shard.sequences for shard in manifest.shards] == [{"p0": 2, "ü 1": 1, **many}, {"p0": 1}, {"p3": 2}]
    assert [shard.data_set for shard in manifest.shards] == ["one", "two", "one"]
    assert [shard.tokens for shard in manifest.shards] == [135, 4, 14]
    assert manifest.prompts == {("one", "p0"), ("one", "ü 1"), ("two", "p0"), ("one", "p3")} | {
        ("one", name) for name in many
    }
    names = {"manifest.json", *(f"shard-0000{i}.parquet" for i in range(3))}
    assert {file.name for file in pristine.iterdir()} == names
    for ours, wanted in zip(read_traces(pristine, manifest), sum(GROUPS, []), strict=True):
        same(ours, wanted)


def test_some_data_sets(folder) -> None:
    """Shards of the others are not even read."""
    manifest = read_manifest(folder)
    for name in ("shard-00000.parquet", "shard-00002.parquet"):
        (folder / name).unlink()
    (only,) = read_traces(folder, manifest, data_sets=["two"])
    same(only, GROUPS[1][0])
    assert not list(read_traces(folder, manifest, data_sets=[]))


def test_states_round_trip(tmp_path) -> None:
    """The drafter's states, exactly, special values too."""
    group = [make_trace("p0", 20, 0, states=STATES), make_trace("p1", 1, 1, states=STATES)]
    assert group[0].states_TSH is not None
    group[0].states_TSH[0, 0, :3] = [np.inf, -0.0, 6e-8]
    manifest = write_traces(tmp_path / "traces", [group], STATES)
    for ours, wanted in zip(read_traces(tmp_path / "traces", manifest), group, strict=True):
        same(ours, wanted)
        assert ours.states_TSH is not None and ours.states_TSH.shape == (len(ours.tokens_T), 2, 5)
    assert read_manifest(tmp_path / "traces").states == STATES


def test_a_shard_can_be_read_alone(pristine) -> None:
    """By any reader of Parquet: flat lists, and what their shapes are in the metadata; compressed by zstd."""
    table = parquet.read_table(pristine / "shard-00000.parquet")
    assert [(column.name, str(column.type).replace("element", "item")) for column in table.schema] == [
        ("data_set", "string"),
        ("prompt", "string"),
        ("prompt_length", "int32"),
        ("tokens", "list<item: int32>"),
        ("experts", "list<item: uint16>"),
    ]
    assert json.loads(table.schema.metadata[b"ecospec_jax"]) == {
        "format": FORMAT,
        "target_hash": "ab" * 32,
        "vocab_size": VOCAB,
        "routing": {"layers": 3, "experts": 70, "k": 2},
        "states": None,
    }
    for row, trace in zip(table.to_pylist(), GROUPS[0], strict=True):
        assert row["tokens"] == trace.tokens_T.tolist()
        assert np.reshape(row["experts"], (-1, 3, 2)).tolist() == trace.experts_TLK.tolist()
    column = parquet.ParquetFile(pristine / "shard-00000.parquet").metadata.row_group(0).column(4)
    assert column.compression == "ZSTD"


def test_shards_are_the_same_bytes_each_time(tmp_path, pristine) -> None:
    """So that a resumed collection can equal an uninterrupted one."""
    assert write_traces(tmp_path / "again", GROUPS) == read_manifest(pristine)


def test_one_shard_is_held_at_a_time(pristine, monkeypatch) -> None:
    """Traces that are kept do not keep their shard, whose file is only read when the one before is done."""
    opened: list[weakref.ref] = []

    class Counted(parquet.ParquetFile):
        def __init__(self, source: pa.BufferReader) -> None:
            super().__init__(source)
            opened.append(weakref.ref(self))

    monkeypatch.setattr(traces.parquet, "ParquetFile", Counted)
    kept = []
    for number, trace in enumerate(read_traces(pristine, read_manifest(pristine))):
        kept.append(trace)
        assert trace.tokens_T.flags.owndata and trace.experts_TLK.base is not None
        assert trace.experts_TLK.base.flags.owndata and trace.experts_TLK.base.size == trace.experts_TLK.size
        assert sum(each() is not None for each in opened) == 1
        assert len(opened) == (1 if number < 43 else 2 if number < 44 else 3)


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES = {
    "flipped bit": flip_a_bit,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "empty": lambda file: file.write_bytes(b""),
    "another shard": lambda file: shutil.copy(file.with_name("shard-00000.parquet"), file),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named(folder, damage: str) -> None:
    """The traces before it can be read."""
    file = folder / "shard-00001.parquet"
    DAMAGES[damage](file)
    found = read_traces(folder, read_manifest(folder))
    for _ in GROUPS[0]:
        next(found)
    with pytest.raises(UserError, match=f"^{file}: (the shard was changed or damaged|cannot be read)") as error:
        next(found)
    assert "\n" not in str(error.value)


def reworked(folder: Path, change: Callable[[pa.Table], pa.Table]) -> TraceManifest:
    """Writes the second shard anew and gives the manifest its hash: only its content can be wrong."""
    manifest, file = read_manifest(folder), folder / "shard-00001.parquet"
    parquet.write_table(change(parquet.read_table(file)), file)
    return rehashed(manifest, file)


def rehashed(manifest: TraceManifest, file: Path) -> TraceManifest:
    shard = replace(manifest.shards[1], sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    return replace(manifest, shards=(manifest.shards[0], shard, manifest.shards[2]))


def described(**changes: object) -> Callable[[pa.Table], pa.Table]:
    """Another header."""

    def change(table: pa.Table) -> pa.Table:
        header = json.loads(table.schema.metadata[b"ecospec_jax"]) | changes
        return table.replace_schema_metadata({b"ecospec_jax": json.dumps(header)})

    return change


def column(name: str, values: list, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    """Other values in a column."""

    def change(table: pa.Table) -> pa.Table:
        field = pa.field(name, kind, nullable=False)
        return table.set_column(table.column_names.index(name), field, pa.array([values], kind))

    return change


WRONG = {
    "another target": (described(target_hash="cd" * 32), r"a shard of another target \(hash cdcdcdcdcdcd\)"),
    "another vocabulary": (described(vocab_size=24), "ShardHeader.*vocab_size=24.* differs from the manifest's"),
    "other states": (
        described(states={"states": 2, "hidden": 5, "drafter_hash": ""}),
        "ShardHeader.* differs from the manifest's",
    ),
    "bad header": (described(routing=3), "the schema's metadata: routing: "),
    "no header": (lambda table: table.replace_schema_metadata({}), "the schema's metadata cannot be read: "),
    "missing column": (lambda table: table.drop_columns("experts"), "column 'experts' is missing"),
    "other kind": (column("tokens", [1, 2, 3, 4], pa.list_(pa.int64())), "column 'tokens' is list<.*int64>, not list<"),
    "too few experts": (column("experts", [1] * 23, pa.list_(pa.uint16())), "row 0: 'experts': .*23"),
    "an expert too high": (column("experts", [70] * 24, pa.list_(pa.uint16())), "row 0: 'experts' holds ids outside"),
    "a token too high": (column("tokens", [0, 23, 0, 0], pa.list_(pa.int32())), "row 0: 'tokens' holds ids outside"),
    "a negative token": (column("tokens", [0, -1, 0, 0], pa.list_(pa.int32())), "row 0: 'tokens' holds ids outside"),
    "a longer prompt": (column("prompt_length", 5, pa.int32()), "row 0: a prompt of 5 tokens in a sequence of 4"),
    "another prompt": (column("prompt", "p9", pa.string()), "holds other prompts than manifest.json says"),
    "another data set": (column("data_set", "one", pa.string()), "holds other prompts than manifest.json says"),
    "twice": (lambda table: pa.concat_tables([table, table]), "holds other prompts than manifest.json says"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_shard_that_is_not_what_its_manifest_says(folder, wrong: str) -> None:
    change, message = WRONG[wrong]
    manifest = reworked(folder, change)
    with pytest.raises(UserError, match=f"^{folder / 'shard-00001.parquet'}: {message}") as error:
        list(read_traces(folder, manifest, data_sets=["two"]))
    assert "\n" not in str(error.value)


def test_no_parquet_at_all(folder) -> None:
    file = folder / "shard-00001.parquet"
    file.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UserError, match=f"^{file}: is no Parquet file that can be read: ") as error:
        list(read_traces(folder, rehashed(read_manifest(folder), file), data_sets=["two"]))
    assert "\n" not in str(error.value)


def test_states_of_the_wrong_shape(tmp_path) -> None:
    """Not written, and not read if another wrote them."""
    manifest = write_traces(tmp_path / "traces", [], STATES)
    for trace in (make_trace("p", 4, 0), make_trace("p", 4, 0, states=StateShape(1, 5, ""))):
        with pytest.raises(UserError, match=r"shard-00000.parquet: row 0: 'states' has shape .*, not \(4, 2, 5\)"):
            write_shard(tmp_path / "traces", manifest, [trace])
    with pytest.raises(UserError, match=r"row 0: 'states' has shape \(4, 2, 5\), not None"):
        write_shard(tmp_path / "traces", replace(manifest, states=None), [make_trace("p", 4, 0, states=STATES)])
    with pytest.raises(UserError, match=r"row 0: 'experts' has shape \(4, 3, 2\), not \(4, 2, 3\)"):
        routing = RoutingShape(layers=2, experts=70, k=3)
        write_shard(tmp_path / "traces", replace(manifest, routing=routing, states=None), [make_trace("p", 4, 0)])
    assert not list((tmp_path / "traces").iterdir())

    groups = [[make_trace("p", 4, i, states=STATES)] for i in range(3)]
    manifest = write_traces(tmp_path / "more", groups, STATES)
    short = column("states", [0.0] * 39, pa.list_(pa.float16()))
    manifest = reworked(tmp_path / "more", short)
    with pytest.raises(UserError, match="shard-00001.parquet: row 0: 'states': .*39"):
        list(read_traces(tmp_path / "more", manifest))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1} is not {FORMAT}"),
        ({"format": 1, "shards": [{"prompts": []}]}, "format 1 is not 2; collect the traces again"),
        ({"routing": {"layers": 3, "experts": 70}}, "routing.k: "),
        ({"shards": [{"file": "shard-00000.parquet"}]}, "shards.0.sha256: "),
        ({"target_hash": None}, "target_hash: "),
    ],
)
def test_a_bad_manifest_is_named(folder, edit: dict, message: str) -> None:
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    with pytest.raises(UserError, match=f"^{file}: {message}"):
        read_manifest(folder)


def test_an_unreadable_manifest_is_named(folder) -> None:
    for content in ("{", "[]", "\xff"):
        (folder / MANIFEST).write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=f"^{folder / MANIFEST}: "):
            read_manifest(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(UserError, match=f"^{folder / MANIFEST}: cannot be read"):
        read_manifest(folder)


def test_a_manifest_appears_whole(folder, monkeypatch) -> None:
    """An interruption while it is written leaves the old one."""
    before = read_manifest(folder)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_manifest(folder, replace(before, shards=()))
    assert read_manifest(folder) == before
