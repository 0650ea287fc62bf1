"""The expert layer: each row through its own experts, at the cost of the distinct experts only."""

from typing import Literal

from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.grouped_experts import reference, xla
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights

Backend = Literal["reference", "xla"]
_BACKENDS = {"reference": reference.grouped_experts, "xla": xla.grouped_experts}


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    *,
    backend: Backend = "xla",
) -> Float[Array, "rows hidden"]:
    """Sum over k of combine weight times down(silu(gate x) * up x) of expert id, for each row.

    Args:
        x_TD: rows.
        expert_ids_TK: experts of each row. Ids outside `0 .. E-1` are skipped (dead rows); duplicates add up.
        combine_weights_TK: factor of each expert's output.
        experts: one layer's weights. Only the experts that occur in `expert_ids_TK` are read.
        backend: `xla` loops over the distinct experts; `reference` computes every expert densely, for tests.

    Returns:
        `[T, D]` in the dtype of `x_TD`; a row with no valid id is zero.
    """
    return _BACKENDS[backend](x_TD, expert_ids_TK, combine_weights_TK, experts)


__all__ = ["Backend", "ExpertWeights", "grouped_experts"]
