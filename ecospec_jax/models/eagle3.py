"""EAGLE-3 drafter: one decoder layer over fused target features and token embeddings (docs/formats.md C)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from ecospec_jax.cache import KVCache, Rows, empty_cache
from ecospec_jax.config import Eagle3Config
from ecospec_jax.models.layers import Attention, DenseMLP, Embedding, Linear, RMSNorm
from ecospec_jax.models.rope import cos_sin


class Eagle3(nnx.Module):
    """The drafter. Row t pairs the target's features of position t with the token at position t + 1.

    `embedding` and `head` are always present here; a checkpoint without its own borrows the target's arrays on loading.
    """

    def __init__(self, config: Eagle3Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        features = len(config.boundaries) * config.target_hidden_size
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = Embedding(config.vocab_size, hidden, dtype=dtype, rngs=rngs)
        self.feature_norm = RMSNorm(features, eps, dtype=dtype, axis="features") if config.norm_before_fc else None
        self.boundary_norms = (
            nnx.List([RMSNorm(config.target_hidden_size, eps, dtype=dtype) for _ in config.boundaries])
            if config.norm_each_boundary
            else None
        )
        self.fc = Linear(features, hidden, ("embed", "features"), dtype=dtype, rngs=rngs) if config.fc else None
        self.embedding_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.attention = Attention(config, input_size=2 * hidden, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.mlp = DenseMLP(hidden, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(hidden, eps, dtype=dtype)
        self.head = Linear(hidden, config.draft_vocab_size, ("vocab", "embed"), dtype=dtype, rngs=rngs)
        self.target_ids = nnx.Variable(jnp.arange(config.draft_vocab_size, dtype=jnp.int32), logical_axes=("vocab",))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries of the target whose states are this drafter's features."""
        return self.config.boundaries

    @property
    def proposable(self) -> int:
        """Size of the draft vocabulary."""
        return self.config.draft_vocab_size

    @property
    def vocabulary(self) -> Int[Array, " proposable"]:
        """Target ids of the tokens it can propose."""
        return self.target_ids[...]

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` slots a sequence."""
        return empty_cache([self.attention.cached], slots=[capacity], batch=batch, dtype=self.dtype)

    def catch_up(
        self, rows: Rows, features_BRF: Float[Array, "batch rows features"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """Processes committed tokens with the target's features; returns the rows' states."""
        if self.boundary_norms is not None:
            parts = jnp.split(features_BRF, len(self.boundary_norms), axis=-1)
            normed = [norm(part) for norm, part in zip(self.boundary_norms, parts, strict=True)]
            features_BRF = jnp.concatenate(normed, axis=-1)
        if self.feature_norm is not None:
            features_BRF = self.feature_norm(features_BRF)
        hidden_BRH = features_BRF if self.fc is None else self.fc(features_BRF)
        return self._layer(rows, hidden_BRH, cache)

    def extend(
        self, rows: Rows, state_BRH: Float[Array, "batch rows hidden"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """Processes drafted tokens, each with its parent's state in place of features (`fc` is skipped)."""
        return self._layer(rows, self.norm(state_BRH) if self.config.norm_output else state_BRH, cache)

    def logits(self, state: Float[Array, "... hidden"]) -> Float[Array, "... proposable"]:
        """Logits of the next token over `vocabulary`, float32."""
        return self.head(self.norm(state)).astype(jnp.float32)

    def propose(self, state: Float[Array, "... hidden"], k: int) -> tuple[Int[Array, "... k"], Float[Array, "... k"]]:
        """The k likeliest next tokens (target ids) and their log-probabilities within the draft vocabulary."""
        best, draft_ids = lax.top_k(jax.nn.log_softmax(self.logits(state), axis=-1), k)
        return self.vocabulary[draft_ids], best

    def _layer(
        self, rows: Rows, hidden_BRH: Float[Array, "batch rows hidden"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        angles = cos_sin(self.config.rope, self.config.head_dim, rows.positions_BR)
        normed = self.hidden_norm(hidden_BRH)
        both = jnp.concatenate([self.embedding_norm(self.embedding(rows.tokens_BR)), normed], axis=-1)
        buffers = cache.keys[0], cache.values[0]
        mixed, (keys, values) = self.attention(both, angles, buffers, rows.slots(cache.capacity))
        y_BRH = (normed if self.config.norm_before_residual else hidden_BRH) + mixed
        return y_BRH + self.mlp(self.mlp_norm(y_BRH)), KVCache([keys], [values])
