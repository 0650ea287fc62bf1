"""Reads safetensors files, single or sharded, without copying: tensors are views of memory-mapped files.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, offsets into the data), the data.
The safetensors library cannot give numpy bfloat16 or float8 arrays, hence this reader.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ecospec_jax.errors import UserError, reported_as_user_error

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_PICKLES = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth")
DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies; `begin` and `end` are offsets into the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsReader:
    """The tensors of a checkpoint folder.

    Attributes:
        listing: the file that lists all tensors: the index, or the only safetensors file.
        tensors: by name.
        headers: raw header of each file, with the file's size and time of change; together they tell sources apart.
    """

    def __init__(self, folder: Path) -> None:
        """Reads and checks every header of the folder."""
        self.tensors: dict[str, Tensor] = {}
        self.headers: dict[str, tuple[bytes, int, int]] = {}
        self._data: dict[Path, np.memmap] = {}
        if (folder / SINGLE_FILE).is_file():
            self.listing = folder / SINGLE_FILE
            self._add_file(self.listing)
        elif (folder / INDEX_FILE).is_file():
            self.listing = folder / INDEX_FILE
            self._add_shards(_read_index(self.listing))
        else:
            raise UserError(_nothing_to_read(folder))

    def read(self, name: str) -> np.ndarray:
        """The tensor as a view of its file."""
        tensor = self.tensors[name]
        if tensor.file not in self._data:
            self._data[tensor.file] = np.memmap(tensor.file, np.uint8, mode="r")
        return self._data[tensor.file][tensor.begin : tensor.end].view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _add_shards(self, index: dict[str, str]) -> None:
        folder = self.listing.parent
        for shard in sorted(set(index.values())):
            if not (folder / shard).is_file():
                raise UserError(f"{folder / shard}: no such file, though {INDEX_FILE} lists it")
            self._add_file(folder / shard)
        for name, shard in index.items():
            if name not in self.tensors or self.tensors[name].file != folder / shard:
                raise UserError(f"{folder / shard}: no tensor {name}, though {INDEX_FILE} lists it there")
        if unlisted := self.tensors.keys() - index.keys():
            name = min(unlisted)
            raise UserError(f"{self.tensors[name].file}: tensor {name} is not listed in {INDEX_FILE}")

    def _add_file(self, file: Path) -> None:
        with reported_as_user_error(f"{file}: cannot be read", OSError), file.open("rb") as stream:
            status = file.stat()
            length = int.from_bytes(stream.read(8), "little")
            if status.st_size < 8 + length or length > _MAX_HEADER_BYTES:
                raise UserError(f"{file}: truncated, or no safetensors file")
            header = stream.read(length)
        self.headers[file.name] = (header, status.st_size, status.st_mtime_ns)
        for name, tensor in _parse(file, header, status.st_size).items():
            if name in self.tensors:
                raise UserError(f"{file}: tensor {name} is in {self.tensors[name].file.name} too")
            self.tensors[name] = tensor


def _read_index(file: Path) -> dict[str, str]:
    with reported_as_user_error(f"{file}: cannot be read", OSError, ValueError):
        index = json.loads(file.read_text())
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{file}: no 'weight_map' from tensor names to file names")
    return weight_map


def _parse(file: Path, header: bytes, size: int) -> dict[str, Tensor]:
    """The tensors of a header, which must cover the data exactly."""
    with reported_as_user_error(f"{file}: the header is no JSON object", ValueError, AttributeError):
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    tensors = {name: _tensor(file, name, entry, 8 + len(header)) for name, entry in entries.items()}
    end = 8 + len(header)
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != end:
            raise UserError(f"{file}: tensor {name} overlaps another or leaves a gap before it")
        if tensor.end > size:
            raise UserError(f"{file}: truncated within tensor {name}")
        end = tensor.end
    if end != size:
        raise UserError(f"{file}: {size - end} bytes after the last tensor")
    return tensors


def _tensor(file: Path, name: str, entry: Any, data_begin: int) -> Tensor:
    with reported_as_user_error(f"{file}: tensor {name} is ill described", KeyError, TypeError, ValueError):
        dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
        begin, end = (data_begin + int(offset) for offset in entry["data_offsets"])
    if dtype not in DTYPES:
        raise UserError(f"{file}: tensor {name} has the unknown dtype {dtype}")
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise UserError(f"{file}: tensor {name} of shape {shape} and dtype {dtype} cannot have {end - begin} bytes")
    return Tensor(file, dtype, shape, begin, end)


def _nothing_to_read(folder: Path) -> str:
    for pattern in _PICKLES:
        if pickles := sorted(folder.glob(pattern)):
            return (
                f"{pickles[0]}: PyTorch pickles are not read; write safetensors first: cd '{folder}' && python -c "
                '"import glob, torch, safetensors.torch as s; s.save_file({k: v.clone() for f in '
                f"glob.glob('{pattern}') for k, v in torch.load(f, weights_only=True).items()}}, '{SINGLE_FILE}')\""
            )
    return f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}"
