"""Key/value cache: fixed buffers, rows written in place, the accepted path gathered into place.

Slots `0 .. length-1` hold committed tokens. A forward pass writes its rows behind them; slots past `length` are garbage
that no mask shows, so rejecting a row costs nothing. Layout `[batch, kv_head, slot, channel]` keeps the slots of a head
together, which lets attention read the buffer without a transposed copy.

A layer that sees a window only may keep fewer slots, as a ring: what the whole cache would hold in slot v is in slot
v modulo the ring's length, as long as nothing newer is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Buffer = Float[Array, "batch kv_heads slots channels"]
BUFFER_AXES = ("batch", "kv_heads", "slots", "head_dim")  # logical names, for layouts
BufferShapes = tuple[tuple[int, int], tuple[int, int]]  # (heads, channels) of a layer's keys, and of its values


@jax.tree_util.register_dataclass
@dataclass
class KVCache:
    """Keys (rotated) and values of every layer; buffers are `[B, KH, S, H]`, rings those with the smaller S.

    `experts_read` is of drafters that have experts: the distinct ones of each pass so far, summed.
    """

    keys: list[Buffer]
    values: list[Buffer]
    experts_read: Int[Array, ""] | None = None

    @property
    def capacity(self) -> int:
        """Slots per sequence."""
        return max(buffer.shape[2] for buffer in self.keys)


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype caches are kept in: XLA on CPU converts a whole bf16 buffer on each update, so there it is f32."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else jnp.dtype(dtype)


def empty_cache(shapes: Sequence[BufferShapes], *, slots: Sequence[int], batch: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache with so many slots per sequence in each layer, kept in `storage_dtype(dtype)`."""
    stored = storage_dtype(dtype)

    def buffers(which: int) -> list[Buffer]:
        return [
            jnp.zeros((batch, shape[which][0], count, shape[which][1]), stored)
            for shape, count in zip(shapes, slots, strict=True)
        ]

    return KVCache(keys=buffers(0), values=buffers(1))


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

    first, longest = length_B + 1, path_BP.shape[1] - 1

    def move(buffer: Buffer) -> Buffer:
        size = buffer.shape[2]
        slots_BP = (length_B[:, None] + path_BP[:, 1:]) % size
        rows = jnp.take_along_axis(buffer, slots_BP[:, None, :, None], axis=2)
        if size == cache.capacity:
            return write_rows(buffer, rows, first)
        into_BP = (first[:, None] + jnp.arange(longest)) % size
        return jax.vmap(lambda kept_KSH, new_KPH, into_P: kept_KSH.at[:, into_P].set(new_KPH))(buffer, rows, into_BP)

    return KVCache(keys=[move(k) for k in cache.keys], values=[move(v) for v in cache.values])


@jax.tree_util.register_dataclass
@dataclass
class Slots:
    """Where a pass writes its rows in the buffers of a layer that keeps every token, and what each row sees.

    Attributes:
        start_B: slot of the first row.
        visible_BRS: which of the slots that `store` returns each row attends to.
    """

    start_B: Int[Array, " batch"]
    visible_BRS: Bool[Array, "batch rows slots"]

    def store(
        self, buffer: Buffer, rows: Float[Array, "batch kv_heads rows channels"]
    ) -> tuple[Buffer, Float[Array, "batch kv_heads slots channels"]]:
        """The buffer with the rows, and the slots to attend to: the same."""
        buffer = write_rows(buffer, rows, self.start_B)
        return buffer, buffer


@jax.tree_util.register_dataclass
@dataclass
class RingSlots:
    """The same for a ring.

    The rows of a pass may be more than it has slots: they attend to the ring as it was, and to each other.

    Attributes:
        row_BS: the row that each slot takes; negative where it keeps what it has.
        visible_BRS: over the slots of the ring before the pass, then the rows.
    """

    row_BS: Int[Array, "batch ring"]
    visible_BRS: Bool[Array, "batch rows slots"]

    def store(
        self, buffer: Buffer, rows: Float[Array, "batch kv_heads rows channels"]
    ) -> tuple[Buffer, Float[Array, "batch kv_heads slots channels"]]:
        """The buffer with the rows, and the slots to attend to."""
        rows, row_B1S1 = rows.astype(buffer.dtype), self.row_BS[:, None, :, None]
        taken = jnp.take_along_axis(rows, jnp.maximum(row_B1S1, 0), axis=2)
        return jnp.where(row_B1S1 >= 0, taken, buffer), jnp.concatenate([buffer, rows], axis=2)


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

    def slots(self, capacity: int) -> Slots:
        """For layers that keep every token."""
        return Slots(self.context_B + self.offset, self.visible_BRS(capacity))

    def ring(self, size: int, window: int) -> RingSlots:
        """For layers that see `window` positions, a token's own included, and keep `size` slots.

        A ring of `window + n` slots holds all that later passes need if at most n rows of any pass but the first are
        written beyond those that are committed. Rows behind the last live one are not written.
        """
        assert self.offset == 0 and self.mask_BRW.shape[-1] == self.tokens_BR.shape[1]
        slot_S = jnp.arange(size)

        def held_BS(end_B: Array) -> Array:
            """The last of the whole cache's slots before `end` that each slot of the ring stands for."""
            last_B1 = end_B[:, None] - 1
            return last_B1 - (last_B1 - slot_S) % size

        positions_BR1, before_B1S = self.positions_BR[:, :, None], held_BS(self.context_B)[:, None, :]
        in_ring_BRS = (before_B1S >= 0) & (positions_BR1 - before_B1S < window)
        in_rows_BRR = self.mask_BRW & (positions_BR1 - self.positions_BR[:, None, :] < window)
        written_B = jnp.max(jnp.where(self.live_BR, 1 + jnp.arange(self.live_BR.shape[1]), 0), axis=1)
        return RingSlots(
            row_BS=held_BS(self.context_B + written_B) - self.context_B[:, None],
            visible_BRS=jnp.concatenate([in_ring_BRS, in_rows_BRR], axis=-1),
        )


jax.tree_util.register_dataclass(
    Rows, data_fields=["tokens_BR", "positions_BR", "live_BR", "context_B", "mask_BRW"], meta_fields=["offset"]
)
