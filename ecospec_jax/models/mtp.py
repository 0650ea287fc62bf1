"""DeepSeek's multi-token prediction module as a drafter: one decoder layer, applied repeatedly (docs/formats.md D)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from ecospec_jax import expert_bits
from ecospec_jax.cache import KVCache, Rows, empty_cache
from ecospec_jax.config import MtpConfig
from ecospec_jax.models.deepseek_v3 import decoder_layer
from ecospec_jax.models.layers import Embedding, Linear, RMSNorm
from ecospec_jax.models.rope import cos_sin


class Mtp(nnx.Module):
    """The drafter. Row t pairs the target's final hidden state of position t with the token at position t + 1.

    Its experts are its own: the cache counts them apart (`KVCache.experts_read`). `embedding` and `head` are always
    present here; a checkpoint without its own borrows the target's arrays on loading.
    """

    def __init__(self, config: MtpConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        layer = config.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = Embedding(layer.vocab_size, hidden, dtype=dtype, rngs=rngs)
        self.embedding_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.join = Linear(2 * hidden, hidden, ("embed", "features"), dtype=dtype, rngs=rngs)
        self.layer = decoder_layer(layer, sparse=True, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(hidden, eps, dtype=dtype)
        self.head = Linear(hidden, layer.vocab_size, ("vocab", "embed"), dtype=dtype, rngs=rngs)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The target's state behind its final norm."""
        return self.config.boundaries

    @property
    def proposable(self) -> int:
        """The whole vocabulary."""
        return self.config.layer.vocab_size

    @property
    def vocabulary(self) -> Int[Array, " proposable"]:
        """Every token."""
        return jnp.arange(self.proposable)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` slots a sequence."""
        shapes = [self.layer.attention.cached]
        cache = empty_cache(shapes, slots=[capacity], batch=batch, dtype=self.dtype)
        return replace(cache, experts_read=jnp.zeros((), jnp.int32))

    def catch_up(
        self, rows: Rows, features_BRF: Float[Array, "batch rows features"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """Processes committed tokens with the target's states; returns the rows' own."""
        return self._layer(rows, features_BRF, cache)

    def extend(
        self, rows: Rows, state_BRH: Float[Array, "batch rows hidden"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """Processes drafted tokens, each with its parent's state in place of the target's."""
        return self._layer(rows, self.norm(state_BRH) if self.config.recycle == "normed" else state_BRH, cache)

    def logits(self, state: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """Of the next token, float32."""
        return self.head(self.norm(state)).astype(jnp.float32)

    def propose(self, state: Float[Array, "... hidden"], k: int) -> tuple[Int[Array, "... k"], Float[Array, "... k"]]:
        """The k likeliest next tokens and their log-probabilities."""
        best, tokens = lax.top_k(jax.nn.log_softmax(self.logits(state), axis=-1), k)
        return tokens, best

    def _layer(
        self, rows: Rows, hidden_BRH: Float[Array, "batch rows hidden"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        config = self.config.layer
        embedded = self.embedding_norm(self.embedding(rows.tokens_BR))
        x_BRH = self.join(jnp.concatenate([embedded, self.hidden_norm(hidden_BRH)], axis=-1))
        angles = cos_sin(config.rope, config.rotary_dim, rows.positions_BR)
        buffers = cache.keys[0], cache.values[0]
        y_BRH, (keys, values), ids_BRK = self.layer(x_BRH, angles, buffers, rows.slots(cache.capacity), rows.live_BR)
        assert ids_BRK is not None and cache.experts_read is not None
        read = expert_bits.count(expert_bits.union(expert_bits.from_ids(ids_BRK, config.num_experts), axis=(0, 1)))
        return y_BRH, KVCache([keys], [values], cache.experts_read + read)
