"""Converted checkpoints: Orbax pieces and the manifest that describes them.

    FOLDER/manifest.json          what the pieces must be; written last
    FOLDER/target/layers.7/       one Orbax save a decoder layer, without its experts' matrices
    FOLDER/target/layers.7.moe.experts.gate/   and one each of those, of all the layer's experts
    FOLDER/target/top/            the target's other parameters
    FOLDER/drafter/top/           the drafter's; its experts, if it has any, as above
    FOLDER/tokenizer/             as published

Every piece's files are checked against the manifest before Orbax reads them, since Orbax casts dtypes silently, does
not notice flipped bits, and reports a missing file at great length. Several processes check a piece each at a time, and
then read what their own devices hold of every piece; the folder must be the same for all of them.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pydantic
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from ecospec_jax.config import STRICT, DrafterConfig, Eagle3Config, ModelConfig, MtpConfig, from_json, to_json
from ecospec_jax.distributed import agree
from ecospec_jax.errors import UserError, reported_as_user_error
from ecospec_jax.models import abstract
from ecospec_jax.models.drafter import Drafter
from ecospec_jax.models.target import Target
from ecospec_jax.predictor_config import (
    BackboneConfig,
    BackbonePredictorConfig,
    DrafterFeaturesConfig,
    PredictorConfig,
    TargetEmbedding,
    TargetGatesConfig,
)
from ecospec_jax.sharding import Placement, spread

FORMAT = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
FLOATS = ("bfloat16", "float16", "float32")  # dtypes that weights are stored in
# A layer's expert matrices are most of a model, so each is a piece of its own, its scales included.
_APART = re.compile(r"(?:layers\.\d+|layer)\.moe\.experts\.\w+(?=\.)|layers\.\d+(?=\.)")
_ROUTER = re.compile(r"routers\.(\d+)\.(.+)")  # of predictors that ask the target's
_READ_BYTES = 1 << 20
_CHUNK_BYTES = 64 << 20  # a device that holds a shard reads whole chunks


@dataclass(frozen=True)
class TensorRecord:
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    size: int
    crc32: int
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class PieceRecord:
    """A piece: parameters that are stored and restored together.

    Attributes:
        sha256: over names, dtypes, shapes and bytes of the tensors.
        tensors: by parameter path.
        files: by path within the piece's folder.
    """

    sha256: str
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT


@dataclass(frozen=True)
class Manifest:
    """What a converted folder holds.

    Attributes:
        format: version of this layout.
        source, drafter_source: folder or Hub id that was converted.
        source_hash: sha256 over the configs and the pieces' hashes.
        eos_token_ids: tokens that end a text.
        pieces: by folder, such as `target/layers.7`.
        versions: of this package, jax, flax and orbax, at conversion.
        created: date and time of the conversion, ISO 8601.
    """

    format: int
    source: str
    drafter_source: str | None
    source_hash: str
    target: ModelConfig
    drafter: DrafterConfig | None
    eos_token_ids: tuple[int, ...]
    pieces: dict[str, PieceRecord]
    versions: dict[str, str]
    created: str
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    @property
    def target_hash(self) -> str:
        """Tells this target from others, whatever its drafter: sha256 over its config and its pieces' hashes."""
        return self._hash("target/", self.target)

    @property
    def drafter_hash(self) -> str:
        """Tells this drafter from others, likewise; empty without a drafter."""
        return "" if self.drafter is None else self._hash("drafter/", self.drafter)

    def _hash(self, folder: str, config: ModelConfig | DrafterConfig) -> str:
        pieces = {name: piece.sha256 for name, piece in self.pieces.items() if name.startswith(folder)}
        return hashlib.sha256(json.dumps([to_json(config), pieces], sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`."""
    (folder / MANIFEST).write_text(json.dumps(to_json(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `manifest.json`; a folder that `python -m convert` did not finish has none."""
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(f"{folder}: no {MANIFEST}, so no finished conversion; write one with 'python -m convert'")
    with reported_as_user_error(str(file), OSError, ValueError):
        values = json.loads(file.read_text())
    version = values.get("format") if isinstance(values, dict) else None
    if version != FORMAT:
        raise UserError(f"{file}: format {version} is not {FORMAT}; convert the checkpoint again")
    return from_json(Manifest, values, str(file))


def parameters(module: Any) -> dict[str, nnx.Variable]:
    """The module's own variables by dotted path, such as `layers.7.moe.experts.gate.weight`."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module))}


def stored_parameters(
    config: ModelConfig | DrafterConfig | BackboneConfig | PredictorConfig, dtype: jnp.dtype
) -> tuple[Any, dict[str, nnx.Variable]]:
    """A module without values, and those of its variables that a checkpoint holds; the target lends the others."""
    module = abstract(config, dtype)
    borrowed = borrowed_parameters(config)
    return module, {path: variable for path, variable in parameters(module).items() if path not in borrowed}


def published_dtypes(config: ModelConfig | DrafterConfig) -> dict[str, np.dtype]:
    """What each parameter is published in: bfloat16 but for those that have a dtype of their own."""
    module = abstract(config, jnp.dtype(jnp.bfloat16))
    return {path: variable.get_value().dtype for path, variable in parameters(module).items()}


def borrowed_parameters(
    config: ModelConfig | DrafterConfig | BackboneConfig | PredictorConfig,
) -> dict[str, str]:
    """Parameters that a drafter or predictor takes from its target, and their names there."""
    embedding = "embedding.weight"
    match config:
        case Eagle3Config() | MtpConfig():
            owned = {embedding: config.own_embedding, "head.weight": config.own_head}
            return {path: path for path, own in owned.items() if not own}
        case BackbonePredictorConfig(bridge=TargetEmbedding()):
            return {embedding: embedding}
        case DrafterFeaturesConfig():
            return {f"features.{embedding}": embedding}
        case TargetGatesConfig():
            module = abstract(config, jnp.dtype(jnp.float32))
            layers = dict(enumerate(config.target.moe_layers))
            routers = {path: _ROUTER.fullmatch(path) for path in parameters(module)}
            return {f"features.{embedding}": embedding} | {
                path: f"layers.{layers[int(match[1])]}.moe.router.{match[2]}"
                for path, match in routers.items()
                if match is not None
            }
    return {}


def borrow(module: Any, config: DrafterConfig | PredictorConfig, target: Target) -> None:
    """Makes the module's borrowed parameters the target's arrays themselves."""
    lent, own = parameters(target), parameters(module)
    for path, lender in borrowed_parameters(config).items():
        # A tied head is the embedding.
        own[path].set_value(lent.get(lender, lent["embedding.weight"]).get_value())


def piece_name(role: str, path: str) -> str:
    """The piece that holds a parameter of the `target` or the `drafter`."""
    apart = _APART.match(path)
    return f"{role}/{apart[0] if apart else 'top'}"


def save_piece(folder: Path, tensors: Mapping[str, np.ndarray]) -> PieceRecord:
    """Saves parameters as one Orbax checkpoint, which appears at once and complete."""
    records = {path: TensorRecord(value.dtype.name, value.shape) for path, value in sorted(tensors.items())}
    digest = hashlib.sha256()
    for path, record in records.items():
        digest.update(f"{path} {record.dtype} {record.shape}\n".encode())
        digest.update(tensors[path].reshape(-1).view(np.uint8).data)
    options = {path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in tensors}
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(dict(tensors), save_args=options))
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return PieceRecord(
        digest.hexdigest(), records, {file.relative_to(folder).as_posix(): _file_record(file) for file in files}
    )


def load_target(folder: Path, manifest: Manifest, dtype: jnp.dtype, placement: Placement | None = None) -> Target:
    """Restores the target, piece by piece, straight onto the devices of `placement` (default: the first device).

    Its config, and its experts, are as wide as the layout has them (`Layout.fitted`).
    """
    if all(name.startswith("drafter/") for name in manifest.pieces):
        raise UserError(f"{folder}: holds a drafter alone; name its target, and this folder as the drafter")
    placement, config = placement and placement.for_model(manifest.target), manifest.target
    module, stored = stored_parameters(config, dtype)
    if placement is not None and (fitted := placement.layout.fitted(config)) != config:
        module, wider = stored_parameters(fitted, dtype)
        restore(folder, manifest.pieces, "target", wider, placement, unpadded=stored)
    else:
        restore(folder, manifest.pieces, "target", stored, placement)
    spread(module, placement)
    return module


def load_drafter(
    folder: Path, manifest: Manifest, dtype: jnp.dtype, target: Target, placement: Placement | None = None
) -> Drafter | None:
    """Restores the drafter, if there is one; an embedding or head it does not own is the target's array itself."""
    if manifest.drafter is None:
        return None
    _check_drafter(f"{folder / MANIFEST}: drafter", manifest.drafter, target.config)
    module, stored = stored_parameters(manifest.drafter, dtype)
    restore(folder, manifest.pieces, "drafter", stored, placement)
    spread(module, placement)
    borrow(module, manifest.drafter, target)
    return module


def _check_drafter(where: str, drafter: DrafterConfig, target: ModelConfig) -> None:
    """Checks that a drafter, perhaps from another folder, fits the target."""
    for name, mine, theirs in (
        ("vocabulary", drafter.vocab_size, target.vocab_size),
        ("target hidden size", drafter.target_hidden_size, target.hidden_size),
    ):
        if mine != theirs:
            raise UserError(f"{where}: {name} is {mine}, but the target's is {theirs}")
    if max(drafter.boundaries) > target.num_layers:
        raise UserError(f"{where}: boundary {max(drafter.boundaries)} is past the target's {target.num_layers} layers")


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _file_record(file: Path) -> FileRecord:
    size = checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return FileRecord(size, checksum)


def restore(
    folder: Path,
    records: Mapping[str, PieceRecord],
    role: str,
    stored: Mapping[str, nnx.Variable],
    placement: Placement | None,
    unpadded: Mapping[str, nnx.Variable] | None = None,
) -> None:
    """Gives every variable of a role (`target`, `drafter`, ..) its stored value, cast to the variable's dtype.

    Variables that are to be wider than what is stored get zeros behind it; `unpadded` then says how large that must be.
    """
    as_recorded = stored if unpadded is None else unpadded
    pieces: dict[str, dict[str, nnx.Variable]] = {}
    for path, variable in stored.items():
        pieces.setdefault(piece_name(role, path), {})[path] = variable
    recorded = {name for name in records if name.startswith(f"{role}/")}
    if unequal := recorded ^ pieces.keys():
        raise UserError(f"{folder / MANIFEST}: pieces and config disagree on '{min(unequal)}'")
    for name, variables in pieces.items():
        expected = {path: as_recorded[path] for path in variables}
        _check_record(f"{folder / MANIFEST}: piece '{name}'", records[name], expected)
    names, processes, mine = list(pieces), jax.process_count(), jax.process_index()
    for first in range(0, len(names), processes):  # checked just before Orbax reads them, while they are in memory
        some = names[first : first + processes]
        agree(partial(_check_files, folder, {name: records[name] for name in some[mine : mine + 1]}))
        for name in some:
            for path, value in _restore(folder / name, records[name], pieces[name], placement).items():
                variable = pieces[name][path]
                variable.set_value(value.astype(variable.get_value().dtype))


def _check_record(where: str, record: PieceRecord, variables: Mapping[str, nnx.Variable]) -> None:
    """Checks a piece's record against the parameters of the model that the config describes."""
    if unequal := record.tensors.keys() ^ variables.keys():
        raise UserError(f"{where} and the config disagree on tensor {min(unequal)}")
    for path, variable in variables.items():
        tensor, wanted = record.tensors[path], variable.get_value()
        if tensor.shape != wanted.shape:
            raise UserError(f"{where}: tensor {path} has shape {tensor.shape}; the config asks for {wanted.shape}")
        allowed = FLOATS if wanted.dtype.name in FLOATS else (wanted.dtype.name,)
        if tensor.dtype not in allowed:
            raise UserError(f"{where}: tensor {path} has dtype {tensor.dtype}, which is not {' or '.join(allowed)}")


def _check_files(folder: Path, records: Mapping[str, PieceRecord]) -> None:
    recorded = {folder / piece / name: file for piece, record in records.items() for name, file in record.files.items()}
    for file, expected in recorded.items():
        with reported_as_user_error(f"{file}: cannot be read", OSError):
            found = _file_record(file)
        if found != expected:
            raise UserError(f"{file}: the file was changed or damaged after conversion; convert the checkpoint again")


def _restore(
    folder: Path, record: PieceRecord, variables: Mapping[str, nnx.Variable], placement: Placement | None
) -> dict[str, Array]:
    """Restores a piece in its stored dtypes, each tensor in its final shape and sharding."""
    shapes = {}
    for path, tensor in record.tensors.items():
        axes, shape = variables[path].get_metadata()["logical_axes"], variables[path].get_value().shape
        sharding = placement.sharding(axes, shape) if placement else SingleDeviceSharding(jax.devices()[0])
        shapes[path] = jax.ShapeDtypeStruct(shape, jnp.dtype(tensor.dtype), sharding=sharding)
    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata.tree
        for path, tensor in record.tensors.items():
            found = TensorRecord(jnp.dtype(metadata[path].dtype).name, tuple(metadata[path].shape))
            if found != tensor:
                raise UserError(f"{folder}: tensor {path} is {found.dtype}{found.shape}, not as {MANIFEST} records it")
        options = ocp.checkpoint_utils.construct_restore_args(shapes, strict=False)  # zeros where a shape is larger
        return checkpointer.restore(folder.absolute(), args=ocp.args.PyTreeRestore(shapes, restore_args=options))
