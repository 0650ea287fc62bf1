"""An op on rows whose implementation is chosen when it is lowered, by the platform it is lowered for.

`lax.platform_dependent` would do, but it traces the kernels of all platforms wherever it is used: slow to compile, and
an error for every combination of sizes or formats that a kernel of another platform does not take.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_logger = logging.getLogger("ecospec_jax")


@functools.cache
def notice(line: str) -> None:
    """Logs a warning of one line, once."""
    _logger.warning(line)


@dataclass(frozen=True)
class Lowering:
    """What an op is lowered for.

    Attributes:
        platform: one of `PLATFORMS`.
        partitioned: XLA divides the computation among several devices. It cannot divide a kernel: it would gather the
            whole weights on each device.
    """

    platform: str
    partitioned: bool = False


class RowOp:
    """`op(rows, weights, **static)`: a function of arrays `[T, ...]` and a pytree of weights, with a result `[T, ...]`.

    It becomes `implement(lowering, *rows, weights, **static)` when it is lowered. `reference` takes the same arguments
    without the first, in plain JAX: its shape is the result's, its gradient is the op's. Under `vmap`
    shared weights see more rows, and weights that differ one call each.
    """

    def __init__(self, name: str, implement: Callable[..., Array], reference: Callable[..., Array]) -> None:
        """Static arguments must be hashable."""
        self._reference = reference
        self._functions: dict[Any, Callable[..., Array]] = {}
        self._primitive = Primitive(name)
        self._primitive.def_impl(lambda *leaves, **params: _jitted(self._primitive, **params)(*leaves))
        self._primitive.def_abstract_eval(self._abstract)
        for platform in PLATFORMS:
            rule = functools.partial(self._lower, implement, platform)
            mlir.register_lowering(self._primitive, rule, platform=platform)

    @staticmethod
    def _lower(implement: Callable[..., Array], platform: str, context: Any, *operands: Any, **params: Any) -> Any:
        # Within shard_map there is no such count: there each device's part is a computation of its own.
        partitioned = getattr(context.module_context.axis_context, "num_devices", 1) > 1

        def lowered(*leaves: Array, treedef: Any, static: Any) -> Array:
            rows, weights = jax.tree.unflatten(treedef, leaves)
            return implement(Lowering(platform, partitioned), *rows, weights, **dict(static))

        return mlir.lower_fun(lowered, multiple_results=False)(context, *operands, **params)

    def __call__(self, rows: tuple[Array, ...], weights: Any, **static: Any) -> Array:
        """Applies the op."""
        key = tuple(sorted(static.items()))
        if key not in self._functions:
            self._functions[key] = self._differentiable(key)
        return self._functions[key](rows, weights)

    def _abstract(self, *leaves: Any, treedef: Any, static: Any) -> Any:
        rows, weights = jax.tree.unflatten(treedef, leaves)
        shape = jax.eval_shape(functools.partial(self._reference, **dict(static)), *rows, weights)
        return ShapedArray(shape.shape, shape.dtype)

    def _batchable(self, static: Any) -> Callable[..., Array]:
        @jax.custom_batching.custom_vmap
        def call(rows: tuple[Array, ...], weights: Any) -> Array:
            leaves, treedef = jax.tree.flatten((rows, weights))
            return self._primitive.bind(*leaves, treedef=treedef, static=static)

        @call.def_vmap
        def _(size: int, batched: Any, rows: tuple[Array, ...], weights: Any) -> tuple[Array, bool]:
            def spread(part: Array, is_batched: bool) -> Array:
                return part if is_batched else jnp.broadcast_to(part, (size, *part.shape))

            rows = jax.tree.map(spread, rows, batched[0])
            if any(jax.tree.leaves(batched[1])):
                weights = jax.tree.map(spread, weights, batched[1])
                return jax.lax.map(lambda arguments: call(*arguments), (rows, weights)), True
            merged = call(jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), rows), weights)
            return merged.reshape(size, -1, *merged.shape[1:]), True

        return call

    def _differentiable(self, static: Any) -> Callable[..., Array]:
        function = jax.custom_vjp(self._batchable(static))

        def forward(rows: tuple[Array, ...], weights: Any) -> tuple[Array, Any]:
            return function(rows, weights), (rows, weights)

        def backward(arguments: Any, cotangent: Array) -> Any:
            def reference(rows: tuple[Array, ...], weights: Any) -> Array:
                return self._reference(*rows, weights, **dict(static))

            _, pull_back = jax.vjp(reference, *arguments)
            return pull_back(cotangent)

        function.defvjp(forward, backward)
        return function


@functools.cache
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., Array]:
    return jax.jit(functools.partial(primitive.bind, **params))
