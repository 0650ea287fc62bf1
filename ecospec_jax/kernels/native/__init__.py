"""The C++ routines for CPUs: built on first use, registered as XLA custom calls.

The sources lie beside this file. Each instruction set is a file of its own; the library chooses when it is loaded.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ecospec_jax.kernels.formats import Fp8, Matrix, Mxfp4, Plain
from ecospec_jax.kernels.native.building import BuildError, build

TARGETS = ("ecospec_dense", "ecospec_grouped_experts")
_FORMATS = ("float32", "bfloat16", "mxfp4", "fp8")  # the order of enum Format in src/matrix.h


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, its custom calls registered with XLA; or why there is none, in one line."""
    try:
        library = ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        return str(error)
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    library.ecospec_variant.restype = ctypes.c_char_p
    return library


def unavailable() -> str | None:
    """None if the routines can be used, else the reason. Builds them if that was not done yet."""
    library = _load()
    return library if isinstance(library, str) else None


def library() -> ctypes.CDLL:
    """The library. Raises ValueError where there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise ValueError(f"backend 'cpu' cannot be used: {loaded}")
    return loaded


def variant() -> str:
    """Name of the instruction set in use: `avx512`, `avx2` or `baseline`."""
    return library().ecospec_variant().decode()


def format_attribute(storage: str) -> int:
    """The number that stands for a storage format in a custom call."""
    return _FORMATS.index(storage)


def operands(matrix: Matrix | None) -> tuple[Array, Array]:
    """Weight and scales of a matrix as a custom call takes them; absent ones are empty."""
    absent = jnp.zeros((0,), jnp.uint8)
    match matrix:
        case None:
            return absent, absent
        case Plain(weight):
            return weight, absent
        case Mxfp4(blocks, scales) | Fp8(blocks, scales):
            return blocks, scales


@dataclass(frozen=True)
class Traffic:
    """What the routines have read.

    Attributes:
        experts: (layer, expert) pairs whose weights were read, one for each time.
        weight_bytes: bytes of weights and scales, dense matrices included.
    """

    experts: int
    weight_bytes: int


@contextlib.contextmanager
def count_traffic() -> Iterator[list[Traffic]]:
    """Counts what the routines really read while the context is open, into the list that it yields; for debugging.

    One context at a time. Work that is still under way when the context closes is waited for by no one: block on
    results inside.
    """
    loaded = library()
    counted: list[Traffic] = []
    loaded.ecospec_count_traffic(1)
    try:
        yield counted
        experts, weight_bytes = ctypes.c_int64(), ctypes.c_int64()
        loaded.ecospec_traffic(ctypes.byref(experts), ctypes.byref(weight_bytes))
        counted.append(Traffic(experts.value, weight_bytes.value))
    finally:
        loaded.ecospec_count_traffic(0)
