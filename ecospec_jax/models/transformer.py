"""What the target families share: a decoder layer, and the whole model around the layers a family builds."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import Buffer, KVCache, RingSlots, Rows, Slots, empty_cache
from ecospec_jax.config import ModelConfig
from ecospec_jax.models.latent_attention import LatentAttention
from ecospec_jax.models.layers import Attention, DenseMLP, Embedding, Linear, RMSNorm
from ecospec_jax.models.moe import MoELayer
from ecospec_jax.models.rope import cos_sin
from ecospec_jax.models.target import TargetOutput, collect_output
from ecospec_jax.sharding import Placed


class DecoderLayer(Placed):
    """Attention, then experts or one MLP, each behind an RMSNorm and a residual connection."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention | LatentAttention,
        mlp_norm: RMSNorm,
        feed_forward: MoELayer | DenseMLP,
    ) -> None:
        """`feed_forward` becomes `moe` or `mlp`."""
        self.attention_norm, self.attention, self.mlp_norm = attention_norm, attention, mlp_norm
        self.moe = feed_forward if isinstance(feed_forward, MoELayer) else None
        self.mlp = None if isinstance(feed_forward, MoELayer) else feed_forward

    def __call__(
        self,
        x_BRD: Float[Array, "batch rows hidden"],
        angles: tuple[Array, Array],
        buffers: tuple[Buffer, Buffer],
        slots: Slots | RingSlots,
        live_BR: Bool[Array, "batch rows"],
    ) -> tuple[Float[Array, "batch rows hidden"], tuple[Buffer, Buffer], Int[Array, "batch rows k"] | None]:
        """Returns the new residual stream, the cache buffers, and the chosen experts (None in a dense layer)."""
        mine_BRD = self.pin(self.whole(self.attention_norm(x_BRD)), ("batch", "rows", "embed"))
        mixed_BRD, buffers = self.attention(mine_BRD, angles, buffers, slots)
        x_BRD = x_BRD + self.whole(mixed_BRD)
        normed = self.mlp_norm(x_BRD)
        if self.moe is not None:
            y_BRD, ids_BRK = self.moe(normed, live_BR)
            return x_BRD + y_BRD, buffers, ids_BRK
        assert self.mlp is not None
        return x_BRD + self.whole(self.mlp(normed)), buffers, None


class Transformer(Placed):
    """A target. Layers are unrolled: a scan would make XLA copy each layer's experts (docs/design.md 4)."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        *,
        tie_embeddings: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """Random embedding and head from `rngs`; checkpoints replace them.

        `windows` says how many positions each layer sees, a token's own included; None is all.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(layers)
        self.windows = (None,) * len(layers) if windows is None else tuple(windows)
        self.norm = norm
        self.head = (
            None
            if tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, ("vocab", "embed"), dtype=dtype, rngs=rngs)
        )

    @property
    def num_experts(self) -> int:
        """Experts of each MoE layer."""
        return self.config.num_experts

    def empty_cache(self, batch: int, capacity: int, rows: int | None = None) -> KVCache:
        """A cache of `capacity` slots a sequence.

        Args:
            batch: sequences.
            capacity: slots of layers that see everything.
            rows: most rows of any pass after the first. Layers with a window then keep only the window and these rows;
                without it they keep everything.
        """
        slots = [capacity] * len(self.layers)
        if rows is not None:
            slots = [capacity if window is None else min(capacity, window + rows) for window in self.windows]
        shapes = [layer.attention.cached for layer in self.layers]
        return empty_cache(shapes, slots=slots, batch=batch, dtype=self.dtype)

    def __call__(self, rows: Rows, cache: KVCache, boundaries: tuple[int, ...]) -> tuple[TargetOutput, KVCache]:
        """One forward pass of a block of rows; see `TargetOutput` for what comes out."""
        rows = self.whole(rows)
        angles = cos_sin(self.config.rope, self.config.rotary_dim, rows.positions_BR)
        shared: dict[tuple[int | None, int], Slots | RingSlots] = {}

        def slots(window: int | None, size: int) -> Slots | RingSlots:
            if (window, size) not in shared:
                shared[window, size] = rows.slots(size) if window is None else rows.ring(size, window)
            return shared[window, size]

        x_BRD = self.embedding(rows.tokens_BR)
        stream, keys, values, expert_ids = [x_BRD], [], [], []
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            buffers = cache.keys[index], cache.values[index]
            place = slots(window, buffers[0].shape[2])
            x_BRD, (k, v), ids_BRK = layer(x_BRD, angles, buffers, place, rows.live_BR)
            stream.append(x_BRD)
            keys.append(k)
            values.append(v)
            if ids_BRK is not None:
                expert_ids.append(ids_BRK)
        return collect_output(self.norm(x_BRD), stream, boundaries, expert_ids), KVCache(keys, values)

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """Head over the post-final-norm hidden state, float32."""
        if self.head is None:
            return self.embedding.logits(hidden).astype(jnp.float32)
        return self.head(hidden).astype(jnp.float32)
