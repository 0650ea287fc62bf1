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

ConfigT = TypeVar("ConfigT", bound=ModelConfig | DrafterConfig)
FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Assembly:
    """One parameter: `build` makes it of the named tensors, all of the given shape and of one of the dtypes."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    build: Callable[[Sequence[np.ndarray]], np.ndarray]
    dtypes: tuple[str, ...] = FLOATS

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> "Assembly":
        """A tensor as it is."""
        return Assembly((name,), shape, lambda tensors: tensors[0])

    @staticmethod
    def stacked(names: Sequence[str], shape: tuple[int, ...]) -> "Assembly":
        """Tensors stacked along a new first axis; `shape` is that of the result."""
        return Assembly(tuple(names), shape[1:], np.stack)

    @staticmethod
    def half(name: str, shape: tuple[int, ...], index: int) -> "Assembly":
        """The first (0) or second (1) half of the rows (axis 1) of a tensor; `shape` is that of the result."""
        experts, rows, columns = shape
        block = slice(index * rows, (index + 1) * rows)
        return Assembly((name,), (experts, 2 * rows, columns), lambda tensors: tensors[0][:, block])

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
        return np.require(self.build([reader.read(name) for name in self.names]), requirements=["C", "A", "E"])


@dataclass(frozen=True)
class Part(Generic[ConfigT]):
    """A target or drafter ready to be converted.

    Attributes:
        role: `target` or `drafter`.
        source: its `config.json`.
        assemblies: by parameter path; all that a converted folder stores.
    """

    role: str
    source: HFConfig
    config: ConfigT
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


def translate(path: str, table: Mapping[str, str]) -> str:
    """The source's name of a parameter by the first pattern of `table` that matches the whole path."""
    for pattern, name in table.items():
        if match := re.fullmatch(pattern, path):
            return match.expand(name)
    raise KeyError(path)
