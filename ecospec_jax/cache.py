"""Key/value cache: fixed buffers, rows written in place, the accepted path gathered into place.

Slots `0 .. length-1` hold committed tokens. A forward pass writes its rows behind them; slots past `length` are garbage
that no mask shows, so rejecting a row costs nothing. Layout `[batch, kv_head, slot, channel]` keeps the slots of a head
together, which lets attention read the buffer without a transposed copy.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Buffer = Float[Array, "batch kv_heads slots channels"]


@jax.tree_util.register_dataclass
@dataclass
class KVCache:
    """Keys (rotated) and values of every layer; buffers are `[B, KH, S, H]`."""

    keys: list[Buffer]
    values: list[Buffer]

    @property
    def capacity(self) -> int:
        """Slots per sequence."""
        return self.keys[0].shape[2]


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype caches are kept in: XLA on CPU converts a whole bf16 buffer on each update, so there it is f32."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else jnp.dtype(dtype)


class HeadShape(Protocol):
    """What a config says about keys and values."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        ...


def empty_cache(config: HeadShape, *, layers: int, batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `capacity` slots per sequence, kept in `storage_dtype(dtype)`."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    stored = storage_dtype(dtype)
    return KVCache(
        keys=[jnp.zeros(shape, stored) for _ in range(layers)],
        values=[jnp.zeros(shape, stored) for _ in range(layers)],
    )


def write_rows(
    buffer: Buffer, rows: Float[Array, "batch kv_heads rows channels"], start_B: Int[Array, " batch"]
) -> Buffer:
    """Writes `rows` at slots `start_B ..` of each sequence. The caller keeps `start + rows` within the capacity."""

    def write(buffer_KSH: Array, rows_KRH: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(buffer_KSH, rows_KRH, (0, start, 0))

    return jax.vmap(write)(buffer, rows.astype(buffer.dtype), start_B)


def commit_path(cache: KVCache, length_B: Int[Array, " batch"], path_BP: Int[Array, "batch path"]) -> KVCache:
    """Moves row `path[j]` of the block behind `length` to slot `length + j`, for every layer.

    Paths ascend with `path[j] >= j` (parents come first); entry 0 is the root's row 0, which is in place already.
    Entries past the accepted path may repeat any row, since the slots they land in are past the new length.
    """
    if path_BP.shape[1] == 1:
        return cache

    def move(buffer: Buffer) -> Buffer:
        slots_BP = length_B[:, None] + path_BP[:, 1:]
        rows = jnp.take_along_axis(buffer, slots_BP[:, None, :, None], axis=2)
        return write_rows(buffer, rows, length_B + 1)

    return KVCache(keys=[move(k) for k in cache.keys], values=[move(v) for v in cache.values])


@dataclass
class Rows:
    """A block of token rows for one forward pass.

    Attributes:
        tokens_BR: token ids.
        positions_BR: absolute positions (rope); a tree node's is prefix length + depth.
        live_BR: False for padding, finished sequences and unused budget slots; such rows route to no expert.
        context_B: every row sees slots `0 .. context-1`.
        mask_BRW: which of the slots `context .. context+W-1` each row sees, itself included.
        offset: rows are written at slots `context + offset ..`.
    """

    tokens_BR: Int[Array, "batch rows"]
    positions_BR: Int[Array, "batch rows"]
    live_BR: Bool[Array, "batch rows"]
    context_B: Int[Array, " batch"]
    mask_BRW: Bool[Array, "batch rows window"]
    offset: int = 0

    def visible_BRS(self, capacity: int) -> Bool[Array, "batch rows slots"]:
        """The mask over all cache slots."""
        window = self.mask_BRW.shape[-1]
        relative_BS = jnp.arange(capacity)[None, :] - self.context_B[:, None]
        inside_BS = (relative_BS >= 0) & (relative_BS < window)
        index_BRS = jnp.broadcast_to(
            jnp.clip(relative_BS, 0, window - 1)[:, None, :], (*self.tokens_BR.shape, capacity)
        )
        windowed_BRS = jnp.take_along_axis(self.mask_BRW, index_BRS, axis=2)
        return (relative_BS < 0)[:, None, :] | (inside_BS[:, None, :] & windowed_BRS)


jax.tree_util.register_dataclass(
    Rows, data_fields=["tokens_BR", "positions_BR", "live_BR", "context_B", "mask_BRW"], meta_fields=["offset"]
)
