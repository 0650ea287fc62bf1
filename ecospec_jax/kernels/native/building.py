"""Compiling the C++ sources, once per source, compiler and kind of processor."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import jax

_SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-w")
_AVX2 = ("-mavx2", "-mfma")
# Instruction sets of files that need one; the others run on any processor.
_FILE_FLAGS = {
    "avx2.cc": _AVX2,
    "avx512.cc": (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "bf16"))),
}


class BuildError(Exception):
    """The routines cannot be compiled here; the message is one line."""


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first of c++, g++ and clang++ that there is."""
    if asked := os.environ.get("CXX"):
        if shutil.which(asked) is None:
            raise BuildError(f"the C++ compiler that CXX names, '{asked}', was not found")
        return asked
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return name
    raise BuildError("no C++ compiler was found (c++, g++, clang++, or CXX)")


def cache_folder() -> Path:
    """Where compiled libraries are kept: `$XDG_CACHE_HOME/ecospec_jax`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ecospec_jax"


def files() -> list[Path]:
    """The sources to compile for this kind of processor."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return [path for path in sorted(_SOURCES.glob("*.cc")) if x86 or path.name not in _FILE_FLAGS]


def flags_for(path: Path) -> tuple[str, ...]:
    """Compiler flags of a source that needs instructions not every processor has; the others need none."""
    return _FILE_FLAGS.get(path.name, ())


def build() -> Path:
    """Compiles the library unless the cache has it; returns its path.

    Raises:
        BuildError: no compiler, a compiler that fails, or a cache that cannot be written.
    """
    cxx, include = compiler(), jax.ffi.include_dir()
    key = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        key.update(path.name.encode() + path.read_bytes())
    told = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    for part in (cxx, told, platform.machine(), version("jaxlib"), repr((_FLAGS, _FILE_FLAGS))):
        key.update(part.encode())
    target = cache_folder() / f"routines-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name

            def compile_file(path: Path) -> Path:
                compiled = Path(folder) / f"{path.stem}.o"
                flags = (*_FLAGS, *flags_for(path), f"-I{include}")
                _run([cxx, *flags, "-c", str(path), "-o", str(compiled)])
                return compiled

            with ThreadPoolExecutor() as pool:
                compiled = list(pool.map(compile_file, files()))
            _run([cxx, "-shared", *map(str, compiled), "-o", str(built)])
            os.replace(built, target)
    except OSError as error:
        raise BuildError(f"compiled routines cannot be kept in {target.parent}: {error.strerror}") from error
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{command[0]} failed: {lines[0]}")
