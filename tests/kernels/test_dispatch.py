"""Which backend serves, what is refused, and the transformations of the expert layer: vmap, grad, scan."""

import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Plain, Swiglu, grouped_experts, native
from ecospec_jax.kernels.grouped_experts import backends
from ecospec_jax.kernels.platform import notice
from tests.kernels.expert_cases import assert_close, definition, random_experts
from tests.tiny import quick_compilation  # noqa: F401

EXPERTS, HIDDEN, FFN, ROWS, K = 7, 6, 5, 4, 3
# mxfp4 needs multiples of 32; fp8 is ragged.
SIZES = {"float32": (6, 5), "bfloat16": (6, 5), "mxfp4": (64, 32), "fp8": (136, 9)}


def make(
    storage: str = "float32", seed: int = 0, *, rows: int = ROWS, k: int = K, **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, ExpertWeights]:
    """Arguments of the op."""
    random = np.random.default_rng(seed)
    hidden, ffn = SIZES[storage]
    x_TD = random.normal(size=(rows, hidden)).astype(np.float32)
    ids_TK = random.integers(-1, EXPERTS + 1, (rows, k)).astype(np.int32)
    weights_TK = (random.random((rows, k)) + 0.1).astype(np.float32)
    return x_TD, ids_TK, weights_TK, random_experts(random, storage, hidden, ffn, experts=EXPERTS, **options)


def lower(platforms: Sequence[str], backend: str | None = None, storage: str = "float32") -> Any:
    traced = jax.jit(functools.partial(grouped_experts, backend=backend)).trace(*make(storage))
    return traced.lower(lowering_platforms=tuple(platforms))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that an op is lowered to from now on; none of them is run."""
    names = []

    def record(backend: backends.Backend, x_TD: jax.Array, *_: Any) -> jax.Array:
        names.append(backend.name)
        return jnp.zeros_like(x_TD)

    monkeypatch.setattr(backends.Backend, "__call__", record)
    return names


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The notices given since."""
    notice.cache_clear()
    with caplog.at_level(logging.INFO, "ecospec_jax"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "ecospec_jax"]
    notice.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    reason = "no C++ compiler was found"
    monkeypatch.setattr(native, "_load", lambda: reason)
    assert native.unavailable() == reason
    return reason


class TestRefusals:
    def test_unknown_backend(self) -> None:
        message = "^unknown backend 'cuda'; known: reference, xla, cpu, mosaic_gpu, triton, mosaic_tpu$"
        with pytest.raises(ValueError, match=message):
            grouped_experts(*make(), backend="cuda")

    @pytest.mark.parametrize(
        ("backend", "platform", "others"),
        [
            ("cpu", "cuda", "reference, xla, mosaic_gpu, triton"),
            ("cpu", "tpu", "reference, xla, mosaic_tpu"),
            ("triton", "cpu", "reference, xla, cpu"),
            ("mosaic_gpu", "rocm", "reference, xla, triton"),
            ("mosaic_tpu", "cuda", "reference, xla, mosaic_gpu, triton"),
        ],
    )
    def test_backend_of_another_platform(self, backend: str, platform: str, others: str) -> None:
        message = f"^backend '{backend}' does not run on {platform}; on {platform}: {others}$"
        with pytest.raises(ValueError, match=message):
            lower([platform], backend)

    def test_backend_of_another_platform_without_jit(self) -> None:
        with pytest.raises(ValueError, match="^backend 'mosaic_tpu' does not run on cpu; on cpu: reference, xla, cpu"):
            grouped_experts(*make(), backend="mosaic_tpu")

    def test_unsupported_storage(self) -> None:
        message = (
            "^backend 'mosaic_gpu' does not support experts stored as float32; it supports bfloat16, mxfp4, fp8. "
            "On cuda, float32 is supported by: reference, xla, triton$"
        )
        with pytest.raises(ValueError, match=message):
            lower(["cuda"], "mosaic_gpu")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": np.zeros((ROWS, HIDDEN), np.float16)}, "x_TD: float16, expected float32 or bfloat16"),
            ({"x": np.zeros((ROWS, HIDDEN), np.int32)}, "x_TD: int32, expected float32 or bfloat16"),
            (
                {"x": np.zeros((2, HIDDEN), np.float32)},
                r"x_TD \[2, 6\], expert_ids_TK \[4, 3\] and combine_weights_TK \[4, 3\] disagree",
            ),
            ({"ids": np.zeros((ROWS, 2), np.int32)}, r"x_TD .*, expert_ids_TK \[4, 2\] and .* \[4, 3\] disagree"),
            ({"weights": np.zeros((3, K), np.float32)}, r"x_TD .* and combine_weights_TK \[3, 3\] disagree"),
            ({"x": np.zeros((ROWS, 8), np.float32)}, r"gate: \[7, 5, 6\], expected \[7, 5, 8\]"),
        ],
    )
    def test_rows(self, change: dict[str, np.ndarray], message: str) -> None:
        x, ids, weights, experts = make()
        arguments = {"x": x, "ids": ids, "weights": weights} | change
        with pytest.raises(ValueError, match=f"^{message}$"):
            grouped_experts(*arguments.values(), experts)

    @pytest.mark.parametrize(
        ("split", "change", "message"),
        [
            (True, {"gate": (7, 4, 6)}, r"gate: \[7, 4, 6\], expected \[7, 5, 6\]"),
            (True, {"up": (7, 5, 9)}, r"up: \[7, 5, 9\], expected \[7, 5, 6\]"),
            (True, {"up": (8, 5, 6)}, r"up: \[8, 5, 6\], expected \[7, 5, 6\]"),
            (True, {"up": (2, 7, 5, 6)}, r"up: \[2, 7, 5, 6\], expected \[7, 5, 6\]"),
            (False, {"gate_up": (7, 5, 6)}, r"gate_up: \[7, 5, 6\], expected \[7, 10, 6\]"),
            (True, {"down": (7, 8, 5)}, r"down: \[7, 8, 5\], expected \[7, 6, 5\]"),
            (True, {"gate": "bfloat16"}, "gate is stored as bfloat16, down as float32"),
            (False, {"gate_up": "bfloat16"}, "gate_up is stored as bfloat16, down as float32"),
            (True, {"up": "float16"}, r"up.weight: float16\[7, 5, 6\], expected float32 or bfloat16\[7, 5, 6\]"),
            (True, {"down": "int32"}, r"down.weight: int32\[7, 6, 5\], expected float32 or bfloat16\[7, 6, 5\]"),
            (True, {"gate_bias": (7, 6)}, r"gate_up_bias: float32\[7, 6\], expected float32 or bfloat16\[7, 5\]"),
            (True, {"up_bias": (6, 5)}, r"gate_up_bias: float32\[6, 5\], expected float32 or bfloat16\[7, 5\]"),
            (True, {"up_bias": "float16"}, r"gate_up_bias: float16\[7, 5\], expected float32 or bfloat16\[7, 5\]"),
            (False, {"gate_up_bias": (7, 5)}, r"gate_up_bias: float32\[7, 5\], expected float32 or bfloat16\[7, 10\]"),
            (True, {"down_bias": (7, 5)}, r"down_bias: float32\[7, 5\], expected float32 or bfloat16\[7, 6\]"),
            (True, {"down_bias": "int32"}, r"down_bias: int32\[7, 6\], expected float32 or bfloat16\[7, 6\]"),
        ],
    )
    def test_experts(self, split: bool, change: dict[str, Any], message: str) -> None:
        """Each array in turn gets another shape, or another dtype."""
        *rows, experts = make(split=split, biases=True)
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        names = names if split else ("gate_up", "down", "gate_up_bias", "down_bias")
        leaves, treedef = jax.tree.flatten(experts)
        for name, other in change.items():
            place = names.index(name)
            leaves[place] = leaves[place].astype(other) if isinstance(other, str) else np.zeros(other, np.float32)
        with pytest.raises(ValueError, match=f"^{message}$"):
            grouped_experts(*rows, jax.tree.unflatten(treedef, leaves))

    def test_biases_as_the_matrices(self) -> None:
        *rows, experts = make(biases=True)
        *_, interleaved = make(split=False, biases=True)
        for wrong in (
            replace(experts, gate_up_bias=interleaved.gate_up_bias),
            replace(interleaved, gate_up_bias=experts.gate_up_bias),
        ):
            with pytest.raises(ValueError, match="^gate_up_bias: one array for each array of gate_up is expected$"):
                grouped_experts(*rows, wrong)

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            (np.zeros(2, np.int32), r"layer: int32\[2\], expected one whole number"),
            (np.float32(1), r"layer: float32\[\], expected one whole number"),
            (None, r"gate: \[2, 7, 5, 6\], expected \[7, 5, 6\]"),
        ],
    )
    def test_layer(self, layer: Any, message: str) -> None:
        *rows, experts = make(layers=2)
        with pytest.raises(ValueError, match=f"^{message}$"):
            grouped_experts(*rows, replace(experts, layer=layer))

    def test_layer_without_a_stack(self) -> None:
        *rows, experts = make()
        with pytest.raises(ValueError, match=r"^gate: \[7, 5, 6\], expected \[7, 7, 5, 6\]$"):
            grouped_experts(*rows, replace(experts, layer=np.int32(0)))


class TestDefault:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A C++ compiler, and no GPU."""
        monkeypatch.setattr(native, "unavailable", lambda: None)
        monkeypatch.setattr(backends, "cuda_capability", lambda: None)

    def test_follows_the_platform_lowered_for(self, served: list[str], notices: Callable[[], list[str]]) -> None:
        """One traced function; nothing about this machine decides."""
        traced = jax.jit(grouped_experts).trace(*make())
        for platform, backend in (("cpu", "cpu"), ("cuda", "mosaic_gpu"), ("rocm", "triton"), ("tpu", "mosaic_tpu")):
            served.clear()
            if platform == "cuda":  # it takes no float32
                jax.jit(grouped_experts).trace(*make("bfloat16")).lower(lowering_platforms=("cuda",))
            else:
                traced.lower(lowering_platforms=(platform,))
            assert set(served) == {backend}
        assert not notices()

    def test_several_platforms_at_once(self, served: list[str]) -> None:
        lower(["cpu", "tpu"])
        assert set(served) == {"cpu", "mosaic_tpu"}

    @pytest.mark.parametrize("backend", ["reference", "xla"])
    @pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
    def test_these_run_everywhere(self, served: list[str], backend: str, platform: str) -> None:
        lower([platform], backend)
        assert set(served) == {backend}

    @pytest.mark.parametrize("capability", [9.0, 10.0, 12.0, None])
    def test_recent_gpu(
        self,
        monkeypatch: pytest.MonkeyPatch,
        served: list[str],
        notices: Callable[[], list[str]],
        capability: float | None,
    ) -> None:
        monkeypatch.setattr(backends, "cuda_capability", lambda: capability)
        lower(["cuda"], storage="bfloat16")
        assert set(served) == {"mosaic_gpu"} and not notices()

    def test_old_gpu(
        self, monkeypatch: pytest.MonkeyPatch, served: list[str], notices: Callable[[], list[str]]
    ) -> None:
        monkeypatch.setattr(backends, "cuda_capability", lambda: 8.0)
        for _ in range(2):
            lower(["cuda"])
        assert set(served) == {"triton"}
        assert notices() == ["expert layers use the 'triton' backend: compute capability 8.0 is below 9.0"]


def test_no_compiler(served: list[str], notices: Callable[[], list[str]], no_compiler: str) -> None:
    for _ in range(2):
        lower(["cpu"])
    assert set(served) == {"xla"}
    assert notices() == [f"expert layers use the slower 'xla' backend: {no_compiler}"]


def test_cpu_backend_without_compiler(no_compiler: str) -> None:
    with pytest.raises(ValueError, match="^backend 'cpu' cannot be used: " + re.escape(no_compiler)):
        lower(["cpu"], "cpu")


def test_capability_without_gpu() -> None:
    if jax.default_backend() == "cpu":
        assert backends.cuda_capability() is None


@pytest.mark.parametrize(
    ("backend", "platform", "call"),
    [
        ("mosaic_gpu", "cuda", "mosaic_gpu"),
        ("triton", "cuda", "triton"),
        ("triton", "rocm", "triton"),
        ("mosaic_tpu", "tpu", "tpu_custom_call"),
    ],
)
def test_kernel_is_in_the_program(backend: str, platform: str, call: str) -> None:
    """Lowered on a machine without the accelerator: the real kernel, as a custom call."""
    if not importlib.util.find_spec(f"{backends.__package__}.{backend}"):
        pytest.skip(f"there is no backend {backend} yet")
    random = np.random.default_rng(0)
    experts = random_experts(random, "bfloat16", 128, 256, experts=EXPERTS)
    arguments = jnp.ones((ROWS, 128), jnp.bfloat16), jnp.zeros((ROWS, K), jnp.int32), jnp.ones((ROWS, K)), experts
    traced = jax.jit(functools.partial(grouped_experts, backend=backend)).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert any("custom_call" in line and call in line for line in text.splitlines())


def test_without_jit() -> None:
    arguments = make(biases=True, layers=3)
    for backend in (None, "reference", "xla"):
        y_TD = grouped_experts(*arguments, backend=backend)
        assert_close(y_TD, definition(*arguments, Swiglu()), 2e-6)


def test_any_whole_number_type_of_ids() -> None:
    x_TD, ids_TK, weights_TK, experts = make()
    ids_TK = np.abs(ids_TK)
    results = [grouped_experts(x_TD, ids_TK.astype(dtype), weights_TK, experts) for dtype in ("int8", "uint8", "int32")]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def batched(count: int, **options: Any) -> tuple[Any, ...]:
    """Arguments with a further first dimension."""
    return jax.tree.map(lambda *parts: np.stack(parts), *(make(seed=seed, **options) for seed in range(count)))


def mapped(arguments: tuple[Any, ...], axes: Sequence[int | None]) -> tuple[jax.Array, np.ndarray]:
    """By vmap, and by a loop with the definition; arguments that are not mapped are those of the first entry."""
    entry = lambda argument, index: jax.tree.map(lambda part: part[index], argument)  # noqa: E731
    given = [entry(argument, 0) if axis is None else argument for argument, axis in zip(arguments, axes, strict=True)]
    function = jax.jit(jax.vmap(functools.partial(grouped_experts, backend="xla"), in_axes=tuple(axes)))
    count = len(arguments[0])
    looped = [
        [entry(argument, 0 if axis is None else index) for argument, axis in zip(arguments, axes, strict=True)]
        for index in range(count)
    ]
    return function(*given), np.stack([definition(*one, Swiglu()) for one in looped])


class TestVmap:
    @pytest.mark.parametrize(
        "axes",
        [(0, 0, 0, None), (0, None, None, None), (None, 0, None, None), (None, None, 0, None), (0, 0, 0, 0)]
        + [(None, None, None, 0), (0, None, None, 0)],
    )
    @pytest.mark.parametrize("options", [{}, {"biases": True, "layers": 3, "split": False}], ids=["plain", "layers"])
    def test_equals_a_loop(self, axes: tuple[int | None, ...], options: dict[str, Any]) -> None:
        y, expected = mapped(batched(5, **options), axes)
        assert_close(y, expected, 2e-6)

    @pytest.mark.parametrize("storage", ["mxfp4", "fp8"])
    @pytest.mark.parametrize("axes", [(0, 0, 0, None), (0, 0, 0, 0)])
    def test_quantised(self, axes: tuple[int | None, ...], storage: str) -> None:
        y, expected = mapped(batched(2, storage=storage), axes)
        assert_close(y, expected, 2e-6)

    def test_only_some_arrays_of_the_experts(self) -> None:
        """The index of the layer alone, and one matrix alone."""
        x_TD, ids_TK, weights_TK, experts = make(layers=3)
        function = functools.partial(grouped_experts, x_TD, ids_TK, weights_TK, backend="xla")
        y = jax.jit(jax.vmap(lambda layer: function(replace(experts, layer=layer))))(np.arange(3))
        layers = [replace(experts, layer=np.int32(layer)) for layer in range(3)]
        assert_close(y, np.stack([definition(x_TD, ids_TK, weights_TK, one, Swiglu()) for one in layers]), 2e-6)
        downs = [experts.down.weight * factor for factor in (1, np.float32(0.5))]
        y = jax.jit(jax.vmap(lambda down: function(replace(experts, down=Plain(down)))))(np.stack(downs))
        both = [replace(experts, down=Plain(down)) for down in downs]
        assert_close(y, np.stack([definition(x_TD, ids_TK, weights_TK, one, Swiglu()) for one in both]), 2e-6)

    def test_other_axes_and_nested(self) -> None:
        x_BTD, ids_BTK, weights_BTK, experts = batched(5)
        experts = jax.tree.map(lambda part: part[0], experts)
        expected = np.stack([definition(*rows, experts, Swiglu()) for rows in zip(x_BTD, ids_BTK, weights_BTK)])  # noqa: B905
        function = functools.partial(grouped_experts, backend="xla")
        y_TBD = jax.vmap(function, in_axes=(1, 0, 2, None), out_axes=1)(
            x_BTD.swapaxes(0, 1), ids_BTK, np.moveaxis(weights_BTK, 0, 2), experts
        )
        assert_close(np.swapaxes(y_TBD, 0, 1), expected, 2e-6)
        nested = jax.vmap(jax.vmap(function, in_axes=(0, 0, 0, None)), in_axes=(0, 0, 0, None))
        y_1BTD = nested(x_BTD[None], ids_BTK[None], weights_BTK[None], experts)
        assert_close(y_1BTD[0], expected, 2e-6)

    def test_shared_experts_are_read_once(self) -> None:
        """One call with all rows, no loop over entries; a loop where every entry has its own experts."""
        arguments = batched(5)
        shared = (*arguments[:3], jax.tree.map(lambda part: part[0], arguments[3]))
        jaxpr = str(jax.make_jaxpr(jax.vmap(grouped_experts, in_axes=(0, 0, 0, None)))(*shared))
        assert "scan" not in jaxpr and f"f32[{5 * ROWS},{HIDDEN}] = grouped_experts" in jaxpr
        assert "scan" in str(jax.make_jaxpr(jax.vmap(grouped_experts))(*arguments))


def pair_formula(
    x_TD: jax.Array, ids_TK: Any, weights_TK: jax.Array, experts: ExpertWeights, activation: Swiglu | ClampedSwiglu
) -> jax.Array:
    """The op for plain weights by gathering each pair's matrices; JAX knows how to differentiate it."""
    own = jax.tree.map(
        lambda part: part if experts.layer is None else part[experts.layer], replace(experts, layer=None)
    )
    valid_TK = (ids_TK >= 0) & (ids_TK < experts.count)
    one = jax.tree.map(lambda part: part[jnp.where(valid_TK, ids_TK, 0)], own)
    if isinstance(one.gate_up, tuple):
        (gate, up), (gate_bias, up_bias) = one.gate_up, one.gate_up_bias
    else:
        gate, up = (Plain(one.gate_up.weight[:, :, start::2]) for start in (0, 1))
        gate_bias, up_bias = (one.gate_up_bias[..., start::2] for start in (0, 1))
    g = jnp.einsum("tkfd,td->tkf", gate.weight, x_TD) + gate_bias
    u = jnp.einsum("tkfd,td->tkf", up.weight, x_TD) + up_bias
    if isinstance(activation, Swiglu):
        h = g / (1 + jnp.exp(-g)) * u
    else:
        g = jnp.where(g > activation.limit, activation.limit, g)
        u = jnp.where(u > activation.limit, activation.limit, jnp.where(u < -activation.limit, -activation.limit, u))
        h = g / (1 + jnp.exp(-activation.alpha * g)) * (u + 1)
    y = jnp.einsum("tkdf,tkf->tkd", one.down.weight, h) + one.down_bias
    return jnp.einsum("tk,tkd->td", jnp.where(valid_TK, weights_TK, 0), y)


class TestGradients:
    @pytest.mark.parametrize("activation", [Swiglu(), ClampedSwiglu(limit=0.5)], ids=["swiglu", "clamped"])
    @pytest.mark.parametrize(("split", "layers"), [(True, None), (False, None), (True, 3), (False, 3)])
    @pytest.mark.parametrize("backend", [None, "xla"])
    def test_of_everything(
        self, activation: Swiglu | ClampedSwiglu, split: bool, layers: int | None, backend: str | None
    ) -> None:
        """Rows, combine weights, matrices and biases; ids out of range and duplicates among them."""
        x_TD, ids_TK, weights_TK, experts = make(split=split, biases=True, layers=layers)
        ids_TK[0], ids_TK[1] = [-1, EXPERTS, 2], [3, 3, 3]
        cotangent_TD = np.random.default_rng(1).normal(size=x_TD.shape).astype(np.float32)

        def loss(function: Callable[..., jax.Array], x_TD: Any, weights_TK: Any, arrays: ExpertWeights) -> jax.Array:
            y_TD = function(x_TD, ids_TK, weights_TK, replace(arrays, layer=experts.layer), activation=activation)
            return jnp.sum(y_TD * cotangent_TD)

        arguments = x_TD, weights_TK, replace(experts, layer=None)
        gradients = [
            jax.jit(jax.grad(functools.partial(loss, function), argnums=(0, 1, 2)))(*arguments)
            for function in (functools.partial(grouped_experts, backend=backend), pair_formula)
        ]
        ours, theirs = (jax.tree.leaves(gradient) for gradient in gradients)
        assert jax.tree.structure(gradients[0]) == jax.tree.structure(arguments)
        for our, their in zip(ours, theirs, strict=True):
            assert np.asarray(their).any()
            assert_close(our, np.asarray(their, np.float64), 3e-6)

    @pytest.mark.parametrize("storage", SIZES)
    def test_of_rows_by_finite_differences(self, storage: str) -> None:
        """In float64, along random directions of rows and combine weights; quantised weights stay as they are."""
        x_TD, ids_TK, weights_TK, experts = make(storage, biases=True)
        random = np.random.default_rng(2)
        cotangent_TD = random.normal(size=x_TD.shape)

        def loss(x_TD: jax.Array, weights_TK: jax.Array) -> jax.Array:
            return jnp.sum(grouped_experts(x_TD, ids_TK, weights_TK, experts) * cotangent_TD.astype(np.float32))

        for_x, for_weights = jax.jit(jax.grad(loss, argnums=(0, 1)))(x_TD, weights_TK)
        for _ in range(3):
            along_x, along_weights, step = random.normal(size=x_TD.shape), random.normal(size=weights_TK.shape), 1e-5
            ends = [
                np.sum(
                    cotangent_TD
                    * definition(x_TD + s * along_x, ids_TK, weights_TK + s * along_weights, experts, Swiglu())
                )
                for s in (step, -step)
            ]
            slope = np.sum(for_x * along_x) + np.sum(for_weights * along_weights)
            size = np.linalg.norm(for_x) * np.linalg.norm(along_x)
            np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=0, atol=1e-6 * size)

    def test_dtypes(self) -> None:
        x_TD, ids_TK, weights_TK, experts = make("bfloat16")
        x_TD = x_TD.astype(jnp.bfloat16)
        loss = lambda x, weights, experts: jnp.sum(grouped_experts(x, ids_TK, weights, experts) ** 2)  # noqa: E731
        for_x, for_weights, for_experts = jax.grad(loss, argnums=(0, 1, 2))(x_TD, weights_TK, experts)
        assert for_x.dtype == jnp.bfloat16 and for_weights.dtype == jnp.float32
        assert {part.dtype for part in jax.tree.leaves(for_experts)} == {jnp.dtype("bfloat16")}

    def test_of_vmap_and_vmap_of(self) -> None:
        x_BTD, ids_BTK, weights_BTK, experts = jax.tree.map(jnp.asarray, batched(3))
        experts = jax.tree.map(lambda part: part[0], experts)
        loss = lambda *arguments: jnp.sum(jnp.sin(grouped_experts(*arguments)))  # noqa: E731
        of_vmap = jax.grad(lambda x: jnp.sum(jax.vmap(loss, in_axes=(0, 0, 0, None))(x, ids_BTK, weights_BTK, experts)))
        vmap_of = jax.vmap(jax.grad(loss), in_axes=(0, 0, 0, None))
        looped = np.stack([jax.grad(loss)(*rows, experts) for rows in zip(x_BTD, ids_BTK, weights_BTK)])  # noqa: B905
        assert looped.any(axis=(1, 2)).all()
        assert_close(jax.jit(of_vmap)(x_BTD), looped.astype(np.float64), 2e-6)
        assert_close(jax.jit(vmap_of)(x_BTD, ids_BTK, weights_BTK, experts), looped.astype(np.float64), 2e-6)


@pytest.mark.parametrize("backend", [None, "reference", "xla"])
def test_scan_over_layers(backend: str | None) -> None:
    """The index of the layer may be the loop's counter."""
    x_TD, ids_TK, weights_TK, experts = make(layers=3)

    def layer(x_TD: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        own = replace(experts, layer=index)
        return x_TD + grouped_experts(x_TD, ids_TK, weights_TK, own, backend=backend), None

    y_TD, _ = jax.jit(lambda x: jax.lax.scan(layer, x, jnp.arange(3)))(x_TD)
    expected_TD = x_TD.astype(np.float64)
    for index in range(3):
        own = replace(experts, layer=np.int32(index))
        expected_TD = expected_TD + definition(expected_TD, ids_TK, weights_TK, own, Swiglu())
    assert_close(y_TD, expected_TD, 2e-6)
