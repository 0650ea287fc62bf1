"""Every backend of the expert layer against a float64 definition; what each must do is one class."""

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Fp8, Matrix, Mxfp4, Swiglu, grouped_experts, native
from tests.kernels.expert_cases import (
    assert_close,
    decode,
    definition,
    pairwise,
    poison,
    random_experts,
    random_matrix,
)
from tests.tiny import quick_compilation  # noqa: F401

PACKAGE = "ecospec_jax.kernels.grouped_experts"
# The error of float32 arithmetic; the rounding of a bfloat16 result on top; bfloat16 arithmetic.
FLOAT32, ROUNDED, BFLOAT16 = 2e-6, 2**-8 + 2e-6, 2**-7


@dataclass(frozen=True)
class Backend:
    """What a backend takes, and how exact it is.

    Attributes:
        sizes: two unequal sizes for each storage it takes; each serves as hidden and as expert width.
        rows: numbers of rows; fewer where it is interpreted.
        patterns: how many of the 256 sets of used experts are tried.
        bounds: error in relation to the largest output, by the dtype of the rows.
        interpreted: called as the module's `grouped_experts(..., interpret=True)`, past the choice of a backend.
        any_scale: fp8 scales that are no powers of two stay exact.
    """

    sizes: Mapping[str, tuple[int, int]]
    rows: tuple[int, ...] = (1, 2, 5, 9, 16, 33, 130)
    patterns: int = 256
    bounds: Mapping[str, float] = field(default_factory=lambda: {"float32": FLOAT32, "bfloat16": ROUNDED})
    interpreted: bool = False
    any_scale: bool = True


# mxfp4 needs multiples of 32; fp8 sizes are ragged.
ODD_SIZES = {"float32": (21, 146), "bfloat16": (21, 146), "mxfp4": (96, 160), "fp8": (136, 200)}
BACKENDS = {
    name: backend
    for name, backend in {
        "reference": Backend(ODD_SIZES),
        "xla": Backend(ODD_SIZES),
        # Rows in bfloat16 are rounded between the projections too.
        "cpu": Backend(ODD_SIZES, bounds={"float32": FLOAT32, "bfloat16": ROUNDED + 1e-3}),
        # It takes multiples of 64, and computes and returns bfloat16.
        "mosaic_gpu": Backend(
            {"bfloat16": (64, 128), "mxfp4": (64, 192), "fp8": (64, 192)},
            rows=(1, 9, 33),
            patterns=16,
            bounds={"float32": BFLOAT16, "bfloat16": BFLOAT16},
            interpreted=True,
            any_scale=False,
        ),
        "mosaic_tpu": Backend(
            ODD_SIZES,
            rows=(1, 2, 5, 9, 16, 33),
            patterns=16,
            bounds={"float32": FLOAT32, "bfloat16": ROUNDED + 1e-3},
            interpreted=True,
        ),
        "triton": Backend(
            ODD_SIZES,
            rows=(1, 2, 5, 9, 16, 33),
            patterns=16,
            bounds={"float32": FLOAT32, "bfloat16": ROUNDED + 1e-3},
            interpreted=True,
        ),
    }.items()
    if importlib.util.find_spec(f"{PACKAGE}.{name}")
}
EXPERTS = 8
MANY_EXPERTS = 13
SWIGLU, CLAMPED, NARROW = Swiglu(), ClampedSwiglu(), ClampedSwiglu(limit=1.25, alpha=0.9)


@dataclass(frozen=True)
class Case:
    """One combination; see `test_case`."""

    storage: str
    rows: int
    k: int
    x_dtype: str
    activation: Swiglu | ClampedSwiglu
    wide: bool
    split: bool
    biases: bool
    layers: int | None

    def __str__(self) -> str:
        flags = [name for name in ("wide", "split", "biases", "layers") if getattr(self, name)]
        act = {SWIGLU: "swiglu", CLAMPED: "clamped", NARROW: "narrow"}[self.activation]
        return "-".join([self.storage, f"T{self.rows}", f"K{self.k}", self.x_dtype, act, *flags])


def cases_of(backend: Backend) -> list[Case]:
    factors = {
        "storage": backend.sizes,
        "rows": backend.rows,
        "k": [1, 4, 8],
        "x_dtype": ["float32", "bfloat16"],
        "activation": [SWIGLU, CLAMPED, NARROW],
        "wide": [False, True],
        "split": [True, False],
        "biases": [False, True],
        "layers": [None, 3],
    }
    return [Case(**case) for case in pairwise(factors)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        pairs = [(name, case) for name, backend in BACKENDS.items() for case in cases_of(backend)]
        metafunc.parametrize(("name", "case"), pairs, ids=[f"{name}-{case}" for name, case in pairs])
    elif "storage" in metafunc.fixturenames:
        metafunc.parametrize(
            ("name", "storage"), [(name, storage) for name, backend in BACKENDS.items() for storage in backend.sizes]
        )
    elif "name" in metafunc.fixturenames:
        metafunc.parametrize("name", BACKENDS)


@functools.cache
def compiled(name: str, activation: Swiglu | ClampedSwiglu) -> Callable[..., jax.Array]:
    """One function for each backend and activation, so that equal shapes are compiled once."""
    if BACKENDS[name].interpreted:
        module = importlib.import_module(f"{PACKAGE}.{name}")
        return jax.jit(lambda *args: module.grouped_experts(*args, activation, interpret=True))
    return jax.jit(functools.partial(grouped_experts, activation=activation, backend=name))


def random_rows(random: np.random.Generator, rows: int, hidden: int, k: int, dtype: str = "float32") -> tuple:
    """Rows and combine weights."""
    x_TD, weights_TK = random.normal(size=(rows, hidden)), random.random((rows, k)) + 0.1
    return x_TD.astype(jnp.dtype(dtype)), weights_TK.astype(jnp.dtype(dtype))


def overwrite(matrix: Matrix, rows: slice, values: np.ndarray) -> Matrix:
    """`rows` of a matrix replaced by `values`, exactly: 0 or one power of two; fp8 scales must be powers of two."""
    if isinstance(matrix, Mxfp4):
        blocks, scales = matrix.blocks.copy(), matrix.scales.copy()
        ones = (values != 0).reshape(*values.shape[:-1], -1, 16, 2)
        blocks[..., rows, :, :] = ones[..., 0] * 0x02 + ones[..., 1] * 0x20  # code 2 is 1.0
        scales[..., rows, :] = 127 + int(np.log2(values.max() or 1))
        return Mxfp4(blocks, scales)
    weight = matrix.weight.copy()
    scale = 1.0
    if isinstance(matrix, Fp8):
        i, j = np.arange(weight.shape[-2])[:, None], np.arange(weight.shape[-1])
        scale = matrix.scales[..., i // 128, j // 128][..., rows, :]
    weight[..., rows, :] = (values / scale).astype(weight.dtype)
    return replace(matrix, weight=weight)


class TestBackend:
    """What each backend must do. Another one joins with a line in `BACKENDS`."""

    @pytest.fixture
    def backend(self, name: str) -> Backend:
        if name == "cpu" and (reason := native.unavailable()):
            pytest.skip(reason)
        return BACKENDS[name]

    @pytest.fixture
    def first(self, backend: Backend) -> tuple[str, int, int]:
        """A storage with its sizes."""
        storage = next(iter(backend.sizes))
        return storage, *backend.sizes[storage]

    @pytest.fixture
    def check(self, name: str, backend: Backend) -> Callable[..., np.ndarray]:
        """Runs the op with NaN in everything unused, compares with the definition, returns the result."""

        def check(
            x_TD: Any, ids_TK: Any, weights_TK: Any, experts: ExpertWeights, activation: Any = SWIGLU
        ) -> np.ndarray:
            ids_TK = np.asarray(ids_TK, np.int32)
            poisoned = poison(experts, set(ids_TK.ravel().tolist()))
            y_TD = compiled(name, activation)(x_TD, ids_TK, weights_TK, poisoned)
            assert y_TD.dtype == x_TD.dtype
            expected_TD = definition(x_TD, ids_TK, weights_TK, experts, activation)
            assert_close(y_TD, expected_TD, backend.bounds[str(x_TD.dtype)])
            dead = ~((ids_TK >= 0) & (ids_TK < experts.count)).any(axis=1)
            np.testing.assert_array_equal(np.asarray(y_TD, np.float32)[dead], 0)
            return np.asarray(y_TD)

        return check

    def test_every_pattern_of_used_experts(self, backend: Backend, first, check) -> None:
        """All sets of used experts, or evenly many of them, the empty and the full one included."""
        random = np.random.default_rng(0)
        storage, hidden, ffn = first
        experts = random_experts(random, storage, hidden, ffn, experts=EXPERTS)
        for pattern in np.linspace(0, 2**EXPERTS - 1, backend.patterns).round().astype(int):
            used = [expert for expert in range(EXPERTS) if pattern >> expert & 1]
            x_TD, weights_TK = random_rows(random, 5, hidden, 3)
            ids_TK = random.permutation(np.resize(used or [EXPERTS], 15)).reshape(5, 3)
            check(x_TD, ids_TK, weights_TK, experts)

    def test_case(self, backend: Backend, check, case: Case) -> None:
        """Any two choices together: sizes, storages, activations, layouts; each case has all kinds of ids."""
        random = np.random.default_rng(case.rows * 10 + case.k)
        small, large = backend.sizes[case.storage]
        hidden, ffn = (large, small) if case.wide else (small, large)
        experts = random_experts(
            random,
            case.storage,
            hidden,
            ffn,
            experts=MANY_EXPERTS,
            split=case.split,
            biases=case.biases,
            layers=case.layers,
        )
        x_TD, weights_TK = random_rows(random, case.rows, hidden, case.k, case.x_dtype)
        some = [0, 1, 3, 4, 7, MANY_EXPERTS - 1]
        none = [-1, -MANY_EXPERTS, MANY_EXPERTS, MANY_EXPERTS + 5]
        ids_TK = random.choice(some * 2 + none, (case.rows, case.k))
        ids_TK[0, 0] = MANY_EXPERTS - 1
        if case.rows > 1:
            ids_TK[case.rows // 2] = random.choice(none, case.k)
        check(x_TD, ids_TK, weights_TK, experts, case.activation)

    def test_duplicates_add_up(self, first, check) -> None:
        random = np.random.default_rng(1)
        storage, hidden, ffn = first
        experts = random_experts(random, storage, hidden, ffn, experts=EXPERTS)
        x_TD, weights_TK = random_rows(random, 5, hidden, 3)
        check(x_TD, [[4, 4, 4], [6, 4, 6], [7, 7, 7], [0, 0, 4], [4, 0, 7]], weights_TK, experts)

    def test_ids_that_are_no_experts_are_skipped(self, first, check) -> None:
        """Neither clamped nor wrapped around; a row that has only such ids is zero."""
        random = np.random.default_rng(2)
        storage, hidden, ffn = first
        experts = random_experts(random, storage, hidden, ffn, experts=EXPERTS)
        x_TD, weights_TK = random_rows(random, 5, hidden, 3)
        largest, smallest = 2**31 - 1, -(2**31)
        ids_TK = [[-1, 3, EXPERTS], [-1, -1, -1], [smallest, largest, 5], [EXPERTS, -EXPERTS, 2 * EXPERTS], [5, 3, 5]]
        y_TD = check(x_TD, ids_TK, weights_TK, experts)
        assert not y_TD[[1, 3]].any() and y_TD[[0, 2, 4]].any(axis=1).all()

    def test_skipped_pairs_may_hold_nan(self, name: str, backend: Backend, first) -> None:
        """NaN in a dead row and in the combine weight of a skipped id reaches nothing."""
        random = np.random.default_rng(3)
        storage, hidden, ffn = first
        experts = random_experts(random, storage, hidden, ffn, experts=EXPERTS)
        x_TD, weights_TK = random_rows(random, 5, hidden, 3)
        ids_TK = np.array([[2, -1, 6], [-1, EXPERTS, -1], [6, 6, EXPERTS], [-1, -1, -1], [2, 2, 2]], np.int32)
        expected_TD = definition(x_TD, ids_TK, weights_TK, experts, SWIGLU)
        x_TD[[1, 3]] = np.nan
        weights_TK[(ids_TK < 0) | (ids_TK >= EXPERTS)] = np.nan
        y_TD = compiled(name, SWIGLU)(x_TD, ids_TK, weights_TK, poison(experts, {2, 6}))
        assert_close(y_TD, expected_TD, backend.bounds["float32"])
        np.testing.assert_array_equal(y_TD[np.array([1, 3])], 0)

    def test_one_expert_many_times(self, first, check) -> None:
        random = np.random.default_rng(4)
        storage, hidden, ffn = first
        experts = random_experts(random, storage, hidden, ffn, experts=EXPERTS)
        x_TD, weights_TK = random_rows(random, 40, hidden, 3)
        check(x_TD, np.full((40, 3), 6), weights_TK, experts)

    def test_each_layer_of_a_stack(self, first, check) -> None:
        """The index is traced: one compilation for all layers."""
        random = np.random.default_rng(5)
        storage, hidden, ffn = first
        experts = random_experts(random, storage, hidden, ffn, experts=EXPERTS, biases=True, layers=3)
        x_TD, weights_TK = random_rows(random, 5, hidden, 3)
        ids_TK = random.choice([-1, 0, 2, EXPERTS - 1, EXPERTS], (5, 3))
        results = [check(x_TD, ids_TK, weights_TK, replace(experts, layer=np.int32(layer))) for layer in range(3)]
        assert not any(np.array_equal(a, b) for a, b in itertools.combinations(results, 2))

    def test_decoded_weights_bit_for_bit(self, name: str, backend: Backend, storage: str) -> None:
        """Rows that are unit vectors, and experts that hand one matrix through unchanged.

        Up: silu(32) is 32 in floating point, so gate = 32, down = identity and the combine weight 1/32 leave up x. Down
        likewise. Gate: alpha 0 makes the clamped activation gate/2 where up is zero. All codes, widely varying scales.
        """
        random = np.random.default_rng(6)
        ffn, hidden = backend.sizes[storage]
        linear = ClampedSwiglu(limit=2.0**100, alpha=0.0)
        rows = np.eye(hidden, dtype=np.float32)
        ids_TK = np.ones((hidden, 1), np.int32)
        odd, even, all_rows = slice(1, None, 2), slice(0, None, 2), slice(None)
        constant, nothing = np.full((ffn, hidden), 32.0), np.zeros((ffn, hidden))
        identity = np.eye(ffn, hidden)

        def matrix(outputs: int, inputs: int, powers: bool = True) -> Matrix:
            return random_matrix(random, (2, outputs, inputs), storage, any_code=True, powers=powers)

        def recovered(experts: ExpertWeights, activation: Any, weight: float) -> np.ndarray:
            weights_TK = np.full((hidden, 1), weight, np.float32)
            return np.asarray(compiled(name, activation)(rows, ids_TK, weights_TK, poison(experts, {1}))).T

        def agree(ours: np.ndarray, theirs: np.ndarray) -> None:
            assert theirs.any()
            np.testing.assert_array_equal(ours, theirs)

        hand_down = overwrite(matrix(hidden, ffn), all_rows, identity.T)
        probed = matrix(ffn, hidden, powers=not backend.any_scale)
        silu_one = overwrite(matrix(ffn, hidden), all_rows, constant)
        y = recovered(ExpertWeights((silu_one, probed), hand_down), SWIGLU, 1 / 32)
        agree(y[:ffn], decode(probed)[1])
        zero_up = overwrite(matrix(ffn, hidden), all_rows, nothing)
        y = recovered(ExpertWeights((probed, zero_up), hand_down), linear, 2.0)
        agree(y[:ffn], decode(probed)[1])

        both = matrix(2 * ffn, hidden)
        y = recovered(ExpertWeights(overwrite(both, even, constant), hand_down), SWIGLU, 1 / 32)
        agree(y[:ffn], decode(both)[1, odd])
        y = recovered(ExpertWeights(overwrite(both, odd, nothing), hand_down), linear, 2.0)
        agree(y[:ffn], decode(both)[1, even])

        probed = matrix(hidden, ffn, powers=not backend.any_scale)
        hand_up = overwrite(matrix(ffn, hidden), all_rows, identity)
        y = recovered(ExpertWeights((silu_one, hand_up), probed), SWIGLU, 1 / 32)
        agree(y[:, :ffn], decode(probed)[1])


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if not BACKENDS[backend].interpreted])
@pytest.mark.parametrize(("rows", "k"), [(0, 3), (5, 0)])
def test_nothing_to_do(backend: str, rows: int, k: int) -> None:
    experts = random_experts(np.random.default_rng(7), "float32", 21, 34, experts=EXPERTS)
    x_TD, ids_TK = jnp.ones((rows, 21)), jnp.zeros((rows, k), jnp.int32)
    y_TD = grouped_experts(x_TD, ids_TK, jnp.ones((rows, k)), experts, backend=backend)
    np.testing.assert_array_equal(y_TD, np.zeros((rows, 21)))


def test_covering_cases() -> None:
    """The cases of a backend contain every pair of choices, in far fewer cases than all combinations."""
    factors = {"a": range(5), "b": range(4), "c": range(2), "d": range(3)}
    cases = pairwise(factors)
    for (one, some), (other, more) in itertools.combinations(factors.items(), 2):
        assert {(case[one], case[other]) for case in cases} == set(itertools.product(some, more))
    assert len(cases) < 30
