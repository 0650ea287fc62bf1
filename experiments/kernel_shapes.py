"""Expert layers to time: published shapes, random weights, expert ids, what a call reads, and chained calls."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Fp8, Matrix, Mxfp4, Plain, Swiglu, grouped_experts
from ecospec_jax.kernels.formats import FP8_BLOCK, MXFP4_BLOCK

STORAGES = ("float32", "bfloat16", "mxfp4", "fp8")
# Rows of a matrix repeat after a prime number of them: quick to make, and no two experts are the same.
PATTERN_ROWS = 1021
MXFP4_MIDDLE = 3  # about the root mean square of all codes
FP8_SPREAD = 60  # standard deviation of the codes


@dataclass(frozen=True)
class Shape:
    """An expert layer as one device holds it.

    Attributes:
        name: of the model and its share.
        hidden, ffn, experts, k: D, F, E and experts a token.
        storages: formats to time it in.
        gpt_oss: gate and up alternate, all projections have biases, and the activation is `ClampedSwiglu`.
        cached: small enough to stay in the processor's cache, which it is then timed in.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    k: int
    storages: tuple[str, ...] = STORAGES
    gpt_oss: bool = False
    cached: bool = False

    @property
    def activation(self) -> Swiglu | ClampedSwiglu:
        return ClampedSwiglu() if self.gpt_oss else Swiglu()

    def layer_bytes(self, storage: str) -> int:
        """Bytes of one layer's experts."""
        shapes = jax.eval_shape(partial(_weights, self, storage, 1), jax.random.key(0))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("reference", 256, 48, 64, 4, ("float32", "bfloat16", "fp8"), cached=True),
        Shape("medium", 1024, 768, 64, 4),
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("qwen3-235b-tp8", 4096, 192, 128, 8, ("bfloat16",)),
        # 2880 / 8 = 360, padded to whole blocks of 32 and of 64 channels.
        Shape("gpt-oss-120b-tp8", 2880, 384, 128, 4, ("mxfp4", "bfloat16"), gpt_oss=True),
        Shape("deepseek-v3.1-tp8", 7168, 256, 256, 8, ("fp8", "bfloat16")),
    )
}
QUICK_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("quick", 128, 64, 8, 2),
        Shape("quick-gpt-oss", 128, 64, 8, 2, ("mxfp4", "bfloat16"), gpt_oss=True),
    )
}


def random_weights(shape: Shape, storage: str, layers: int) -> ExpertWeights:
    """Random experts of all layers, every array `[layers, E, ...]`; `layer` is still to be set."""
    return jax.jit(partial(_weights, shape, storage, layers))(jax.random.key(0))


def _weights(shape: Shape, storage: str, layers: int, key: Key[Array, ""]) -> ExpertWeights:
    lead = layers, shape.experts
    keys = iter(jax.random.split(key, 5))
    matrix = lambda out, inputs: _matrix(next(keys), lead, out, inputs, storage)  # noqa: E731
    down = matrix(shape.hidden, shape.ffn)
    if not shape.gpt_oss:
        return ExpertWeights((matrix(shape.ffn, shape.hidden), matrix(shape.ffn, shape.hidden)), down)
    dtype = jnp.float32 if storage == "float32" else jnp.bfloat16
    bias = lambda size: jax.random.normal(next(keys), (*lead, size), dtype)  # noqa: E731
    return ExpertWeights(matrix(2 * shape.ffn, shape.hidden), down, bias(2 * shape.ffn), bias(shape.hidden))


def _matrix(key: Key[Array, ""], lead: tuple[int, ...], outputs: int, inputs: int, storage: str) -> Matrix:
    values_key, scales_key = jax.random.split(key)
    row_of = jnp.arange(np.prod(lead) * outputs) % PATTERN_ROWS

    def spread(pattern: Array) -> Array:
        return pattern[row_of].reshape(*lead, outputs, *pattern.shape[1:])

    size = inputs**-0.5
    if storage == "mxfp4":
        groups = inputs // MXFP4_BLOCK
        blocks = jax.random.bits(values_key, (PATTERN_ROWS, groups, MXFP4_BLOCK // 2), jnp.uint8)
        middle = 127 + round(np.log2(size / MXFP4_MIDDLE))
        scales = jax.random.randint(scales_key, (PATTERN_ROWS, groups), middle - 1, middle + 1)
        return Mxfp4(spread(blocks), spread(scales.astype(jnp.uint8)))
    values = jax.random.normal(values_key, (PATTERN_ROWS, inputs))
    if storage == "fp8":
        codes = lax.bitcast_convert_type((values * FP8_SPREAD).astype(jnp.float8_e4m3fn), jnp.uint8)
        grid = (*lead, -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        scales = jax.random.uniform(scales_key, grid, minval=0.5, maxval=1.5) * (size / FP8_SPREAD)
        return Fp8(lax.bitcast_convert_type(spread(codes), jnp.float8_e4m3fn), scales)
    return Plain(spread((values * size).astype(storage)))


@dataclass(frozen=True)
class ExpertBytes:
    """Bytes of one expert: its matrices with their scales, and its biases."""

    matrices: int
    biases: int

    @property
    def total(self) -> int:
        return self.matrices + self.biases


def expert_bytes(experts: ExpertWeights) -> ExpertBytes:
    """Of a stack of layers."""
    places = experts.down.shape[0] * experts.count
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) // places  # noqa: E731
    return ExpertBytes(size((experts.gate_up, experts.down)), size((experts.gate_up_bias, experts.down_bias)))


def draw_ids(random: np.random.Generator, shape: Shape, calls: int, rows: int) -> Int[np.ndarray, "calls rows k"]:
    """The experts of each row of each call: any k different ones."""
    order = np.argsort(random.random((calls, rows, shape.experts)), axis=-1)
    return order[..., : shape.k].astype(np.int32)


def draw_ids_from_pools(
    random: np.random.Generator, shape: Shape, calls: int, rows: int, pool: int
) -> Int[np.ndarray, "calls rows k"]:
    """The same with exactly `pool` distinct experts a call; a row may name one twice."""
    places = rows * shape.k
    ids = np.empty((calls, places), np.int32)
    for call in ids:
        experts = random.permutation(shape.experts)[:pool]
        call[:] = random.permutation(np.concatenate([experts, random.choice(experts, places - pool)]))
    return ids.reshape(calls, rows, shape.k)


def count_distinct(ids_NTK: Int[np.ndarray, "calls rows k"]) -> int:
    """Distinct experts of each call, summed."""
    return sum(len(np.unique(ids)) for ids in ids_NTK)


Chain = Callable[[Array, Array, ExpertWeights], Array]


def chained_calls(shape: Shape, backend: str | None) -> Chain:
    """A jitted `f(x_TD, ids_NTK, experts)`: N calls, each in the next layer and on rows that need the result before."""

    @jax.jit
    def run(
        x_TD: Float[Array, "rows hidden"], ids_NTK: Int[Array, "calls rows k"], experts: ExpertWeights
    ) -> Float[Array, "rows hidden"]:
        layers = experts.down.shape[0]
        weights_TK = jnp.full(ids_NTK.shape[1:], 1 / shape.k, jnp.float32)

        def call(i: Array, y_TD: Array) -> Array:
            own = replace(experts, layer=i % layers)
            x = x_TD + y_TD / 8  # of a size that neither grows nor vanishes
            return grouped_experts(x, ids_NTK[i], weights_TK, own, activation=shape.activation, backend=backend)

        return lax.fori_loop(0, len(ids_NTK), call, jnp.zeros_like(x_TD))

    return run
