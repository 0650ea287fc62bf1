"""Which rows each distinct expert works on, as a compact list of blocks.

Rows are sorted by expert and each expert's rows are cut into blocks of at most M; unused experts have no block. A
kernel that walks the blocks therefore reads distinct experts only, whether there is one row (decoding) or a thousand
(prefill).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass
class ExpertBlocks:
    """Blocks of rows; entries past `count` are unused.

    Attributes:
        count: number of blocks in use, scalar.
        expert_N: expert of each block.
        rows_NM: row indices; T marks an empty place.
        weights_NM: combine weight of each place, 0 where empty.
    """

    count: Int[Array, ""]
    expert_N: Int[Array, " blocks"]
    rows_NM: Int[Array, "blocks places"]
    weights_NM: Float[Array, "blocks places"]


def block_size(rows: int, k: int, experts: int) -> int:
    """Rows per block: one while experts have few rows each, about twice an expert's mean load when they have many.

    XLA on CPU multiplies an expert with one row in place, but copies the expert before it multiplies with several. So
    few rows of an expert are better done one after the other: the second finds the weights in the cache.
    """
    load = rows * k // experts
    return 1 if load < 4 else min(rows, 128, 2 * load)


def expert_blocks(
    expert_ids_TK: Int[Array, "rows k"], combine_weights_TK: Float[Array, "rows k"], experts: int
) -> ExpertBlocks:
    """Groups the (row, expert) pairs whose id lies in `0 .. experts-1`."""
    rows, k = expert_ids_TK.shape
    size = block_size(rows, k, experts)
    pairs = rows * k
    most_blocks = min(pairs, experts + pairs // size)

    ids_P = expert_ids_TK.reshape(-1)
    ids_P = jnp.where((ids_P >= 0) & (ids_P < experts), ids_P, experts)
    order_P = jnp.argsort(ids_P, stable=True)
    load_E = jnp.bincount(ids_P, length=experts + 1)[:experts]
    first_pair_E = jnp.cumsum(load_E) - load_E
    blocks_E = -(-load_E // size)
    last_block_E = jnp.cumsum(blocks_E)

    block_N = jnp.arange(most_blocks)
    expert_N = jnp.minimum(jnp.searchsorted(last_block_E, block_N, side="right"), experts - 1)
    within_N = block_N - (last_block_E - blocks_E)[expert_N]
    place_NM = within_N[:, None] * size + jnp.arange(size)
    filled_NM = (place_NM < load_E[expert_N][:, None]) & (block_N < last_block_E[-1])[:, None]
    pair_NM = order_P[jnp.minimum(first_pair_E[expert_N][:, None] + place_NM, pairs - 1)]
    return ExpertBlocks(
        count=last_block_E[-1],
        expert_N=expert_N,
        rows_NM=jnp.where(filled_NM, pair_NM // k, rows),
        weights_NM=jnp.where(filled_NM, combine_weights_TK.reshape(-1)[pair_NM], 0),
    )
