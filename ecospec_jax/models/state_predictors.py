"""Predictors that read what the drafter knows: its state from which a token was proposed, and that token.

They have no backbone and no cache. The state belongs to the token before, since the drafter never processes the leaves
of a candidate tree; what it does not say about the token itself, the token's embedding says.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ecospec_jax import expert_bits
from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.models.layers import Embedding, Linear, RMSNorm
from ecospec_jax.models.matrices import parameter
from ecospec_jax.models.moe import GroupedSigmoidRouter, router_of
from ecospec_jax.models.predictor import Evidence, ExpertSets, Stateless, top_experts
from ecospec_jax.predictor_config import DrafterFeaturesConfig, TargetGatesConfig

NORM_EPS = 1e-6
SIGMOID_SHARPNESS = 10.0


class NodeFeatures(nnx.Module):
    """A vector of `rank` numbers for each node, from the drafter's state and the token's embedding."""

    def __init__(self, config: DrafterFeaturesConfig | TargetGatesConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """`embedding` is the target's, which is borrowed on loading."""
        size = config.embedding_size
        self.embedding = Embedding(config.vocab_size, size, dtype=dtype, rngs=rngs)
        self.embedding_norm = RMSNorm(size, NORM_EPS, dtype=dtype)
        self.state_norm = RMSNorm(config.state_size, NORM_EPS, dtype=dtype)
        self.join = Linear(size + config.state_size, config.rank, ("embed", "features"), dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "..."], states: Float[Array, "... state"]) -> Float[Array, "... rank"]:
        """The vectors of tokens, each proposed from a state."""
        parts = self.embedding_norm(self.embedding(tokens)), self.state_norm(states.astype(self.embedding.weight.dtype))
        return jax.nn.silu(self.join(jnp.concatenate(parts, axis=-1)))


class StatePredictor(Stateless):
    """Its logits are trained as those of a softmax that each of the k choices is drawn from (`training/states.py`)."""

    config: DrafterFeaturesConfig | TargetGatesConfig

    def logits(
        self, tokens: Int[Array, "..."], states: Float[Array, "... state"]
    ) -> Float[Array, "... layers experts"]:
        """One logit per layer and expert, float32."""
        raise NotImplementedError

    def probabilities(
        self, rows: Rows, cache: KVCache | None, evidence: Evidence
    ) -> Float[Array, "batch rows layers experts"]:
        """The expected number of times that an expert is chosen, which is once at most."""
        assert evidence.states_BRH is not None
        shares_BRLE = jax.nn.softmax(self.logits(rows.tokens_BR, evidence.states_BRH), axis=-1)
        return jnp.minimum(self.config.routing.k * shares_BRLE, 1.0)


class DrafterFeatures(StatePredictor):
    """Low-rank heads: one linear map from the node's vector to all experts of all layers."""

    def __init__(self, config: DrafterFeaturesConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; checkpoints replace them."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.features = NodeFeatures(config, dtype=dtype, rngs=rngs)
        outputs = config.routing.layers * config.routing.experts
        self.heads = Linear(config.rank, outputs, ("router", "embed"), dtype=dtype, rngs=rngs, bias=True)

    def logits(
        self, tokens: Int[Array, "..."], states: Float[Array, "... state"]
    ) -> Float[Array, "... layers experts"]:
        """One logit per layer and expert, float32."""
        flat = self.heads(self.features(tokens, states)).astype(jnp.float32)
        return flat.reshape(*tokens.shape, self.config.routing.layers, self.config.routing.experts)

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """The k best experts of each layer."""
        assert evidence.states_BRH is not None
        return top_experts(self.logits(rows.tokens_BR, evidence.states_BRH), self.config.routing), cache


class TargetGates(StatePredictor):
    """The target's own routers, applied to a guess of the vector that each of them will see."""

    def __init__(self, config: TargetGatesConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """`routers` are the target's, which are borrowed on loading."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.features = NodeFeatures(config, dtype=dtype, rngs=rngs)
        shape = (config.routing.layers, config.target.hidden_size, config.rank)
        self.guess_LDR = parameter(rngs, shape, ("layers", "embed", "features"), self.dtype)
        self.routers = nnx.List(
            [router_of(config.target, dtype=dtype, rngs=rngs) for _ in range(config.routing.layers)]
        )
        # Learned: logits may be too flat or too steep, and sigmoids lie between 0 and 1.
        bounded = isinstance(self.routers[0], GroupedSigmoidRouter)
        sharpness = jnp.full(config.routing.layers, SIGMOID_SHARPNESS if bounded else 1.0, self.dtype)
        self.sharpness_L = nnx.Param(sharpness, logical_axes=("layers",))

    def inputs(self, tokens: Int[Array, "..."], states: Float[Array, "... state"]) -> Float[Array, "layers ... hidden"]:
        """What each router is expected to see."""
        return jnp.einsum("...r,ldr->l...d", self.features(tokens, states), self.guess_LDR[...])

    def logits(
        self, tokens: Int[Array, "..."], states: Float[Array, "... state"]
    ) -> Float[Array, "... layers experts"]:
        """What the routers choose by, float32, sharper for training."""
        inputs = self.inputs(tokens, states)
        preferences = [router.preferences(inputs[layer]) for layer, router in enumerate(self.routers)]
        return jnp.stack(preferences, axis=-2) * self.sharpness_L[...].astype(jnp.float32)[:, None]

    def __call__(self, rows: Rows, cache: KVCache | None, evidence: Evidence) -> tuple[ExpertSets, KVCache | None]:
        """What the routers choose, by their own rules."""
        assert evidence.states_BRH is not None
        batch, length = rows.tokens_BR.shape
        inputs = self.inputs(rows.tokens_BR, evidence.states_BRH).reshape(
            self.config.routing.layers, batch * length, -1
        )
        ids_LTK = jnp.stack([router(inputs[layer])[0] for layer, router in enumerate(self.routers)])
        sets_LTW = expert_bits.from_ids(ids_LTK, self.config.routing.experts)
        return jnp.moveaxis(sets_LTW, 0, 1).reshape(batch, length, *sets_LTW.shape[::2]), cache
