"""A loop over blocks of rows and tiles of hidden width, in plain XLA: runs on any platform.

Each trip slices one tile of one expert, so the bytes read follow the distinct experts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.grouped_experts.groups import expert_blocks
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights

_LARGEST_TILE = 128


def _tile_width(ffn: int) -> int:
    return max(width for width in range(1, min(ffn, _LARGEST_TILE) + 1) if ffn % width == 0)


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`. Accumulates in float32."""
    rows, hidden = x_TD.shape
    ffn = experts.gate_EFD.shape[1]
    tile = _tile_width(ffn)
    tiles = ffn // tile
    blocks = expert_blocks(expert_ids_TK, combine_weights_TK.astype(jnp.float32), experts.count)
    # Row T is a zero row for the empty places of a block.
    x_padded = jnp.concatenate([x_TD.astype(jnp.float32), jnp.zeros((1, hidden), jnp.float32)])

    def apply_tile(index: Array, y_TD: Array) -> Array:
        block, first = index // tiles, (index % tiles) * tile
        expert = blocks.expert_N[block]
        rows_M = blocks.rows_NM[block]
        gate_fD = lax.dynamic_slice(experts.gate_EFD, (expert, first, 0), (1, tile, hidden))[0].astype(jnp.float32)
        up_fD = lax.dynamic_slice(experts.up_EFD, (expert, first, 0), (1, tile, hidden))[0].astype(jnp.float32)
        down_Df = lax.dynamic_slice(experts.down_EDF, (expert, 0, first), (1, hidden, tile))[0].astype(jnp.float32)
        x_MD = x_padded[rows_M]
        h_Mf = jax.nn.silu(x_MD @ gate_fD.T) * (x_MD @ up_fD.T)
        y_MD = (h_Mf @ down_Df.T) * blocks.weights_NM[block][:, None]
        return y_TD.at[rows_M].add(y_MD, mode="drop")

    def trip(index: Array, y_TD: Array) -> Array:
        # Always true. Outside a branch, XLA on CPU would convert every expert from bf16 before the loop.
        return lax.cond(index < blocks.count * tiles, apply_tile, lambda _, y: y, index, y_TD)

    y_TD = lax.fori_loop(0, blocks.count * tiles, trip, jnp.zeros((rows, hidden), jnp.float32))
    return y_TD.astype(x_TD.dtype)
