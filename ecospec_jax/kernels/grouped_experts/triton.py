"""Pallas kernels through Triton, for AMD GPUs and for NVIDIA GPUs before Hopper.

One kernel computes the gated activations of every block of rows, a second one the down projections. A program reads its
expert from the list of blocks; programs past the list's end do nothing. JAX has deprecated this way to Triton, so
nothing else depends on it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.formats import FP8_BLOCK, MXFP4_BLOCK, Fp8, Matrix, Mxfp4, Plain
from ecospec_jax.kernels.grouped_experts.activations import Activation
from ecospec_jax.kernels.grouped_experts.groups import expert_blocks
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights
from ecospec_jax.kernels.grouped_experts.widening import e2m1, e4m3, e8m0

MOST_PLACES = 64
OUT_TILE = 32
IN_TILE = {"bfloat16": 128, "float32": 32}  # within a block of fp8 scales; float32 products fill registers soon


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    activation: Activation,
    *,
    interpret: bool = False,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`. Accumulates in float32."""
    rows, hidden = x_TD.shape
    flat, first = experts.flat()
    for array in jax.tree.leaves(flat):
        # Pallas computes offsets in signed 32 bits for arrays of up to 4 GiB.
        if array.itemsize == 1 and 2**31 < array.size <= 2**32:
            raise ValueError(
                f"backend 'triton' cannot address {array.dtype}{list(array.shape)}: "
                "arrays of one-byte numbers need at most 2^31 or more than 2^32 of them"
            )
    # All rows at once, or about twice an expert's mean load.
    size = rows if rows <= MOST_PLACES else min(max(2 * expert_ids_TK.size // experts.count, 1), MOST_PLACES)
    blocks = expert_blocks(expert_ids_TK, combine_weights_TK, experts.count, size)
    lists = blocks.count[None], (first + blocks.expert_N).astype(jnp.int32), blocks.rows_NM
    dtype = jnp.promote_types(x_TD.dtype, jnp.float32 if experts.storage == "float32" else jnp.bfloat16)

    def call(kernel: Callable[..., None], out: int, out_dtype: Any, *operands: Any) -> Array:
        """Runs a kernel over blocks of rows and tiles of `out`; the result is `[N, M, out]`."""
        return pl.pallas_call(
            kernel,
            grid=(len(blocks.expert_N), pl.cdiv(out, OUT_TILE)),
            out_shape=jax.ShapeDtypeStruct((len(blocks.expert_N), size, out), out_dtype),
            compiler_params=plt.CompilerParams(num_warps=4 if _places(size) <= 32 else 8, num_stages=3),
            interpret=interpret,
        )(*lists, *operands)

    gate_up, down = jax.tree.map(_three_axes, (flat.gate_up, flat.down), is_leaf=lambda part: isinstance(part, Matrix))
    gate_up_kernel = functools.partial(_gate_up_kernel, activation=activation)
    h_NMF = call(gate_up_kernel, experts.ffn, dtype, x_TD, gate_up, flat.gate_up_bias)
    y_NMD = call(_down_kernel, hidden, jnp.float32, h_NMF, down, flat.down_bias)
    return blocks.combine(y_NMD, rows).astype(x_TD.dtype)


def _three_axes(matrix: Matrix) -> Matrix:
    """The same matrix with all bytes of a row of mxfp4 along one axis."""
    if isinstance(matrix, Mxfp4):
        return Mxfp4(matrix.blocks.reshape(*matrix.blocks.shape[:-2], -1), matrix.scales)
    return matrix


def _gate_up_kernel(
    count: Any, expert_N: Any, rows_NM: Any, x_TD: Any, gate_up: Any, bias: Any, h_NMF: Any, *, activation: Activation
) -> None:
    """A tile of gated activations of one block."""
    n, tile = pl.program_id(0), pl.program_id(1)
    dtype = h_NMF.dtype

    @pl.when(n < count[0])
    def _() -> None:
        _, size, ffn = h_NMF.shape
        rows, hidden = x_TD.shape
        place_M = jnp.arange(_places(size))
        row_M = plt.load(rows_NM.at[n, place_M], mask=place_M < size, other=rows)
        f_O = tile * OUT_TILE + jnp.arange(OUT_TILE)

        def x(d_K: Array) -> Array:
            return _load(x_TD, (row_M[None, :], rows), (d_K[:, None], hidden)).astype(dtype)

        if isinstance(gate_up, tuple):
            wanted = [(matrix, f_O) for matrix in gate_up]
            biases = bias or (None, None)
        else:  # rows of gate and up alternate
            wanted = [(gate_up, 2 * f_O), (gate_up, 2 * f_O + 1)]
            biases = bias, bias
        h_OM = activation(*_project(x, hidden, expert_N[n], wanted, biases, (OUT_TILE, len(place_M)), dtype))
        _store(h_NMF, n, place_M, f_O, h_OM)


def _down_kernel(count: Any, expert_N: Any, rows_NM: Any, h_NMF: Any, down: Any, bias: Any, y_NMD: Any) -> None:
    """A tile of the outputs of one block."""
    del rows_NM  # h already is by places
    n, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(n < count[0])
    def _() -> None:
        _, size, ffn = h_NMF.shape
        place_M = jnp.arange(_places(size))
        d_O = tile * OUT_TILE + jnp.arange(OUT_TILE)

        def h(f_K: Array) -> Array:
            return _load(h_NMF, n, (place_M[None, :], size), (f_K[:, None], ffn))

        (y_OM,) = _project(h, ffn, expert_N[n], [(down, d_O)], [bias], (OUT_TILE, len(place_M)), h_NMF.dtype)
        _store(y_NMD, n, place_M, d_O, y_OM)


def _project(
    x: Callable[[Array], Array],
    inputs: int,
    expert: Array,
    wanted: Sequence[tuple[Any, Array]],
    biases: Sequence[Any],
    shape: tuple[int, int],
    dtype: Any,
) -> tuple[Array, ...]:
    """Products of some rows of matrices, [out, M] each, with x, whose columns a function loads as [in, M]."""
    tile = IN_TILE[str(dtype)]

    def step(k: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        if isinstance(wanted[0][0], Mxfp4):  # a byte holds an even column and the odd one after it
            even_K = k * tile + 2 * jnp.arange(tile // 2)
            parts = x(even_K), x(even_K + 1)
        else:
            parts = (x(k * tile + jnp.arange(tile)),)
        return tuple(
            total + _product(matrix, expert, row_O, k * tile, tile, parts)
            for total, (matrix, row_O) in zip(totals, wanted, strict=True)
        )

    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in wanted)
    totals = lax.fori_loop(0, pl.cdiv(inputs, tile), step, zeros)

    def biased(total: Array, bias: Any, row_O: Array) -> Array:
        if bias is None:
            return total
        return total + _load(bias, expert, (row_O, bias.shape[1])).astype(jnp.float32)[:, None]

    return tuple(biased(total, bias, row_O) for total, bias, (_, row_O) in zip(totals, biases, wanted, strict=True))


def _product(matrix: Matrix, expert: Array, row_O: Array, start: Array, tile: int, parts: Sequence[Array]) -> Array:
    """Rows of a tile of columns of a matrix times x."""
    row_O1 = row_O[:, None]
    column_K = start + jnp.arange(tile)
    match matrix:
        case Plain(weight):
            _, out, inputs = weight.shape
            return _dot(_load(weight, expert, (row_O1, out), (column_K[None, :], inputs)), parts[0])
        case Fp8(weight, scales):
            _, out, inputs = weight.shape
            codes = _load(weight, expert, (row_O1, out), (column_K[None, :], inputs))
            # Not `astype`: NVIDIA GPUs before compute capability 8.9 cannot.
            w_OK = e4m3(lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32))
            scale_O = _load(scales, expert, (row_O // FP8_BLOCK, scales.shape[1]), start // FP8_BLOCK)
            return _dot(w_OK, parts[0]) * scale_O[:, None]
        case Mxfp4(blocks, scales):
            _, out, bytes_ = blocks.shape
            byte_B = start // 2 + jnp.arange(tile // 2)
            group_G = start // MXFP4_BLOCK + jnp.arange(tile // MXFP4_BLOCK)
            codes = _load(blocks, expert, (row_O1, out), (byte_B[None, :], bytes_)).astype(jnp.int32)
            scale_OG = e8m0(_load(scales, expert, (row_O1, out), (group_G[None, :], scales.shape[2])).astype(jnp.int32))
            scale_OB = jnp.broadcast_to(scale_OG[:, :, None], (*scale_OG.shape, MXFP4_BLOCK // 2)).reshape(codes.shape)
            even, odd = (
                _dot(e2m1(code) * scale_OB, x) for code, x in zip((codes & 0xF, codes >> 4), parts, strict=True)
            )
            return even + odd


def _dot(w_OK: Array, x_KM: Array) -> Array:
    """In float32; without TF32."""
    precision = lax.Precision.HIGHEST if x_KM.dtype == jnp.float32 else None
    return jnp.dot(w_OK.astype(x_KM.dtype), x_KM, precision=precision, preferred_element_type=jnp.float32)


def _load(array: Any, *indices: Any) -> Array:
    """Entries of an array; those at or past the limit of an (index, limit) pair are zero."""
    limits = [index for index in indices if isinstance(index, tuple)]
    mask = functools.reduce(jnp.logical_and, [index < limit for index, limit in limits])
    shape = jnp.broadcast_shapes(*(index.shape for index, _ in limits))
    where = tuple(jnp.broadcast_to(index[0], shape) if isinstance(index, tuple) else index for index in indices)
    return plt.load(array.at[where], mask=jnp.broadcast_to(mask, shape), other=jnp.zeros((), array.dtype))


def _store(array: Any, n: Array, place_M: Array, column_O: Array, value_OM: Array) -> None:
    """Stores the transpose of a tile, without what lies past the ends of an array `[N, M, out]`."""
    _, size, out = array.shape
    place, column = (jnp.broadcast_to(index, value_OM.shape) for index in (place_M[None, :], column_O[:, None]))
    mask = (place < size) & (column < out)
    plt.store(array.at[n, place, column], value_OM.astype(array.dtype), mask=mask)


def _places(size: int) -> int:
    """Rows of a block in the kernel: a power of two, at least what a matrix unit takes."""
    return max(16, pl.next_power_of_2(size))
