"""A backbone that reads each token of the target as several tokens of its own vocabulary, its sub-tokens.

A row of the target becomes a block of S rows of the backbone, of which the first `count` live; the state of the last
live one is the row's. The cache keeps one slot a token of the target, the S sub-tokens' channels side by side, so that
rows are committed as they always are. Its last pair of buffers holds the count of each slot.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import Buffer, KVCache, Rows, Slots, empty_cache, write_rows
from ecospec_jax.models.backbone import Backbone
from ecospec_jax.models.layers import Embedding


class Subtokens(nnx.Module):
    """Every target token's sub-tokens, and how a backbone reads rows through them."""

    def __init__(self, vocab_size: int, most: int) -> None:
        """A table of the first id everywhere; `most` is S. Whoever makes a predictor fills it, or a checkpoint."""
        self.ids_VS = nnx.Variable(jnp.zeros((vocab_size, most), jnp.int32), logical_axes=("tokens", "subtokens"))
        self.counts_V = nnx.Variable(jnp.ones((vocab_size,), jnp.int32), logical_axes=("tokens",))

    @property
    def most(self) -> int:
        """Most sub-tokens of a token, S."""
        return self.ids_VS[...].shape[1]

    def empty_cache(self, backbone: Backbone, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` tokens of the target a sequence."""
        layers = [(layer.attention.cached, self.most) for layer in backbone.layers]
        shapes = [((k[0], most * k[1]), (v[0], most * v[1])) for (k, v), most in layers]
        shapes.append(((1, 1), (1, 0)))  # counts, and nothing
        return empty_cache(shapes, slots=[capacity] * len(shapes), batch=batch, dtype=backbone.dtype)

    def states(
        self, backbone: Backbone, embedding: Embedding, rows: Rows, cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """The backbone's state of each row's last sub-token."""
        assert rows.offset == 0 and rows.mask_BRW.shape[-1] == rows.tokens_BR.shape[1]
        (batch, count), most = rows.tokens_BR.shape, self.most
        ids_BRS, counts_BR = self.ids_VS[...][rows.tokens_BR], self.counts_V[...][rows.tokens_BR]
        counts = write_rows(cache.keys[-1], counts_BR[:, None, :, None], rows.context_B)
        held_BC = counts[:, 0, :, 0].astype(jnp.int32)

        def block(x_BRS: Array) -> Array:
            return x_BRS.reshape(batch, count * most)

        def split(buffer: Buffer) -> Buffer:
            return buffer.reshape(batch, buffer.shape[1], cache.capacity * most, -1)

        def joined(buffer: Buffer) -> Buffer:
            return buffer.reshape(batch, buffer.shape[1], cache.capacity, -1)

        live_BRS = rows.live_BR[:, :, None] & (jnp.arange(most) < counts_BR[:, :, None])
        hidden_BXD, after = backbone(
            embedding(block(ids_BRS)),
            block(_positions(rows, counts_BR, held_BC, most)),
            block(live_BRS),
            Slots(rows.context_B * most, _visible(rows, held_BC, most)),
            KVCache([split(k) for k in cache.keys[:-1]], [split(v) for v in cache.values[:-1]]),
        )
        hidden_BRSD = hidden_BXD.reshape(batch, count, most, -1)
        last_BRD = jnp.take_along_axis(hidden_BRSD, (counts_BR - 1)[:, :, None, None], axis=2)[:, :, 0]
        keys, values = [joined(k) for k in after.keys], [joined(v) for v in after.values]
        return last_BRD, KVCache([*keys, counts], [*values, cache.values[-1]])


def _positions(
    rows: Rows, counts_BR: Int[Array, "batch rows"], held_BC: Int[Array, "batch slots"], most: int
) -> Int[Array, "batch rows subtokens"]:
    """Without a gap along each path: behind the live sub-tokens of the context and of the row's ancestors."""
    in_context_BC = jnp.arange(held_BC.shape[1]) < rows.context_B[:, None]
    context_B = jnp.sum(jnp.where(in_context_BC, held_BC, 0), axis=1)
    ancestors_BR = jnp.sum(jnp.where(rows.mask_BRW, counts_BR[:, None, :], 0), axis=2) - counts_BR
    return (context_B[:, None] + ancestors_BR)[:, :, None] + jnp.arange(most)


def _visible(
    rows: Rows, held_BC: Int[Array, "batch slots"], most: int
) -> Bool[Array, "batch rows_subtokens slots_subtokens"]:
    """The live sub-tokens of the slots that the row sees; within the row's own, none behind itself."""
    (batch, count), capacity = rows.tokens_BR.shape, held_BC.shape[1]
    own_BRC = rows.context_B[:, None, None] + jnp.arange(count)[:, None] == jnp.arange(capacity)
    earlier_SS = jnp.tril(jnp.ones((most, most), bool))
    seen_BRSCS = (
        rows.visible_BRS(capacity)[:, :, None, :, None]
        & (jnp.arange(most) < held_BC[:, :, None])[:, None, None]
        & (~own_BRC[:, :, None, :, None] | earlier_SS[:, None, :])
    )
    return seen_BRSCS.reshape(batch, count * most, capacity * most)
