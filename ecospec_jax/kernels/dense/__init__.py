"""Dense projections of few rows: a verification's attention, router and head, the drafter, the predictor."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ecospec_jax.kernels import native
from ecospec_jax.kernels.formats import Matrix, Plain, check_matrix
from ecospec_jax.kernels.platform import Lowering, RowOp, notice

# Up to here a CPU is busy reading weights, and the routine that reads them once and in order wins.
MOST_ROWS = 16


def dense(x_TI: Float[Array, "rows in"], matrix_OI: Matrix, *, backend: str | None = None) -> Float[Array, "rows out"]:
    """Product x W^T. It can be differentiated and batched with `vmap`.

    Args:
        x_TI: rows, float32 or bfloat16.
        matrix_OI: W, `[out, in]`, in any storage format.
        backend: `xla`, `cpu` (the C++ routine; at most `MOST_ROWS` rows), or None for `cpu` where that is possible.

    Returns:
        `[T, out]` in the dtype of `x_TI`. With `cpu`, a row's result has the same bits whatever the other rows are.

    Raises:
        ValueError: shapes or dtypes disagree, or the backend does not support this.
    """
    check_matrix(matrix_OI, "matrix_OI")
    if len(matrix_OI.shape) != 2 or x_TI.shape[1:] != matrix_OI.shape[1:]:
        raise ValueError(f"x_TI {list(x_TI.shape)} and matrix_OI {list(matrix_OI.shape)} disagree")
    if backend not in (None, "xla", "cpu"):
        raise ValueError(f"unknown backend '{backend}'; known: xla, cpu")
    return _op((x_TI,), matrix_OI, backend=backend)


def _xla(x_TI: Array, matrix_OI: Matrix, backend: str | None = None) -> Array:
    del backend
    weight_OI = matrix_OI.weight if isinstance(matrix_OI, Plain) else matrix_OI.widen().astype(x_TI.dtype)
    return jnp.einsum("ti,oi->to", x_TI, weight_OI).astype(x_TI.dtype)


def _cpu(x_TI: Array, matrix_OI: Matrix) -> Array:
    native.library()
    shape = jax.ShapeDtypeStruct((x_TI.shape[0], matrix_OI.shape[0]), x_TI.dtype)
    call = jax.ffi.ffi_call("ecospec_dense", shape)
    return call(x_TI, *native.operands(matrix_OI), format=native.format_attribute(matrix_OI.storage))


def _implement(lowering: Lowering, x_TI: Array, matrix_OI: Matrix, *, backend: str | None) -> Array:
    rows, platform = x_TI.shape[0], lowering.platform
    possible = platform == "cpu" and rows <= MOST_ROWS
    if backend == "cpu" and not possible:
        raise ValueError(f"backend 'cpu' serves at most {MOST_ROWS} rows on cpu, not {rows} on {platform}")
    if backend is None and possible and not lowering.partitioned:
        if (reason := native.unavailable()) is None:
            return _cpu(x_TI, matrix_OI)
        notice(f"dense projections of few rows use the slower 'xla' backend: {reason}")
    return _cpu(x_TI, matrix_OI) if backend == "cpu" else _xla(x_TI, matrix_OI)


_op = RowOp("dense", _implement, _xla)


__all__ = ["MOST_ROWS", "dense"]
