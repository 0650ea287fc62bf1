"""What one thread can read at best: the time that kernels which must read weights are compared with."""

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from ecospec_jax import UserError
from ecospec_jax.errors import reported_as_user_error
from ecospec_jax.kernels.native.building import BuildError, compiler
from experiments.environment import last_level_cache_bytes

SOURCE = Path(__file__).with_suffix(".cc")
AHEAD_BYTES = 8192
CACHES = 16  # times the last-level cache
LINE = 256  # bytes of one turn of the loop


@dataclass(frozen=True)
class ReadTime:
    """Seconds of the same read, without and with software prefetching."""

    plain: float
    prefetch: float

    @property
    def best(self) -> float:
        return min(self.plain, self.prefetch)


class ReadCeiling:
    """Reads memory that XLA has allocated, as it has the weights; every read goes on where the last one ended."""

    def __init__(self, size: int) -> None:
        """`size` bytes; many times the last-level cache, unless reads from the cache are wanted."""
        self._read = _compiled()
        self._buffer = jnp.arange(max(size // 4, LINE), dtype=jnp.uint32).block_until_ready()
        self._at = 0

    def seconds(self, size: int) -> ReadTime:
        """Reads `size` bytes twice, from different places."""
        return ReadTime(self._seconds(size, 0), self._seconds(size, AHEAD_BYTES))

    def _seconds(self, size: int, ahead: int) -> float:
        total, start = 0.0, self._buffer.unsafe_buffer_pointer()
        while size > 0:
            part = min(size, self._buffer.nbytes - self._at)
            total += self._read(start + self._at, part, ahead)
            size -= part
            self._at = (self._at + part) // LINE * LINE % (self._buffer.nbytes // LINE * LINE)
        return total


def _compiled() -> "ctypes._NamedFuncPointer":
    with tempfile.TemporaryDirectory() as folder, reported_as_user_error("the memory read", BuildError, OSError):
        library = Path(folder) / "read_ceiling.so"
        command = [compiler(), "-O3", "-march=native", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{SOURCE}: cannot be compiled: {(done.stderr.splitlines() or ['?'])[0]}")
        read = ctypes.CDLL(str(library)).read_seconds
    read.restype = ctypes.c_double
    read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    return read


def beyond_cache() -> int:
    """A number of bytes of which caches keep little."""
    return CACHES * (last_level_cache_bytes() or 32 << 20)
