"""A loop over blocks of rows, in plain XLA: runs on any platform, and reads only the experts that occur."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.grouped_experts.groups import expert_blocks
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`. Accumulates in float32."""
    rows, hidden = x_TD.shape
    blocks = expert_blocks(expert_ids_TK, combine_weights_TK.astype(jnp.float32), experts.count)
    # Row T is a zero row for the empty places of a block.
    x_padded = jnp.concatenate([x_TD.astype(jnp.float32), jnp.zeros((1, hidden), jnp.float32)])

    def apply_expert(block: Array, y_TD: Array) -> Array:
        expert, rows_M = blocks.expert_N[block], blocks.rows_NM[block]
        gate_FD, up_FD, down_DF = (
            lax.dynamic_index_in_dim(weight, expert, keepdims=False).astype(jnp.float32)
            for weight in (experts.gate_EFD, experts.up_EFD, experts.down_EDF)
        )
        x_MD = x_padded[rows_M]
        h_MF = jax.nn.silu(x_MD @ gate_FD.T) * (x_MD @ up_FD.T)
        y_MD = (h_MF @ down_DF.T) * blocks.weights_NM[block][:, None]
        return y_TD.at[rows_M].add(y_MD, mode="drop")

    def trip(block: Array, y_TD: Array) -> Array:
        # Always true. Outside a branch, XLA on CPU would convert every expert from bf16 before the loop.
        return lax.cond(block < blocks.count, apply_expert, lambda _, y: y, block, y_TD)

    y_TD = lax.fori_loop(0, blocks.count, trip, jnp.zeros((rows, hidden), jnp.float32))
    return y_TD.astype(x_TD.dtype)
