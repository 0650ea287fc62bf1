"""The C++ routine for CPUs, over the distinct experts; groups rows itself, once for all projections."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels import native
from ecospec_jax.kernels.grouped_experts.activations import Activation, ClampedSwiglu
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights


def grouped_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    activation: Activation,
) -> Float[Array, "rows hidden"]:
    """See `ecospec_jax.kernels.grouped_experts`.

    Accumulates in float32; each row's result has the same bits whatever the other rows are. With bfloat16 rows the
    activation's result is rounded to bfloat16, as it is where tensor cores multiply.
    """
    native.library()
    flat, first = experts.flat()
    absent = jnp.zeros((0,), jnp.float32)
    parts = [*flat.gate_up_parts, *[(None, None)] * (not experts.split), (flat.down, flat.down_bias)]
    weights = [
        array for matrix, bias in parts for array in (*native.operands(matrix), absent if bias is None else bias)
    ]
    clamped = activation if isinstance(activation, ClampedSwiglu) else None
    call = jax.ffi.ffi_call("ecospec_grouped_experts", jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype))
    return call(
        x_TD,
        expert_ids_TK,
        combine_weights_TK.astype(jnp.float32),
        jnp.reshape(jnp.asarray(first, jnp.int32), (1,)),
        *weights,
        format=native.format_attribute(experts.storage),
        count=experts.count,
        ffn=experts.ffn,
        split=experts.split,
        clamped=clamped is not None,
        limit=np.float32(clamped.limit if clamped else 0),
        alpha=np.float32(clamped.alpha if clamped else 0),
    )
