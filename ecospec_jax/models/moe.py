"""Routers and the expert layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.config import DeepseekV3Config, GptOssConfig, ModelConfig, Qwen3MoeConfig
from ecospec_jax.kernels import Activation, ExpertWeights, Plain, Swiglu, grouped_experts
from ecospec_jax.models.layers import DenseMLP, Linear, project
from ecospec_jax.models.matrices import MATRICES, Storage, parameter
from ecospec_jax.sharding import Placed


class SoftmaxRouter(nnx.Module):
    """Qwen3-MoE router: softmax over all experts in float32, top-k, optionally renormalised (docs/formats.md A.1)."""

    def __init__(
        self, hidden_size: int, num_experts: int, k: int, *, normalise: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        """`normalise` divides the k probabilities by their sum (`norm_topk_prob`)."""
        self.gate = Linear(hidden_size, num_experts, ("router", "embed"), dtype=dtype, rngs=rngs)
        self.k, self.normalise = k, normalise

    def __call__(self, x_TD: Float[Array, "rows hidden"]) -> tuple[Int[Array, "rows k"], Float[Array, "rows k"]]:
        """Expert ids (best first, ties to the lower id) and combine weights of each row."""
        probabilities_TE = jax.nn.softmax(self.preferences(x_TD), axis=-1)
        weights_TK, ids_TK = lax.top_k(probabilities_TE, self.k)
        if self.normalise:
            weights_TK = weights_TK / jnp.sum(weights_TK, axis=-1, keepdims=True)
        return ids_TK, weights_TK.astype(x_TD.dtype)

    def preferences(self, x: Float[Array, "... hidden"]) -> Float[Array, "... experts"]:
        """What experts are chosen by, float32."""
        return self.gate(x).astype(jnp.float32)


class TopKRouter(nnx.Module):
    """gpt-oss router: top-k of the logits, bias included, then softmax over these k (docs/formats.md A.2)."""

    def __init__(self, hidden_size: int, num_experts: int, k: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """One linear map with a bias."""
        self.gate = Linear(hidden_size, num_experts, ("router", "embed"), dtype=dtype, rngs=rngs, bias=True)
        self.k = k

    def __call__(self, x_TD: Float[Array, "rows hidden"]) -> tuple[Int[Array, "rows k"], Float[Array, "rows k"]]:
        """Expert ids (best first, ties to the lower id) and combine weights of each row."""
        logits_TK, ids_TK = lax.top_k(self.gate(x_TD), self.k)
        return ids_TK, jax.nn.softmax(logits_TK, axis=-1)

    def preferences(self, x: Float[Array, "... hidden"]) -> Float[Array, "... experts"]:
        """What experts are chosen by, float32."""
        return self.gate(x).astype(jnp.float32)


class GroupedSigmoidRouter(nnx.Module):
    """DeepSeek-V3 router (docs/formats.md A.3): sigmoid scores, chosen with a bias and within the best groups.

    A group is judged by the sum of its two best biased scores. The bias takes no part in the combine weights.
    """

    def __init__(self, config: DeepseekV3Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """The bias starts at zero, and is float32 whatever `dtype`."""
        self.gate = Linear(config.hidden_size, config.num_experts, ("router", "embed"), dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32), logical_axes=("router",))
        self.k, self.groups, self.best_groups = config.experts_per_token, config.groups, config.groups_per_token
        self.normalise, self.factor = config.norm_topk_prob, config.routed_scaling_factor

    def __call__(self, x_TD: Float[Array, "rows hidden"]) -> tuple[Int[Array, "rows k"], Float[Array, "rows k"]]:
        """Expert ids (best first, ties to the lower id) and combine weights of each row, float32."""
        scores_TE = self._scores(x_TD)
        biased_TGM = (scores_TE + self.bias[...]).reshape(len(x_TD), self.groups, -1)
        _, best_TB = lax.top_k(jnp.sum(lax.top_k(biased_TGM, 2)[0], axis=-1), self.best_groups)
        kept_TG = jnp.any(best_TB[..., None] == jnp.arange(self.groups), axis=1)
        choice_TE = jnp.where(kept_TG[..., None], biased_TGM, -jnp.inf).reshape(scores_TE.shape)
        _, ids_TK = lax.top_k(choice_TE, self.k)
        weights_TK = jnp.take_along_axis(scores_TE, ids_TK, axis=1)
        if self.normalise:
            weights_TK = weights_TK / (jnp.sum(weights_TK, axis=-1, keepdims=True) + 1e-20)
        return ids_TK, weights_TK * self.factor

    def preferences(self, x: Float[Array, "... hidden"]) -> Float[Array, "... experts"]:
        """What experts are chosen by but for their groups, float32."""
        return self._scores(x) + self.bias[...]

    def _scores(self, x: Float[Array, "... hidden"]) -> Float[Array, "... experts"]:
        weight_ED = self.gate.weight[...].astype(jnp.float32)
        return jax.nn.sigmoid(project(x.astype(jnp.float32), Plain(weight_ED)))


Router = SoftmaxRouter | TopKRouter | GroupedSigmoidRouter


def router_of(config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> Router:
    """The router of a target's expert layers."""
    hidden, experts, k = config.hidden_size, config.num_experts, config.experts_per_token
    match config:
        case Qwen3MoeConfig():
            return SoftmaxRouter(hidden, experts, k, normalise=config.norm_topk_prob, dtype=dtype, rngs=rngs)
        case GptOssConfig():
            return TopKRouter(hidden, experts, k, dtype=dtype, rngs=rngs)
        case DeepseekV3Config():
            return GroupedSigmoidRouter(config, dtype=dtype, rngs=rngs)


class Experts(nnx.Module):
    """SwiGLU experts without biases: the weights of a layer's, contraction dimension last."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        storage: Storage = "plain",
    ) -> None:
        """`dtype` is that of matrices in plain storage."""
        matrix = partial(MATRICES[storage], dtype=dtype, rngs=rngs)
        inner, outer = (num_experts, ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        self.gate = matrix(inner, ("expert", "ffn", "embed"))
        self.up = matrix(inner, ("expert", "ffn", "embed"))
        self.down = matrix(outer, ("expert", "embed", "ffn"))

    def arranged(self, take: Callable[[nnx.Variable], Any]) -> ExpertWeights:
        """What `take` makes of each parameter, as the kernel takes the values."""
        return ExpertWeights((self.gate.arranged(take), self.up.arranged(take)), self.down.arranged(take))

    @property
    def weights(self) -> ExpertWeights:
        """The values."""
        return self.arranged(lambda part: part[...])


class InterleavedExperts(nnx.Module):
    """gpt-oss experts: gate and up as even and odd rows of one matrix, biases, plain or mxfp4 storage."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        storage: Storage,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """`dtype` is that of biases, and of matrices in plain storage."""
        matrix = partial(MATRICES[storage], dtype=dtype, rngs=rngs)
        inner, outer = (num_experts, 2 * ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        self.gate_up = matrix(inner, ("expert", "ffn", "embed"))
        self.gate_up_bias = parameter(rngs, inner[:2], ("expert", "ffn"), dtype, scale=0.02)
        self.down = matrix(outer, ("expert", "embed", "ffn"))
        self.down_bias = parameter(rngs, outer[:2], ("expert", "embed"), dtype, scale=0.02)

    def arranged(self, take: Callable[[nnx.Variable], Any]) -> ExpertWeights:
        """What `take` makes of each parameter, as the kernel takes the values."""
        gate_up, down = self.gate_up.arranged(take), self.down.arranged(take)
        return ExpertWeights(gate_up, down, take(self.gate_up_bias), take(self.down_bias))

    @property
    def weights(self) -> ExpertWeights:
        """The values."""
        return self.arranged(lambda part: part[...])


class MoELayer(Placed):
    """A router and its experts. Dead rows get expert id E, which no kernel reads."""

    def __init__(
        self,
        router: Router,
        experts: Experts | InterleavedExperts,
        activation: Activation = Swiglu(),
        shared: DenseMLP | None = None,
    ) -> None:
        """Combines a family's router with its experts; every row goes through the MLP `shared` beside them."""
        self.router, self.experts, self.activation, self.shared = router, experts, activation, shared

    def __call__(
        self, x_BRD: Float[Array, "batch rows hidden"], live_BR: Bool[Array, "batch rows"]
    ) -> tuple[Float[Array, "batch rows hidden"], Int[Array, "batch rows k"]]:
        """Returns the layer's output (without experts for dead rows) and the chosen expert ids (E for dead rows)."""
        batch, rows, hidden = x_BRD.shape
        x_TD = x_BRD.reshape(batch * rows, hidden)
        ids_TK, weights_TK = self.router(x_TD)
        ids_TK = jnp.where(live_BR.reshape(-1, 1), ids_TK, self.experts.weights.count)
        y_TD = self.routed(x_TD, ids_TK, weights_TK)
        if self.shared is not None:
            y_TD = y_TD + self.whole(self.shared(x_TD))
        return y_TD.reshape(x_BRD.shape), ids_TK.reshape(batch, rows, -1)

    def routed(
        self, x_TD: Float[Array, "rows hidden"], ids_TK: Int[Array, "rows k"], weights_TK: Float[Array, "rows k"]
    ) -> Float[Array, "rows hidden"]:
        """What the chosen experts add."""
        op, experts = partial(grouped_experts, activation=self.activation), self.experts.weights
        if self.placement is None:
            return op(x_TD, ids_TK, weights_TK, experts)
        specs = self.experts.arranged(self.placement.spec_of)
        return self.placement.experts_apart(op, x_TD, ids_TK, weights_TK, experts, specs)
