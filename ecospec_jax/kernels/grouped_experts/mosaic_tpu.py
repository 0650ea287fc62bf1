"""Pallas kernel for TPUs: one pass over the distinct experts, each weight read once.

The grid is (blocks of rows, tiles of F). A step computes a tile of the gated activations and multiplies it with the
same tile of the down projection, so nothing between the projections leaves the chip. The list of experts is prefetched
as scalars; meanwhile the pipeline fetches the next step's weights.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.formats import FP8_BLOCK, MXFP4_BLOCK, Fp8, Matrix, Mxfp4, Plain
from ecospec_jax.kernels.grouped_experts.activations import Activation
from ecospec_jax.kernels.grouped_experts.groups import ExpertBlocks, expert_blocks
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights
from ecospec_jax.kernels.grouped_experts.widening import e2m1, e8m0

LANES = 128
MOST_PLACES = 128  # rows of a block: about where the matrix unit, not the memory, becomes the bound
MXFP4_TILE = 512  # of F: 16 groups; more would not fit into the smallest VMEM, of 16 MiB
TILE_BYTES = 2 << 20  # of one matrix, where F can be cut so
VMEM_BYTES = 60 << 20


def memory_layouts(experts: ExpertWeights) -> ExpertWeights:
    """The layout of each array that the kernel reads in place; an array in another one is copied first.

    A TPU pads the two minor axes of an array to whole tiles. XLA's default layout, which pads least, is the kernel's
    for float32, bfloat16 and fp8, but not always for mxfp4: put such arrays on the device as
    `jax.experimental.layout.Format(layout, sharding)`.
    """
    stacked = len(experts.down.shape) - 3

    def order(*axes: int) -> Any:
        return Layout((*range(stacked), *(axis + stacked for axis in axes)))

    def weight_axes(matrix: Matrix) -> tuple[int, ...]:
        return (0, 2, 1) if _flipped(*matrix.shape[-2:]) else (0, 1, 2)

    def of_part(part: Matrix | Array) -> Any:
        match part:
            case Plain():
                return Plain(order(*weight_axes(part)))
            case Fp8():
                return Fp8(order(*weight_axes(part)), order(0, 1, 2))
            case Mxfp4():
                return Mxfp4(order(0, 2, 3, 1), order(0, 2, 1))
            case _:
                return Layout(tuple(range(part.ndim)))

    return jax.tree.map(of_part, experts, is_leaf=lambda part: isinstance(part, Matrix))


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
    rows, _ = x_TD.shape
    native = 32 // x_TD.dtype.itemsize  # rows of a native tile
    together = rows <= MOST_PLACES
    # All rows at once, or about twice an expert's mean load.
    places = rows if together else min(max(2 * expert_ids_TK.size // experts.count, 1), MOST_PLACES)
    places = _round_up(places, native)
    blocks = expert_blocks(expert_ids_TK, combine_weights_TK, experts.count, places)
    if not together:
        y_NMD = _call(blocks.gather(x_TD), blocks.weights_NM, blocks, experts, activation, interpret)
        blocks = dataclasses.replace(blocks, weights_NM=jnp.ones_like(blocks.weights_NM))
        return blocks.combine(y_NMD, rows).astype(x_TD.dtype)
    # Every expert works on all rows: combine weights of 0 do what gathering would.
    x_BMD = jnp.pad(x_TD, ((0, places - rows), (0, 0)))[None]
    block_N1 = jnp.arange(len(blocks.expert_N))[:, None]
    weights_NM = jnp.zeros(blocks.rows_NM.shape).at[block_N1, blocks.rows_NM].add(blocks.weights_NM, mode="drop")
    return _call(x_BMD, weights_NM, blocks, experts, activation, interpret)[0, :rows].astype(x_TD.dtype)


def _call(
    x_BMD: Array,
    weights_NM: Array,
    blocks: ExpertBlocks,
    experts: ExpertWeights,
    activation: Activation,
    interpret: bool,
) -> Array:
    """The weighted outputs, [B, M, D] in float32: of each block or, where B is 1, of all blocks together."""
    batch, places, hidden = x_BMD.shape
    flat, first = experts.flat()
    expert_N = first + blocks.expert_N
    tile = _tile(experts)
    rows_tile = tile if experts.split else 2 * tile
    gate_up = flat.gate_up if isinstance(flat.gate_up, tuple) else (flat.gate_up,)
    gate_up_bias = flat.gate_up_bias if isinstance(flat.gate_up_bias, tuple) else (flat.gate_up_bias,) * len(gate_up)
    dtype = jnp.promote_types(x_BMD.dtype, jnp.float32 if experts.storage == "float32" else jnp.bfloat16)
    gate_up_tiles = tuple(_tiles(matrix, 0, rows_tile, dtype) for matrix in gate_up)
    down_tiles = _tiles(flat.down, 1, tile, dtype)

    # A byte of mxfp4 holds an even number and an odd one, so x is [B, parity, M, D / 2].
    x_BPMC = x_BMD.reshape(batch, places, -1, down_tiles.parities).transpose(0, 3, 1, 2)

    def row_block(n: Array) -> Array | int:
        return 0 if batch == 1 else n

    def bias_operand(bias: Array | None, size: int, tiled: bool) -> tuple[Array | None, pl.BlockSpec | None]:
        if bias is None:
            return None, None
        return bias[expert_N, None].astype(jnp.float32), pl.BlockSpec(
            (None, 1, size), lambda n, t, *_: (n, 0, t * tiled)
        )

    operands = {
        "x": (x_BPMC, pl.BlockSpec((None, *x_BPMC.shape[1:]), lambda n, *_: (row_block(n), 0, 0, 0))),
        "weights": (weights_NM[..., None], pl.BlockSpec((None, places, 1), lambda n, *_: (n, 0, 0))),
        "gate_up": _unzip(
            tiles.operands(matrix, expert_N) for tiles, matrix in zip(gate_up_tiles, gate_up, strict=True)
        ),
        "gate_up_bias": _unzip(bias_operand(bias, rows_tile, True) for bias in gate_up_bias),
        "down": down_tiles.operands(flat.down, expert_N),
        "down_bias": bias_operand(flat.down_bias, hidden, False),
    }
    kernel = functools.partial(
        _kernel, gate_up=gate_up_tiles, down=down_tiles, activation=activation, together=batch == 1
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(blocks.count, 1), pl.cdiv(experts.ffn, tile)),
            in_specs=[{name: spec for name, (_, spec) in operands.items()}],
            out_specs=pl.BlockSpec((None, places, hidden), lambda n, *_: (row_block(n), 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, places, hidden), jnp.float32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="grouped_experts",
    )(expert_N, blocks.count[None], {name: operand for name, (operand, _) in operands.items()})


def _kernel(
    expert_N: Any,
    count: Any,
    refs: dict[str, Any],
    y_MD: Any,
    *,
    gate_up: tuple["_Tiles", ...],
    down: "_Tiles",
    activation: Activation,
    together: bool,
) -> None:
    """One tile of F of one block."""
    del expert_N  # for the index maps only
    n, t = pl.program_id(0), pl.program_id(1)

    @pl.when((t == 0) & (n == 0 if together else True))
    def _() -> None:
        y_MD[...] = jnp.zeros_like(y_MD)

    @pl.when(count[0] > 0)
    def _() -> None:
        parts = [refs["x"][parity] for parity in range(down.parities)]
        projected = [
            tiles.product(parts, matrix, t) + (0 if bias is None else bias[...])
            for tiles, matrix, bias in zip(gate_up, refs["gate_up"], refs["gate_up_bias"], strict=True)
        ]
        if len(projected) == 1:  # gate and up alternate: h is at the even places
            projected.append(jnp.roll(projected[0], -1, axis=1))
        alternating = 3 - len(gate_up)
        h_MF, weight_M1 = activation(*projected), refs["weights"][...]
        place = lax.broadcasted_iota(jnp.int32, h_MF.shape, 1)
        # Past F, and at odd places, h is of garbage; for rows that did not choose this expert it means nothing.
        real = (
            (place < alternating * (down.inputs - t * down.size)) & (place & (alternating - 1) == 0) & (weight_M1 != 0)
        )
        h_MF = jnp.where(real, h_MF * weight_M1, 0).astype(down.dtype)
        stride = alternating * down.parities
        parts = [_every(h_MF, alternating * parity, stride) for parity in range(down.parities)]
        y_MD[...] += down.product(parts, refs["down"], t)

        if refs["down_bias"] is not None:

            @pl.when(t == 0)
            def _() -> None:
                y_MD[...] += weight_M1 * refs["down_bias"][...]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """A matrix, cut along `out` (axis 0) or `in` (axis 1): its operands, and what the kernel does with a tile.

    Attributes:
        out: all rows of the matrix.
        inputs: all columns.
        axis: which of them is cut.
        size: of a tile along it.
        dtype: of the factors; products are added up in float32.
    """

    out: int
    inputs: int
    axis: int
    size: int
    dtype: Any
    parities: ClassVar = 1

    def operands(self, matrix: Any, expert_N: Array) -> tuple[tuple[Array, ...], tuple[pl.BlockSpec, ...]]:
        """The arrays as the kernel reads them, and their tiles."""
        raise NotImplementedError

    def product(self, parts: list[Array], refs: tuple[Any, ...], t: Array) -> Array:
        """Multiplies x, given as one part or as its even and its odd columns, with tile t."""
        raise NotImplementedError

    def spec(self, array: Array, axis: int, size: int) -> pl.BlockSpec:
        """Blocks of one expert, cut along one axis of the array."""
        block = (None, *(size if i == axis else length for i, length in enumerate(array.shape) if i > 0))
        return pl.BlockSpec(
            block, lambda n, t, expert_N, _: (expert_N[n], *(t * (i == axis) for i in range(1, array.ndim)))
        )

    @property
    def flipped(self) -> bool:
        """Whether the operand is `[in, out]`."""
        return _flipped(self.out, self.inputs)

    def valid(self, t: Array, unit: int = 1) -> Array | None:
        """How many columns of tile t there are, in `unit`s; None if surely all of them."""
        ragged = self.axis == 1 and self.inputs % self.size
        return self.inputs // unit - t * (self.size // unit) if ragged else None

    def dot(self, x: Array, w: Array, contract: int) -> Array:
        """Multiplies x with w or its transpose."""
        return _dot(x.astype(self.dtype), w.astype(self.dtype), contract)


@dataclasses.dataclass(frozen=True)
class _PlainTiles(_Tiles):
    def operands(self, matrix: Plain, expert_N: Array) -> tuple[tuple[Array, ...], tuple[pl.BlockSpec, ...]]:
        weight = matrix.weight.swapaxes(1, 2) if self.flipped else matrix.weight
        return (weight,), (self.spec(weight, 2 - self.axis if self.flipped else 1 + self.axis, self.size),)

    def product(self, parts: list[Array], refs: tuple[Any, ...], t: Array) -> Array:
        contract = 0 if self.flipped else 1
        return self.dot(parts[0], _first(refs[0][...], contract, self.valid(t)), contract)


@dataclasses.dataclass(frozen=True)
class _Fp8Tiles(_Tiles):
    def operands(self, matrix: Fp8, expert_N: Array) -> tuple[tuple[Array, ...], tuple[pl.BlockSpec, ...]]:
        weight = matrix.weight.swapaxes(1, 2) if self.flipped else matrix.weight
        scales = matrix.scales[expert_N]
        scalars = pl.BlockSpec((None, *scales.shape[1:]), lambda n, *_: (n, 0, 0), memory_space=pltpu.SMEM)
        return (weight, scales), (
            self.spec(weight, 2 - self.axis if self.flipped else 1 + self.axis, self.size),
            scalars,
        )

    def product(self, parts: list[Array], refs: tuple[Any, ...], t: Array) -> Array:
        # A factor belongs to a block of 128 x 128, which is also what the matrix unit works on at once.
        weight, scales = refs
        contract = 0 if self.flipped else 1
        valid = self.valid(t)
        starts = [jnp.where(axis == self.axis, t * (self.size // FP8_BLOCK), 0) for axis in (0, 1)]
        columns = []
        for row, row_slice in enumerate(_slices(weight.shape[1 - contract], FP8_BLOCK)):
            total = 0
            for column, column_slice in enumerate(_slices(weight.shape[contract], FP8_BLOCK)):
                w = weight[(column_slice, row_slice) if self.flipped else (row_slice, column_slice)]
                w = _first(w, contract, None if valid is None else valid - column_slice.start)
                scale = scales[
                    jnp.minimum(starts[0] + row, scales.shape[0] - 1),
                    jnp.minimum(starts[1] + column, scales.shape[1] - 1),
                ]
                total += self.dot(parts[0][:, column_slice], w, contract) * scale
            columns.append(total)
        return jnp.concatenate(columns, axis=1)


@dataclasses.dataclass(frozen=True)
class _Mxfp4Tiles(_Tiles):
    parities: ClassVar = 2

    def operands(self, matrix: Mxfp4, expert_N: Array) -> tuple[tuple[Array, ...], tuple[pl.BlockSpec, ...]]:
        codes, scales = matrix.blocks.transpose(0, 2, 3, 1), matrix.scales.swapaxes(1, 2)
        if self.axis == 0:
            return (codes, scales), (self.spec(codes, 3, self.size), self.spec(scales, 2, self.size))
        groups = self.size // MXFP4_BLOCK
        return (codes, scales), (self.spec(codes, 1, groups), self.spec(scales, 1, groups))

    def product(self, parts: list[Array], refs: tuple[Any, ...], t: Array) -> Array:
        # Bytes are [groups, 16, out]: a group's scale broadcasts over the 16, and 8 groups fill the matrix unit.
        codes, scales = refs
        scale_GO = e8m0(_first(scales[...].astype(jnp.int32), 0, self.valid(t, MXFP4_BLOCK)))
        total = jnp.zeros((len(parts[0]), codes.shape[-1]), jnp.float32)
        for groups in _slices(codes.shape[0], LANES // 16):
            byte_GBO = codes[groups].astype(jnp.int32)
            for x, code_GBO in zip(parts, (byte_GBO & 0xF, byte_GBO >> 4), strict=True):
                w_GBO = e2m1(code_GBO) * scale_GO[groups, None]
                columns = slice(groups.start * 16, groups.stop * 16)
                total += self.dot(x[:, columns], w_GBO.reshape(-1, w_GBO.shape[-1]), 0)
        return total


_TILES = {"float32": _PlainTiles, "bfloat16": _PlainTiles, "fp8": _Fp8Tiles, "mxfp4": _Mxfp4Tiles}


def _tiles(matrix: Matrix, axis: int, size: int, dtype: Any) -> _Tiles:
    return _TILES[matrix.storage](*matrix.shape[-2:], axis, size, dtype)


def _tile(experts: ExpertWeights) -> int:
    """Numbers of F a step works on: all, or a multiple of 128, without a rest if possible."""
    if experts.storage == "mxfp4":
        return min(experts.ffn, MXFP4_TILE)
    itemsize = {"float32": 4, "bfloat16": 2, "fp8": 1}[experts.storage]
    most = max(TILE_BYTES // (experts.hidden * itemsize) // LANES * LANES, LANES)
    if experts.ffn <= most:
        return experts.ffn
    return next((size for size in range(most, 0, -LANES) if experts.ffn % size == 0), most)


def _flipped(out: int, inputs: int) -> bool:
    """Whether a matrix is padded least with `out` as the minor axis."""
    return _round_up(inputs, 8) * _round_up(out, LANES) < _round_up(out, 8) * _round_up(inputs, LANES)


def _every(h: Array, start: int, stride: int) -> Array:
    """h[:, start::stride], by the matrix unit: exact, as it multiplies with 0 and 1."""
    if stride == 1:
        return h
    row = lax.broadcasted_iota(jnp.int32, (LANES * stride, LANES), 0)
    column = lax.broadcasted_iota(jnp.int32, (LANES * stride, LANES), 1)
    pick = (row == start + stride * column).astype(h.dtype)
    picked = []
    for part in _slices(h.shape[1], LANES * stride):
        width = part.stop - part.start
        picked.append(_dot(h[:, part], pick[:width, : width // stride], 0))
    return jnp.concatenate(picked, axis=1).astype(h.dtype)


def _dot(x: Array, w: Array, contract: int) -> Array:
    """Multiplies x with w, or with its transpose, and adds up in float32."""
    return lax.dot_general(
        x,
        w,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _first(w: Array, axis: int, count: Array | None) -> Array:
    """Zeros w from entry `count` of an axis on: past the end of an array there may be NaN."""
    return (
        w if count is None else jnp.where(lax.broadcasted_iota(jnp.int32, w.shape, axis) < count, w, jnp.zeros_like(w))
    )


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _unzip(pairs: Iterable[tuple[Any, Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Pairs as a pair of tuples."""
    ones, others = zip(*pairs, strict=True)
    return ones, others
