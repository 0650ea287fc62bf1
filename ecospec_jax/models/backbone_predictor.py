"""The trained expert predictor: a causal transformer over the tokens, one head per MoE layer (arXiv 2607.12696).

Its bridge (`config.Bridge`) says how the transformer, the backbone, reads the tokens of the target.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.models.backbone import Backbone
from ecospec_jax.models.layers import Embedding, Linear
from ecospec_jax.models.predictor import Evidence, ExpertSets, top_experts
from ecospec_jax.models.subtokens import Subtokens
from ecospec_jax.predictor_config import BackbonePredictorConfig, Retokenise, TargetEmbedding


class BackbonePredictor(nnx.Module):
    """Embedding, with the bridge `target_embedding` a projection, backbone and heads."""

    def __init__(self, config: BackbonePredictorConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """`embedding` is always present; a checkpoint that borrows the target's gets that array on loading."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        hidden, width = config.backbone.hidden_size, config.embedding_size
        routing, bridge = config.routing, config.bridge
        retokenised = isinstance(bridge, Retokenise)
        self.subtokens = Subtokens(config.vocab_size, bridge.subtokens) if retokenised else None
        tokens = bridge.vocab_size if retokenised else config.vocab_size
        self.embedding = Embedding(tokens, width, dtype=dtype, rngs=rngs)
        projected = isinstance(bridge, TargetEmbedding)
        self.projection = Linear(width, hidden, ("embed", "features"), dtype=dtype, rngs=rngs) if projected else None
        self.backbone = Backbone(config.backbone, dtype=dtype, rngs=rngs)
        self.heads = nnx.List(
            [
                Linear(hidden, routing.experts, ("router", "embed"), dtype=dtype, rngs=rngs)
                for _ in range(routing.layers)
            ]
        )

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` slots a sequence."""
        if self.subtokens is not None:
            return self.subtokens.empty_cache(self.backbone, batch, capacity)
        return self.backbone.empty_cache(batch, capacity)

    def states(self, rows: Rows, cache: KVCache) -> tuple[Float[Array, "batch rows hidden"], KVCache]:
        """The backbone's state of each row, after its final norm."""
        if self.subtokens is not None:
            return self.subtokens.states(self.backbone, self.embedding, rows, cache)
        x_BRD = self.embedding(rows.tokens_BR)
        if self.projection is not None:
            x_BRD = self.projection(x_BRD)
        return self.backbone(x_BRD, rows.positions_BR, rows.live_BR, rows.slots(cache.capacity), cache)

    def logits(self, rows: Rows, cache: KVCache) -> tuple[Float[Array, "batch rows layers experts"], KVCache]:
        """One logit per layer and expert, float32."""
        hidden_BRD, cache = self.states(rows, cache)
        return jnp.stack([head(hidden_BRD) for head in self.heads], axis=2).astype(jnp.float32), cache

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """The k best experts of each layer."""
        assert cache is not None
        logits_BRLE, cache = self.logits(rows, cache)
        return top_experts(logits_BRLE, self.config.routing), cache

    def probabilities(
        self, rows: Rows, cache: KVCache | None, evidence: Evidence
    ) -> Float[Array, "batch rows layers experts"]:
        """It is trained on each expert apart."""
        assert cache is not None
        return jax.nn.sigmoid(self.logits(rows, cache)[0])
