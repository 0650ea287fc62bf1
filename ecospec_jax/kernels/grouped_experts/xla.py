"""A loop over blocks of rows, in plain XLA: runs on any platform, and reads only the experts that occur."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.formats import Matrix, one_of
from ecospec_jax.kernels.grouped_experts.activations import Activation
from ecospec_jax.kernels.grouped_experts.groups import expert_blocks
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights


def block_size(rows: int, k: int, experts: int) -> int:
    """Rows per block: one while experts have few rows each, about twice an expert's mean load when they have many.

    XLA on CPU multiplies an expert with one row in place, but copies the expert before it multiplies with several. So
    few rows of an expert are better done one after the other: the second finds the weights in the cache.
    """
    load = rows * k // experts
    return 1 if load < 4 else min(rows, 128, 2 * load)


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    activation: Activation,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`. Accumulates in float32."""
    rows, hidden = x_TD.shape
    size = block_size(rows, expert_ids_TK.shape[1], experts.count)
    blocks = expert_blocks(expert_ids_TK, combine_weights_TK, experts.count, size)
    flat, first = experts.flat()
    # Row T is a zero row for the empty places of a block.
    x_padded = jnp.concatenate([x_TD.astype(jnp.float32), jnp.zeros((1, hidden), jnp.float32)])

    def apply_expert(block: Array, y_TD: Array) -> Array:
        expert, rows_M = first + blocks.expert_N[block], blocks.rows_NM[block]

        def project(x: Array, matrix: Matrix, bias: Array | None) -> Array:
            y = x @ one_of(matrix, expert).widen().T
            return y if bias is None else y + bias[expert].astype(jnp.float32)

        x_MD = x_padded[rows_M]
        gate_MF, up_MF = experts.gate_and_up([project(x_MD, *part) for part in flat.gate_up_parts])
        y_MD = project(activation(gate_MF, up_MF), flat.down, flat.down_bias)
        return y_TD.at[rows_M].add(y_MD * blocks.weights_NM[block][:, None], mode="drop")

    def trip(block: Array, y_TD: Array) -> Array:
        # Always true. Outside a branch, XLA on CPU would convert every expert from bf16 before the loop.
        return lax.cond(block < blocks.count, apply_expert, lambda _, y: y, block, y_TD)

    y_TD = lax.fori_loop(0, blocks.count, trip, jnp.zeros((rows, hidden), jnp.float32))
    return y_TD.astype(x_TD.dtype)
