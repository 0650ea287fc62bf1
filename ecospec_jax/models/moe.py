"""Routers and the expert layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.kernels import ExpertWeights, Plain, grouped_experts
from ecospec_jax.models.layers import Linear, parameter


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
        probabilities_TE = jax.nn.softmax(self.gate(x_TD).astype(jnp.float32), axis=-1)
        weights_TK, ids_TK = lax.top_k(probabilities_TE, self.k)
        if self.normalise:
            weights_TK = weights_TK / jnp.sum(weights_TK, axis=-1, keepdims=True)
        return ids_TK, weights_TK.astype(x_TD.dtype)


class Experts(nnx.Module):
    """The weights of a layer's experts, contraction dimension last."""

    def __init__(self, num_experts: int, hidden_size: int, ffn_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """SwiGLU experts without biases."""
        inner, outer = (num_experts, ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        self.gate = parameter(rngs, inner, ("expert", "ffn", "embed"), dtype)
        self.up = parameter(rngs, inner, ("expert", "ffn", "embed"), dtype)
        self.down = parameter(rngs, outer, ("expert", "embed", "ffn"), dtype)

    @property
    def weights(self) -> ExpertWeights:
        """The arrays as the kernel takes them."""
        gate, up, down = (Plain(part[...]) for part in (self.gate, self.up, self.down))
        return ExpertWeights((gate, up), down)


class MoELayer(nnx.Module):
    """A router and its experts. Dead rows get expert id E, which no kernel reads."""

    def __init__(self, router: SoftmaxRouter, experts: Experts) -> None:
        """Combines a family's router with its experts."""
        self.router, self.experts = router, experts

    def __call__(
        self, x_BRD: Float[Array, "batch rows hidden"], live_BR: Bool[Array, "batch rows"]
    ) -> tuple[Float[Array, "batch rows hidden"], Int[Array, "batch rows k"]]:
        """Returns the layer's output (zero for dead rows) and the chosen expert ids (E for dead rows)."""
        batch, rows, hidden = x_BRD.shape
        x_TD = x_BRD.reshape(batch * rows, hidden)
        ids_TK, weights_TK = self.router(x_TD)
        experts = self.experts.weights
        ids_TK = jnp.where(live_BR.reshape(-1, 1), ids_TK, experts.count)
        y_TD = grouped_experts(x_TD, ids_TK, weights_TK, experts)
        return y_TD.reshape(x_BRD.shape), ids_TK.reshape(batch, rows, -1)
