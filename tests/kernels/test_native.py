"""Building the C++ routines, what they count, that rows do not depend on each other, and the sanitizers."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.kernels import ClampedSwiglu, Swiglu, dense, grouped_experts, native
from ecospec_jax.kernels.native import building
from tests.kernels.expert_cases import random_experts

try:
    building.compiler()
except building.BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

SOURCES = Path(native.__file__).parent / "src"
SIZES = {"float32": (70, 53), "bfloat16": (70, 53), "mxfp4": (160, 96), "fp8": (200, 150)}


def test_they_build_here() -> None:
    """Where there is a compiler the tests of the `cpu` backend must not be skipped."""
    assert native.unavailable() is None
    assert native.variant() in ("avx512", "avx2", "baseline")


@pytest.mark.parametrize("storage", SIZES)
@pytest.mark.parametrize("rows", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_company(storage: str, rows: str) -> None:
    """Plain decoding and verification give the same numbers, so greedy outputs cannot differ by rounding."""
    random = np.random.default_rng(3)
    hidden, ffn = SIZES[storage]
    experts = random_experts(random, storage, hidden, ffn, experts=6)
    x_TD = jnp.asarray(random.normal(size=(16, hidden)), rows)
    ids_TK, weights_TK = jnp.asarray(random.integers(0, 6, (16, 3)), jnp.int32), jnp.float32(random.random((16, 3)))
    together = grouped_experts(x_TD, ids_TK, weights_TK, experts, backend="cpu")
    for count in (1, 2, 5, 7, 16):
        own = grouped_experts(x_TD[:count], ids_TK[:count], weights_TK[:count], experts, backend="cpu")
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(together[:count], np.float32))
        matrix = jax.tree.map(lambda part: part[0], experts.down)
        x_TF = x_TD[:, :ffn]
        np.testing.assert_array_equal(
            np.asarray(dense(x_TF[:count], matrix, backend="cpu"), np.float32),
            np.asarray(dense(x_TF, matrix, backend="cpu")[:count], np.float32),
        )


@pytest.mark.parametrize("storage", SIZES)
def test_traffic_is_that_of_the_distinct_experts(storage: str) -> None:
    random = np.random.default_rng(4)
    hidden, ffn = SIZES[storage]
    experts = random_experts(random, storage, hidden, ffn, experts=9)
    ids_TK = np.array([[1, 4, 4], [4, 7, 9], [-1, 1, 12]], np.int32)  # distinct: 1, 4, 7
    x_TD, weights_TK = jnp.float32(random.normal(size=(3, hidden))), jnp.float32(random.random((3, 3)))
    with native.count_traffic() as counted:
        grouped_experts(x_TD, jnp.asarray(ids_TK), weights_TK, experts, backend="cpu").block_until_ready()
    bytes_of_one = sum(part.nbytes for part in jax.tree.leaves((experts.gate_up, experts.down))) // 9
    assert counted == [native.Traffic(experts=3, weight_bytes=3 * bytes_of_one)]
    grouped_experts(x_TD, jnp.asarray(ids_TK), weights_TK, experts, backend="cpu").block_until_ready()
    with native.count_traffic() as counted:
        pass
    assert counted == [native.Traffic(0, 0)]


@pytest.mark.parametrize("variant", ["avx2", "baseline"])
def test_variants_agree(variant: str, tmp_path: Path) -> None:
    """The instruction sets that this processor would not choose, in a process that is told to."""
    random = np.random.default_rng(5)
    cases, expected = [], []
    for storage, (hidden, ffn) in SIZES.items():
        for activation, split in ((Swiglu(), True), (ClampedSwiglu(), False)):
            experts = random_experts(random, storage, hidden, ffn, experts=5, split=split)
            x_TD, weights_TK = np.float32(random.normal(size=(7, hidden))), np.float32(random.random((7, 2)))
            ids_TK = random.integers(0, 5, (7, 2)).astype(np.int32)
            cases.append((x_TD, ids_TK, weights_TK, experts, activation))
            expected.append(
                np.asarray(grouped_experts(*map(jnp.asarray, cases[-1][:3]), experts, activation=activation))
            )
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    script = (
        "import pickle, sys, jax.numpy as jnp, numpy as np\n"
        "from ecospec_jax.kernels import grouped_experts, native\n"
        "cases = pickle.load(open(sys.argv[1], 'rb'))\n"
        "apply = lambda x, i, w, e, a: grouped_experts(*map(jnp.asarray, (x, i, w)), e, activation=a, backend='cpu')\n"
        "out = [np.asarray(apply(*case)) for case in cases]\n"
        "pickle.dump((native.variant(), out), open(sys.argv[2], 'wb'))\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cases"), str(tmp_path / "out")],
        env={**os.environ, "ECOSPEC_JAX_CPU_VARIANT": variant, "PYTHONPATH": os.getcwd()},
        check=True,
    )
    used, out = pickle.loads((tmp_path / "out").read_bytes())
    if used != variant:
        pytest.skip(f"this processor has no {variant}")
    for ours, theirs in zip(out, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 2e-6 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CXX": "no-such-compiler"}, "the C++ compiler that CXX names, 'no-such-compiler', was not found"),
        ({"CXX": "false"}, "false failed"),
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "compiled routines cannot be kept in /proc/nowhere/ecospec_jax"),
    ],
)
def test_what_prevents_a_build_is_one_line(environment, expected: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(building.BuildError) as error:
        building.build()
    assert str(error.value).startswith(expected) and "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.so"))


def test_no_compiler(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(building.BuildError, match="no C\\+\\+ compiler was found"):
        building.compiler()


def test_a_build_is_kept(monkeypatch, tmp_path) -> None:
    """A second call compiles nothing, and other flags are another library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = building.build()
    assert first.is_file() and [first] == [path for path in tmp_path.rglob("*") if path.is_file()]
    calls = []
    monkeypatch.setattr(building, "_run", calls.append)
    assert building.build() == first and not calls


def test_sanitizers(tmp_path: Path) -> None:
    """Random shapes in buffers of exactly the right size, with AddressSanitizer and UBSan."""
    program = tmp_path / "sanitize"
    sanitize = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wno-psabi"]
    objects = []
    for path in [*building.files(), Path(__file__).parent / "sanitize.cc"]:
        if path.name == "handlers.cc":
            continue
        objects.append(str(tmp_path / f"{path.stem}.o"))
        flags = [*sanitize, *building.flags_for(path), f"-I{SOURCES}"]
        subprocess.run([building.compiler(), *flags, "-c", str(path), "-o", objects[-1]], check=True)
    subprocess.run([building.compiler(), *sanitize, *objects, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "cases" in done.stdout
