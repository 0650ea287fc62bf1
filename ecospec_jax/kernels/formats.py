"""Storage formats of weight matrices, and what their numbers mean (docs/formats.md section B).

A matrix is `[..., out, in]`: the contraction dimension is last, as checkpoints store it. Quantised matrices stay
quantised in memory; `widen` says what they mean, and kernels must agree with it to the last bit.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

MXFP4_BLOCK = 32
FP8_BLOCK = 128
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plain:
    """A matrix in float32 or bfloat16."""

    weight: Float[Array, "... out in"]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(..., out, in)`."""
        return self.weight.shape

    @property
    def storage(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self.weight.dtype)

    def widen(self) -> Float[Array, "... out in"]:
        """In float32."""
        return self.weight.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4:
    """Blocks of 32 four-bit numbers along `in`, each with a power of two as scale (docs/formats.md B.1).

    Attributes:
        blocks: byte b of a block holds elements 2b (low nibble) and 2b + 1, as E2M1 codes.
        scales: exponents s; the scale is 2^(s - 127). Products below the smallest normal float32 may count as zero.
    """

    blocks: UInt8[Array, "... out groups 16"]
    scales: UInt8[Array, "... out groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(..., out, in)`."""
        return (*self.blocks.shape[:-2], self.blocks.shape[-2] * MXFP4_BLOCK)

    @property
    def storage(self) -> str:
        """`mxfp4`."""
        return "mxfp4"

    def widen(self) -> Float[Array, "... out in"]:
        """In float32."""
        nibbles = jnp.stack([self.blocks & 0xF, self.blocks >> 4], axis=-1)
        codes = nibbles.reshape(*self.scales.shape, MXFP4_BLOCK)
        scale = jax.lax.bitcast_convert_type(self.scales.astype(jnp.uint32) << 23, jnp.float32)
        return (jnp.asarray(E2M1)[codes] * scale[..., None]).reshape(self.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8:
    """e4m3 codes with one float32 factor a 128 x 128 block; blocks at the far edges are just shorter (B.2)."""

    weight: Float[Array, "... out in"]
    scales: Float[Array, "... out_blocks in_blocks"]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(..., out, in)`."""
        return self.weight.shape

    @property
    def storage(self) -> str:
        """`fp8`."""
        return "fp8"

    def widen(self) -> Float[Array, "... out in"]:
        """In float32."""
        outputs, inputs = self.weight.shape[-2:]
        scale = jnp.repeat(jnp.repeat(self.scales, FP8_BLOCK, -2), FP8_BLOCK, -1)[..., :outputs, :inputs]
        return self.weight.astype(jnp.float32) * scale


Matrix = Plain | Mxfp4 | Fp8


def check_matrix(matrix: Matrix, name: str) -> None:
    """Raises ValueError naming `name` if the arrays of a matrix disagree in shape or have a wrong dtype."""
    *lead, outputs, inputs = matrix.shape
    match matrix:
        case Plain(weight):
            expected = {"weight": (weight, weight.shape, ("float32", "bfloat16"))}
        case Mxfp4(blocks, scales):
            groups = (*lead, outputs, inputs // MXFP4_BLOCK)
            expected = {"blocks": (blocks, (*groups, 16), ("uint8",)), "scales": (scales, groups, ("uint8",))}
        case Fp8(weight, scales):
            grid = (*lead, -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
            expected = {
                "weight": (weight, weight.shape, ("float8_e4m3fn",)),
                "scales": (scales, grid, ("float32",)),
            }
        case _:
            raise TypeError(f"{name}: {type(matrix).__name__} is not a storage format; known: Plain, Mxfp4, Fp8")
    for part, (array, shape, dtypes) in expected.items():
        if array.shape != shape or str(array.dtype) not in dtypes:
            raise ValueError(
                f"{name}.{part}: {array.dtype}{list(array.shape)}, expected {' or '.join(dtypes)}{list(shape)}"
            )


def one_of(matrix: Matrix, index: Int[Array, ""]) -> Matrix:
    """Entry `index` of the first dimension of a stack of matrices."""
    return jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, index, keepdims=False), matrix)
