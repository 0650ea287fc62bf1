"""Every expert on every row, then a weighted sum: obviously right, and reads all weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`."""
    gate = jnp.einsum("td,efd->tef", x_TD, experts.gate_EFD)
    up = jnp.einsum("td,efd->tef", x_TD, experts.up_EFD)
    y_TED = jnp.einsum("tef,edf->ted", jax.nn.silu(gate) * up, experts.down_EDF)
    # one_hot of an id outside 0..E-1 is all zeros, which is what "skipped" means.
    chosen_TKE = jax.nn.one_hot(expert_ids_TK, experts.count, dtype=x_TD.dtype)
    weight_TE = jnp.einsum("tk,tke->te", combine_weights_TK.astype(x_TD.dtype), chosen_TKE)
    return jnp.einsum("te,ted->td", weight_TE, jnp.where(weight_TE[..., None] != 0, y_TED, 0))
