"""Experts made wider without changing what they compute, so that a small model decodes as a large one does.

A small model's experts stay in the cache. Padded ones have to come from memory at every step, as a large model's do.
"""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from ecospec_jax.checkpoint import parameters
from ecospec_jax.errors import UserError
from ecospec_jax.models.moe import Experts
from ecospec_jax.models.target import Target

_PADDED = ("experts.gate.weight", "experts.up.weight", "experts.down.weight")


def pad_experts(target: Target, units: int, seed: int = 0) -> Target:
    """Widens every expert of a target, in place, by hidden units that add nothing to its output.

    Their gate and up rows are random numbers of the same scale as the expert's own, their down columns zero. The CPU
    routine adds these zeros behind the expert's own products, so all outputs keep their bits. Other backends may sum a
    wider matrix in another order and then differ by rounding (`xla` on a CPU: 2e-7 of the largest output).

    Matrices are replaced one by one, so that memory holds only one of them twice.

    Args:
        target: on one device.
        units: to add to each expert; 0 changes nothing.
        seed: of the random numbers.

    Returns:
        `target`, whose config has `moe_intermediate_size + units`.

    Raises:
        UserError: `units` is negative, or more than memory has room for, or experts are quantised or have biases.
    """
    if units < 0:
        raise UserError(f"experts cannot be padded by {units} hidden units")
    if units == 0:
        return target
    if other := [path for path in parameters(target) if ".experts." in path and not path.endswith(_PADDED)]:
        raise UserError(f"experts with '{other[0]}' cannot be padded, only those of plain gate, up and down matrices")
    layers = [node for _, node in nnx.iter_graph(target) if isinstance(node, Experts)]
    if layers:
        _check_room(layers, units)
    for experts, key in zip(layers, jax.random.split(jax.random.key(seed), len(layers)), strict=True):
        for part, part_key in zip((experts.gate.weight, experts.up.weight), jax.random.split(key), strict=True):
            part.set_value(_with_random_rows(part.get_value(), part_key, units=units))
        experts.down.weight.set_value(jnp.pad(experts.down.weight.get_value(), ((0, 0), (0, 0), (0, units))))
    width = target.config.moe_intermediate_size + units
    target.config = dataclasses.replace(target.config, moe_intermediate_size=width)
    return target


@partial(jax.jit, static_argnames="units")
def _with_random_rows(
    matrix_EFD: Float[Array, "experts ffn hidden"], key: PRNGKeyArray, *, units: int
) -> Float[Array, "experts wider_ffn hidden"]:
    """Appends `units` normally distributed rows to each expert's matrix, with the standard deviation of its own."""

    def widen(expert: tuple[Array, PRNGKeyArray]) -> Array:
        matrix_FD, key = expert
        deviation = jnp.std(matrix_FD.astype(jnp.float32))
        rows_UD = deviation * jax.random.normal(key, (units, matrix_FD.shape[1]), jnp.float32)
        return jnp.concatenate([matrix_FD, rows_UD.astype(matrix_FD.dtype)])

    return jax.lax.map(widen, (matrix_EFD, jax.random.split(key, len(matrix_EFD))))


def _check_room(layers: list[Experts], units: int) -> None:
    gate_EFD = layers[0].gate.weight.get_value()
    count, _, hidden = gate_EFD.shape
    needed = 3 * len(layers) * count * units * hidden * gate_EFD.dtype.itemsize
    free = _free_bytes(gate_EFD)
    if free is not None and needed > free:
        raise UserError(
            f"experts padded by {units} hidden units need {needed / 1e9:.1f} GB more memory; "
            f"{free / 1e9:.1f} GB are available"
        )


def _free_bytes(array: Array) -> int | None:
    """Memory available where an array is (for a CPU the machine's, whatever a container allows); None if unknown."""
    (device,) = array.devices()
    if stats := device.memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    meminfo = Path("/proc/meminfo")
    available = re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return None if available is None else int(available[1]) * 1024
