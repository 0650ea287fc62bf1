"""The expert layer: each row through its own experts, at the cost of the distinct experts only."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.grouped_experts import reference
from ecospec_jax.kernels.grouped_experts.activations import Activation, ClampedSwiglu, Swiglu
from ecospec_jax.kernels.grouped_experts.backends import BACKENDS, implement
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights
from ecospec_jax.kernels.platform import RowOp


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    *,
    activation: Activation = Swiglu(),
    backend: str | None = None,
) -> Float[Array, "rows hidden"]:
    """Sum over k of combine weight times down(activation(gate x, up x)) of expert id, for each row.

    It can be differentiated (by way of `reference`, which reads all experts) and batched with `vmap`.

    Args:
        x_TD: rows; any number. float32 or bfloat16.
        expert_ids_TK: experts of each row. Ids outside `0 .. E-1` are skipped (dead rows, experts that other devices
            hold); duplicates add up.
        combine_weights_TK: factor of each expert's output.
        experts: weights. Only the experts that occur in `expert_ids_TK` are read.
        activation: between the projections.
        backend: one of `BACKENDS`, or None for the best one of the platform that the computation is lowered for.

    Returns:
        `[T, D]` in the dtype of `x_TD`; a row with no valid id is zero.

    Raises:
        ValueError: shapes or dtypes disagree, or the backend is unknown or does not support this combination. The
            latter appears when the computation is lowered.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}'; known: {', '.join(BACKENDS)}")
    if str(x_TD.dtype) not in ("float32", "bfloat16"):
        raise ValueError(f"x_TD: {x_TD.dtype}, expected float32 or bfloat16")
    if not jnp.issubdtype(expert_ids_TK.dtype, jnp.integer):
        raise ValueError(f"expert_ids_TK: {expert_ids_TK.dtype}, expected integers")
    shapes_fit = x_TD.ndim == expert_ids_TK.ndim == 2 and len(x_TD) == len(expert_ids_TK)
    if not shapes_fit or expert_ids_TK.shape != combine_weights_TK.shape:
        raise ValueError(
            f"x_TD {list(x_TD.shape)}, expert_ids_TK {list(expert_ids_TK.shape)} and combine_weights_TK "
            f"{list(combine_weights_TK.shape)} disagree"
        )
    experts.check(x_TD.shape[1])
    if expert_ids_TK.size == 0:
        return jnp.zeros_like(x_TD)
    rows = x_TD, expert_ids_TK.astype(jnp.int32), combine_weights_TK
    return _op(rows, experts, activation=activation, backend=backend)


def _reference(
    x_TD: Array, ids_TK: Array, weights_TK: Array, experts: ExpertWeights, activation: Activation, backend: str | None
) -> Float[Array, "rows hidden"]:
    del backend
    return reference.grouped_experts(x_TD, ids_TK, weights_TK, experts, activation)


_op = RowOp("grouped_experts", implement, _reference)

__all__ = ["BACKENDS", "Activation", "ClampedSwiglu", "ExpertWeights", "Swiglu", "grouped_experts"]
