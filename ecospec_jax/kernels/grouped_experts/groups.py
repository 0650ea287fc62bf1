"""Which rows each distinct expert works on, as a compact list of blocks.

Rows are sorted by expert and each expert's rows are cut into blocks of at most M; unused experts have no block. A
kernel that walks the blocks therefore reads distinct experts only, whether there is one row (decoding) or a thousand
(prefill). Computed once a layer and shared by all its projections.
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
        expert_N: expert of each block; an unused block repeats the last one in use, or is 0.
        rows_NM: row indices; T marks an empty place.
        weights_NM: combine weight of each place, 0 where empty.
    """

    count: Int[Array, ""]
    expert_N: Int[Array, " blocks"]
    rows_NM: Int[Array, "blocks places"]
    weights_NM: Float[Array, "blocks places"]

    def gather(self, x_TD: Float[Array, "rows hidden"]) -> Float[Array, "blocks places hidden"]:
        """The rows of every place, zero where empty."""
        return x_TD.at[self.rows_NM].get(mode="fill", fill_value=0)

    def combine(self, y_NMD: Float[Array, "blocks places hidden"], rows: int) -> Float[Array, "rows hidden"]:
        """Weighted sum of each row's places, in float32. Empty places may hold anything, NaN included."""
        filled_NM1 = (self.rows_NM < rows)[..., None]
        weighted = jnp.where(filled_NM1, y_NMD.astype(jnp.float32) * self.weights_NM[..., None], 0)
        zeros = jnp.zeros((rows, y_NMD.shape[-1]), jnp.float32)
        return zeros.at[self.rows_NM].add(weighted, mode="drop")


def expert_blocks(
    expert_ids_TK: Int[Array, "rows k"], combine_weights_TK: Float[Array, "rows k"], experts: int, size: int
) -> ExpertBlocks:
    """Groups the (row, expert) pairs whose id lies in `0 .. experts-1` into blocks of at most `size` rows.

    With `size` at least T there is one block an expert, unless a row names an expert more than once.
    """
    rows, k = expert_ids_TK.shape
    pairs = rows * k
    most_blocks = min(pairs, experts + pairs // size)

    ids_P = expert_ids_TK.reshape(-1)
    ids_P = jnp.where((ids_P >= 0) & (ids_P < experts), ids_P, experts)
    order_P = jnp.argsort(ids_P, stable=True)
    load_E = jnp.bincount(ids_P, length=experts + 1)[:experts]
    first_pair_E = jnp.cumsum(load_E) - load_E
    blocks_E = -(-load_E // size)
    last_block_E = jnp.cumsum(blocks_E)
    count = last_block_E[-1]

    block_N = jnp.arange(most_blocks)
    within_count_N = jnp.minimum(block_N, jnp.maximum(count - 1, 0))
    expert_N = jnp.minimum(
        jnp.searchsorted(last_block_E, within_count_N, side="right", method="compare_all"), experts - 1
    )
    expert_N = jnp.where(count > 0, expert_N, 0)
    within_N = block_N - (last_block_E - blocks_E)[expert_N]
    place_NM = within_N[:, None] * size + jnp.arange(size)
    filled_NM = (place_NM < load_E[expert_N][:, None]) & (block_N < count)[:, None]
    pair_NM = order_P[jnp.minimum(first_pair_E[expert_N][:, None] + place_NM, pairs - 1)]
    return ExpertBlocks(
        count=count.astype(jnp.int32),
        expert_N=expert_N.astype(jnp.int32),
        rows_NM=jnp.where(filled_NM, pair_NM // k, rows),
        weights_NM=jnp.where(filled_NM, combine_weights_TK.reshape(-1)[pair_NM].astype(jnp.float32), 0),
    )
