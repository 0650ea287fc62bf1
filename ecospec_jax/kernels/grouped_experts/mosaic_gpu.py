"""Pallas Mosaic GPU kernels for Hopper: the distinct experts only, their weights read once and as they are stored.

Two kernels: gate, up and activation; then down. A thread block takes one block of rows and 64 output channels. The copy
engine brings, several steps ahead, its 64 rows of each matrix and the same inputs of the block's rows. Weights are the
left operand of wgmma, whose height is 64, and the few rows the right one, whose width is any multiple of 8. Stored
codes become bfloat16 between shared memory and the tensor cores, exactly; scales multiply the float32 partial sums over
the inputs that they cover.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector
from jaxtyping import Array, BFloat16, Float, Int, UInt8

from ecospec_jax.kernels.formats import FP8_BLOCK, MXFP4_BLOCK, Fp8, Mxfp4
from ecospec_jax.kernels.grouped_experts.activations import Activation
from ecospec_jax.kernels.grouped_experts.groups import ExpertBlocks, expert_blocks
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights
from ecospec_jax.kernels.grouped_experts.widening import e2m1, e8m0

TILE = 64  # output channels of a thread block
MOST_PLACES = 64
LINE_BYTES = 128  # of a weight row that one step reads, at most
PIPELINE_BYTES = 72 << 10  # of shared memory, so that three thread blocks fit on a multiprocessor
MOST_STAGES = 6


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    activation: Activation,
    *,
    interpret: bool = False,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`. Rounds rows to bfloat16 before, between and after the projections.

    Args:
        x_TD: rows.
        expert_ids_TK: experts of each row.
        combine_weights_TK: factor of each expert's output.
        experts: weights; hidden and expert width must be multiples of 64.
        activation: between the projections.
        interpret: runs on CPU, in Pallas' interpreter; see `_Interpreted` for what is then not the GPU's code.

    Raises:
        ValueError: a size is no multiple of 64, or the storage is float32.
    """
    rows, hidden = x_TD.shape
    if experts.storage not in _OPERANDS:
        raise ValueError(f"backend 'mosaic_gpu' does not support experts stored as {experts.storage}")
    for name, size in (("hidden", hidden), ("expert width", experts.ffn)):
        if size % TILE:
            raise ValueError(f"backend 'mosaic_gpu': {name} must be a multiple of {TILE}, got {size}")
    if expert_ids_TK.size == 0:
        return jnp.zeros_like(x_TD)
    blocks = expert_blocks(expert_ids_TK, combine_weights_TK, experts.count, min(-(-rows // 8) * 8, MOST_PLACES))
    flat, first = experts.flat()
    blocks = dataclasses.replace(blocks, expert_N=first + blocks.expert_N)

    operand = _OPERANDS[experts.storage]
    if isinstance(flat.gate_up, tuple):
        biases = flat.gate_up_bias or (None, None)
        gate_up = [operand(matrix, bias) for matrix, bias in zip(flat.gate_up, biases, strict=True)]
    else:
        gate_up = [operand(flat.gate_up, flat.gate_up_bias, lanes=2, lane=lane) for lane in range(2)]
    down = operand(flat.down, flat.down_bias)
    primitives = _Interpreted() if interpret else _Primitives()
    x_NMD = blocks.gather(operand.arranged(x_TD.astype(jnp.bfloat16)))
    h_NMF = _project(blocks, x_NMD, gate_up, activation, primitives)
    y_NMD = _project(blocks, operand.arranged(h_NMF), [down], lambda y: y, primitives)
    return blocks.combine(y_NMD, rows).astype(x_TD.dtype)


def _project(
    blocks: ExpertBlocks,
    x_NMK: BFloat16[Array, "blocks places inputs"],
    operands: Sequence["_Operand"],
    join: Callable[..., Array],
    primitives: "_Primitives",
) -> BFloat16[Array, "blocks places outputs"]:
    """`join` of each block's projections by its expert. Blocks past `blocks.count` are neither read nor written."""
    count, places, _ = x_NMK.shape
    outputs, depth, span = operands[0].outputs, operands[0].depth, operands[0].span
    stage_bytes = TILE * sum(operand.line_bytes for operand in operands) + 2 * places * depth
    arrays, structure = jax.tree.flatten([operand.arrays for operand in operands])

    def kernel(expert_ref: Any, count_ref: Any, x_ref: Any, *refs: Any) -> None:
        *array_refs, y_ref, staging_ref = refs
        block, tile = lax.axis_index("block"), lax.axis_index("tile")

        @pl.when(block < count_ref[0])
        def _() -> None:
            expert = expert_ref[block]
            tiles = [_Tile(part, expert, tile, primitives) for part in jax.tree.unflatten(structure, array_refs)]

            def step(index: Any, x_smem: Any, *weights_and_sums: Any) -> tuple[Array, ...]:
                *weights, sums = weights_and_sums
                return tuple(
                    operand.add(total, own, index[0], weight_smem, x_smem)
                    for operand, total, own, weight_smem in zip(operands, sums, tiles, weights, strict=True)
                )

            sums = plgpu.emit_pipeline(
                step,
                grid=(x_ref.shape[-1] // depth,),
                in_specs=[
                    plgpu.BlockSpec((places, depth), lambda k: (0, k), transforms=_transforms(span, x_ref.dtype)),
                    *(operand.block_spec(expert, tile) for operand in operands),
                ],
                max_concurrent_steps=max(2, min(PIPELINE_BYTES // stage_bytes, MOST_STAGES)),
                init_carry=(primitives.zeros(places),) * len(operands),
            )(x_ref.at[block], *(own.refs["weight"] for own in tiles))
            sums = [operand.with_bias(total, own) for operand, total, own in zip(operands, sums, tiles, strict=True)]
            primitives.store_transposed(staging_ref, join(*sums).astype(jnp.bfloat16))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging_ref, y_ref.at[block, :, pl.ds(tile * TILE, TILE)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((count, places, outputs), jnp.bfloat16),
        scratch_types=[plgpu.SMEM((places, TILE), jnp.bfloat16, transforms=_transforms(TILE, x_NMK.dtype))],
        grid=(count, outputs // TILE),
        grid_names=("block", "tile"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=primitives.interpreter(),
    )(blocks.expert_N, blocks.count[None], x_NMK, *arrays)


def _transforms(width: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How wgmma wants a matrix in shared memory, of whose rows it takes `width` numbers at a time."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


class _Tile(NamedTuple):
    """What a thread block works on: references to an operand's arrays, and which part of them is its own."""

    refs: dict[str, Any]
    expert: Array
    index: Array
    primitives: "_Primitives"

    def rows(self, name: str, *rest: Any) -> Float[Array, "64"]:
        """The tile's channels of the array `[E, F, ...]`."""
        return self.primitives.load(self.refs[name].at[self.expert, pl.ds(self.index * TILE, TILE), *rest])


class _Operand:
    """Every `lanes`-th row from `lane` on of a matrix of all experts. Here of bfloat16; subclasses know other storages.

    Attributes:
        arrays: `weight` `[E, F, lanes, W]`, stored as it is; `scales`, if any; `bias` `[E, F, lanes]`, if any. Views.
        outputs: F.
        depth: inputs of a step.
        span: inputs of a partial sum, all under one scale.
        line_bytes: bytes of a weight row in a step.
    """

    bits = 16

    def __init__(self, matrix: Any, bias: Array | None, lanes: int = 1, lane: int = 0) -> None:
        outputs, inputs = matrix.shape[-2:]
        self.lanes, self.lane, self.outputs = lanes, lane, outputs // lanes
        most = LINE_BYTES * 8 // self.bits
        self.depth = self.span = next(depth for depth in range(most, 0, -TILE) if inputs % depth == 0)
        self.line_bytes = self.depth * self.bits // 8
        self.arrays = self.views(matrix)
        if bias is not None:
            self.arrays["bias"] = self.by_lane(bias)[..., 0]

    def by_lane(self, array: Array) -> Array:
        """`[E, F * lanes, ...]` as `[E, F, lanes, W]`."""
        return array.reshape(array.shape[0], self.outputs, self.lanes, -1)

    def views(self, matrix: Any) -> dict[str, Array]:
        """`weight` and `scales`."""
        return {"weight": self.by_lane(matrix.weight)}

    def block_spec(self, expert: Array, tile: Array) -> plgpu.BlockSpec:
        """A step's part of a tile of `weight`."""
        dtype = self.arrays["weight"].dtype
        width = self.line_bytes // dtype.itemsize
        index = lambda step: (expert, tile, self.lane, step)  # noqa: E731
        return plgpu.BlockSpec((None, TILE, None, width), index, transforms=_transforms(width, dtype))

    @staticmethod
    def arranged(x: BFloat16[Array, "... inputs"]) -> BFloat16[Array, "... inputs"]:
        """Rows with their inputs in the order of `widened`."""
        return x

    def widened(self, weight_smem: Any, primitives: "_Primitives") -> Any:
        """The unscaled numbers as bfloat16 `[64, depth]`, in shared memory or in registers."""
        return weight_smem

    def factor(self, tile: _Tile, part: Array) -> Any:
        """The scale of a partial sum, counted from the first input on: None, a scalar or one for each channel."""
        return None

    def add(self, total: Array, tile: _Tile, step: Array, weight_smem: Any, x_smem: Any) -> Array:
        """`total` and what the inputs of one step add to it."""
        parts = self.depth // self.span
        # These come from global memory: asked for first, waited for last.
        factors = [self.factor(tile, step * parts + part) for part in range(parts)]
        weight = self.widened(weight_smem, tile.primitives)
        for part, factor in enumerate(factors):
            span = slice(part * self.span, (part + 1) * self.span)
            product = tile.primitives.multiply(weight if parts == 1 else weight[:, span], x_smem.at[:, span])
            total += product if factor is None else product * _along_rows(factor, product)
        return total

    def with_bias(self, total: Array, tile: _Tile) -> Array:
        """`total` and the bias."""
        if "bias" not in self.arrays:
            return total
        return total + _along_rows(tile.rows("bias", self.lane).astype(jnp.float32), total)


class _Fp8Operand(_Operand):
    bits = 8

    def views(self, matrix: Fp8) -> dict[str, Array]:
        return {"weight": self.by_lane(matrix.weight), "scales": matrix.scales}

    def widened(self, weight_smem: Any, primitives: "_Primitives") -> Any:
        # Mosaic has no direct conversion.
        return weight_smem[...].astype(jnp.float32).astype(jnp.bfloat16)

    def factor(self, tile: _Tile, part: Array) -> Any:
        row = tile.index * TILE * self.lanes // FP8_BLOCK
        return tile.refs["scales"][tile.expert, row, part * self.span // FP8_BLOCK]


class _Mxfp4Operand(_Operand):
    bits = 4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.span = MXFP4_BLOCK

    def views(self, matrix: Mxfp4) -> dict[str, Array]:
        return {"weight": self.by_lane(matrix.blocks), "scales": self.by_lane(matrix.scales)}

    @staticmethod
    def arranged(x: BFloat16[Array, "... inputs"]) -> BFloat16[Array, "... inputs"]:
        return _by_nibble(x)

    def widened(self, weight_smem: Any, primitives: "_Primitives") -> Any:
        return primitives.unpacked(weight_smem[...])

    def factor(self, tile: _Tile, part: Array) -> Any:
        return e8m0(tile.rows("scales", self.lane, part).astype(jnp.int32))


_OPERANDS = {"bfloat16": _Operand, "fp8": _Fp8Operand, "mxfp4": _Mxfp4Operand}


def _along_rows(values: Any, like: Array) -> Any:
    """`[64]` as `[64, places]`; a scalar as it is."""
    return lax.broadcast_in_dim(values, like.shape, (0,)) if jnp.ndim(values) else values


def _by_nibble(x: Array) -> Array:
    """The last axis in the order of `unpacked`: of 4 words of 8, number n of word w goes to (n % 4, w, n // 4)."""
    words = x.reshape(*x.shape[:-1], -1, 4, 2, 4)
    return jnp.moveaxis(words, -1, -3).reshape(x.shape)


class _Primitives:
    """What the interpreter cannot do, as the GPU does it."""

    def interpreter(self) -> Any:
        """The argument `interpret` of a kernel."""
        return None

    def zeros(self, places: int) -> Float[Array, "64 places"]:
        """An empty sum."""
        return plgpu.layout_cast(jnp.zeros((TILE, places), jnp.float32), plgpu.Layout.WGMMA)

    def load(self, ref: Any) -> Float[Array, "64"]:
        """One number for each channel, from global memory to where the channel's sums are."""
        # jax 0.10 wants the index that 0.11 deprecates.
        index = ((),) if jax.__version_info__ < (0, 11) else ()
        return plgpu.load(ref, *index, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def multiply(self, weight: Any, x_ref: Any) -> Float[Array, "64 places"]:
        """A tile times the rows."""

        def multiply(sums_ref: Any) -> Array:
            plgpu.wgmma(sums_ref, weight, x_ref.T)
            return sums_ref[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, x_ref.shape[0]), jnp.float32))

    def store_transposed(self, ref: Any, y: BFloat16[Array, "64 places"]) -> None:
        """To shared memory."""
        ref.T[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)

    def unpacked(self, packed: UInt8[Array, "64 bytes"]) -> BFloat16[Array, "64 inputs"]:
        """E2M1 codes in the order of `_by_nibble`."""
        codes = plgpu.ShapeDtypeStruct((TILE, 2 * packed.shape[1]), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
        unpack: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_8BIT,), return_type=codes)(_unpack)
        return unpack(plgpu.layout_cast(packed, plgpu.Layout.WGMMA_8BIT))


def _unpack(_: Any, packed: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """A thread's part of `unpacked`.

    A thread holds 4 bytes of a row, which is one word of 8 nibbles, and makes of it the 4 pairs of neighbours that
    wgmma expects of it: nibbles n and n + 4 are at the same place in the word's two halves.
    """
    word, number = ir.IntegerType.get_signless(32), ir.BF16Type.get()
    words = _with_registers(packed, ir.VectorType.get((1,), word), WORDS)
    pairs = [
        _with_registers(_pair(words, nibble), ir.VectorType.get((2,), number), mgpu.WGMMA_LAYOUT).registers
        for nibble in range(4)
    ]
    # Axis 1 counts columns: 16 bytes become four times 8 numbers.
    registers = np.stack(pairs, axis=2).reshape(1, -1, *pairs[0].shape[2:])
    small = mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    return small * mgpu.c(2.0**126, number)


# Like WGMMA_8BIT, with a word in place of 4 bytes.
WORDS = mgpu.TiledLayout(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)


def _pair(words: Any, nibble: int) -> Any:
    """E2M1 codes `nibble` and `nibble + 4` of 32-bit words as two bfloat16, times 2^-126.

    A code's lower three bits, as the lowest bits of the exponent and the highest one of the mantissa, are its magnitude
    times 2^-126, subnormal or not.
    """
    shift = 6 - 4 * nibble
    magnitudes = (words << shift if shift > 0 else words >> -shift) & 0x01C001C0
    return magnitudes | ((words << (12 - 4 * nibble)) & 0x80008000)


def _with_registers(array: mgpu.FragmentedArray, register: Any, layout: Any) -> mgpu.FragmentedArray:
    """The same bits in registers of another type."""
    registers = np.empty_like(array.registers)
    for index, bits in np.ndenumerate(array.registers):
        registers[index] = vector.bitcast(register, bits)
    signed = False if isinstance(register.element_type, ir.IntegerType) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


class _Interpreted(_Primitives):
    """The same in plain JAX. What these do on a GPU is therefore not what a test in the interpreter tests."""

    def interpreter(self) -> Any:
        # Public from jax 0.11 on.
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams()

    def zeros(self, places: int) -> Float[Array, "64 places"]:
        return jnp.zeros((TILE, places), jnp.float32)

    def load(self, ref: Any) -> Float[Array, "64"]:
        return ref[...]

    def multiply(self, weight: Any, x_ref: Any) -> Float[Array, "64 places"]:
        return jnp.dot(weight[...], x_ref[...].T, preferred_element_type=jnp.float32)

    def store_transposed(self, ref: Any, y: BFloat16[Array, "64 places"]) -> None:
        ref[...] = y.T

    def unpacked(self, packed: UInt8[Array, "64 bytes"]) -> BFloat16[Array, "64 inputs"]:
        codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
        return _by_nibble(e2m1(codes.astype(jnp.int32)).astype(jnp.bfloat16))
