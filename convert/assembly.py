"""How our parameters are put together from the tensors of a source checkpoint.

A family module says, for each parameter, which tensors it is made of. Everything is checked on the headers alone: no
tensor may be missing, of another shape or dtype, or left over.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from convert.hf_config import HFConfig
from convert.safetensors_reader import SafetensorsReader
from ecospec_jax.config import DrafterConfig, ModelConfig
from ecospec_jax.errors import UserError
from ecospec_jax.predictor_config import BackboneConfig

ConfigT_co = TypeVar("ConfigT_co", bound=ModelConfig | DrafterConfig | BackboneConfig, covariant=True)
FLOATS = ("BF16", "F16", "F32")
_COMPARED_BYTES = 1 << 24


@dataclass(frozen=True)
class Assembly:
    """One parameter: `build` makes it of the named tensors, all of the given shape and of one of the dtypes.

    `fault` says what is wrong with the numbers of a tensor, if anything; it is asked when they are read.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    build: Callable[[Sequence[np.ndarray]], np.ndarray]
    dtypes: tuple[str, ...] = FLOATS
    fault: Callable[[np.ndarray], str | None] | None = None

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> "Assembly":
        """A tensor as it is."""
        return Assembly((name,), shape, lambda tensors: tensors[0], dtypes)

    @staticmethod
    def transposed(name: str, shape: tuple[int, ...]) -> "Assembly":
        """A tensor with its last two axes exchanged; `shape` is that of the result."""
        *lead, rows, columns = shape
        return Assembly((name,), (*lead, columns, rows), lambda tensors: tensors[0].swapaxes(-1, -2))

    @staticmethod
    def stacked(names: Sequence[str], shape: tuple[int, ...]) -> "Assembly":
        """Tensors stacked along a new first axis; `shape` is that of the result."""
        return Assembly(tuple(names), shape[1:], np.stack)

    @staticmethod
    def part(name: str, shape: tuple[int, ...], sizes: Sequence[int], index: int, axis: int = 0) -> "Assembly":
        """Part `index` of a tensor that holds parts of these `sizes` along `axis`; `shape` is that of the result."""
        fused = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
        first = sum(sizes[:index])
        place = (slice(None),) * axis + (slice(first, first + sizes[index]),)
        return Assembly((name,), fused, lambda tensors: tensors[0][place])

    @staticmethod
    def experts(prefix: str, kind: str, shape: tuple[int, ...], reader: SafetensorsReader) -> "Assembly":
        """All experts' `gate`, `up` or `down`, one by one or fused: `gate_up_proj` holds gate rows, then up rows."""
        if f"{prefix}.gate_up_proj" not in reader.tensors:
            return Assembly.stacked([f"{prefix}.{expert}.{kind}_proj.weight" for expert in range(shape[0])], shape)
        if kind == "down":
            return Assembly.whole(f"{prefix}.down_proj", shape)
        return Assembly.part(f"{prefix}.gate_up_proj", shape, [shape[1]] * 2, ("gate", "up").index(kind), axis=1)

    def check(self, reader: SafetensorsReader) -> None:
        """Checks the named tensors' presence, shapes and dtypes."""
        for name in self.names:
            tensor = reader.tensors.get(name)
            if tensor is None:
                raise UserError(f"{reader.listing}: tensor {name} is missing")
            if tensor.shape != self.shape:
                raise UserError(f"{tensor.file}: tensor {name} has shape {tensor.shape}, not {self.shape}")
            if tensor.dtype not in self.dtypes:
                raise UserError(
                    f"{tensor.file}: tensor {name} has dtype {tensor.dtype}, not {' or '.join(self.dtypes)}"
                )
            if tensor.dtype != reader.tensors[self.names[0]].dtype:
                raise UserError(f"{tensor.file}: tensor {name} has another dtype than {self.names[0]}")

    def read(self, reader: SafetensorsReader) -> np.ndarray:
        """The parameter, contiguous; a view of the file where nothing has to move."""
        tensors = [reader.read(name) for name in self.names]
        if self.fault is not None:
            for name, tensor in zip(self.names, tensors, strict=True):
                if fault := self.fault(tensor):
                    raise UserError(f"{reader.tensors[name].file}: tensor {name} {fault}")
        return np.require(self.build(tensors), requirements=["C", "A", "E"])


@dataclass(frozen=True)
class Part(Generic[ConfigT_co]):
    """A target, drafter or backbone ready to be converted.

    Attributes:
        role: `target`, `drafter` or `backbone`.
        source: its `config.json`.
        assemblies: by parameter path; all that a converted folder stores.
    """

    role: str
    source: HFConfig
    config: ConfigT_co
    reader: SafetensorsReader
    assemblies: Mapping[str, Assembly]

    @property
    def folder(self) -> Path:
        """The source folder."""
        return self.source.file.parent

    def check(self, unstored: frozenset[str] = frozenset()) -> None:
        """Checks all assemblies; a tensor that none uses is refused unless it is in `unstored`."""
        for assembly in self.assemblies.values():
            assembly.check(self.reader)
        used = {name for assembly in self.assemblies.values() for name in assembly.names}
        if unused := self.reader.tensors.keys() - used - unstored:
            name = min(unused)
            raise UserError(f"{self.reader.tensors[name].file}: tensor {name} has no place in {self.config.family}")


def check_target(
    part: Part[ModelConfig | BackboneConfig],
    *,
    tied: bool,
    head: str,
    embedding: str,
    unstored: frozenset[str] = frozenset(),
) -> None:
    """`Part.check` for a target or backbone.

    The tensor of a tied head may be there all the same, if it equals the embedding's.
    """
    redundant = tied and head in part.reader.tensors
    part.check(unstored=unstored | frozenset({head} if redundant else ()))
    if redundant and not equal(part.reader, head, part.reader, embedding):
        file = part.reader.tensors[head].file
        raise UserError(f"{file}: tensor {head} differs from {embedding}, though tie_word_embeddings is true")


def equal(reader: SafetensorsReader, name: str, other_reader: SafetensorsReader, other_name: str) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, compared block by block."""
    first, second = reader.tensors[name], other_reader.tensors[other_name]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    mine, others = reader.read(name).reshape(-1), other_reader.read(other_name).reshape(-1)
    mine, others = mine.view(np.uint8), others.view(np.uint8)
    blocks = range(0, mine.size, _COMPARED_BYTES)
    return all(np.array_equal(mine[at : at + _COMPARED_BYTES], others[at : at + _COMPARED_BYTES]) for at in blocks)


def translate(path: str, table: Mapping[str, str]) -> str:
    """The source's name of a parameter by the first pattern of `table` that matches the whole path."""
    for pattern, name in table.items():
        if match := re.fullmatch(pattern, path):
            return match.expand(name)
    raise KeyError(path)
