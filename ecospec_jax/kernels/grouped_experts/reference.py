"""Every expert on every row, then a weighted sum: obviously right, and reads all weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.formats import Matrix
from ecospec_jax.kernels.grouped_experts.activations import Activation
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    activation: Activation,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`. Computes in float32."""
    flat, first = experts.flat()
    own = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, experts.count), flat)

    def project(x: Array, subscripts: str, matrix: Matrix, bias: Array | None) -> Array:
        y = jnp.einsum(subscripts, x, matrix.widen())
        return y if bias is None else y + bias.astype(jnp.float32)

    x_TD32 = x_TD.astype(jnp.float32)
    parts = [project(x_TD32, "td,efd->tef", *part) for part in own.gate_up_parts]
    gate_TEF, up_TEF = experts.gate_and_up(parts)
    y_TED = project(activation(gate_TEF, up_TEF), "tef,edf->ted", own.down, own.down_bias)

    # No expert equals an id outside 0..E-1, which is what "skipped" means.
    chosen_TKE = expert_ids_TK[..., None] == jnp.arange(experts.count)
    weight_TE = jnp.sum(jnp.where(chosen_TKE, combine_weights_TK.astype(jnp.float32)[..., None], 0), axis=1)
    used_TE = jnp.any(chosen_TKE, axis=1)
    y_TD = jnp.einsum("te,ted->td", weight_TE, jnp.where(used_TE[..., None], y_TED, 0))
    return y_TD.astype(x_TD.dtype)
