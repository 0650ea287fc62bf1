"""Mesh layouts: one table each from logical axis names to mesh axes. Nothing else names a mesh axis.

A layout's name says how many devices split what: `tp8` splits every expert's hidden units, `ep8` hands out whole
experts, `tp4ep2` does both, on 4 x 2 devices. Everything else is split over all of them, by heads, hidden units or
vocabulary.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ecospec_jax.errors import UserError
from ecospec_jax.kernels import ExpertWeights

EXPERT, TENSOR = "expert", "tensor"  # the mesh's axes
DATA = "data"  # the axis of a training's own mesh
_NAME = re.compile(r"(?:tp(?P<tensor>[1-9]\d*))?(?:ep(?P<expert>[1-9]\d*))?")
_ALL = (EXPERT, TENSOR)
_TABLE = {
    "heads": _ALL,
    "kv_heads": _ALL,
    "mlp": _ALL,
    "vocab": _ALL,
    "expert": (EXPERT,),
    "ffn": (TENSOR,),
}
_STRICT = ("expert", "ffn")  # an expert layer is split as a whole or not at all


@dataclass(frozen=True)
class Layout:
    """Where each logical axis lives; axes that the table does not name are replicated.

    Attributes:
        name: such as `tp4ep2`.
        tensor, expert: devices along each axis of the mesh.
        table: mesh axes of a logical axis.
    """

    name: str
    tensor: int
    expert: int
    table: dict[str, tuple[str, ...]] = field(hash=False)

    @staticmethod
    def named(name: str) -> "Layout":
        """The layout of a name; one that says nothing is a `UserError`."""
        match = _NAME.fullmatch(name)
        if match is None or not name:
            raise UserError(f"unknown layout '{name}'; layouts are called tp8, ep8, tp4ep2 and so on")
        return Layout(name, int(match["tensor"] or 1), int(match["expert"] or 1), _TABLE)

    @property
    def devices(self) -> int:
        """How many it needs."""
        return self.tensor * self.expert


@dataclass(frozen=True)
class Placement:
    """A layout on the devices of a mesh."""

    mesh: Mesh
    layout: Layout

    @staticmethod
    def create(layout: str, devices: list[Any] | None = None) -> "Placement":
        """The named layout on the first of `devices` (default: this process's); too few are a `UserError`."""
        table, found = Layout.named(layout), jax.devices() if devices is None else devices
        if table.devices > len(found):
            raise UserError(f"layout '{layout}' asks for {table.devices} devices; there are {len(found)}")
        grid = np.array(found[: table.devices]).reshape(table.expert, table.tensor)
        return Placement(Mesh(grid, (EXPERT, TENSOR)), table)

    def spec(self, logical_axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Where the dimensions of an array go. One that does not divide is replicated; of an expert it is refused."""
        parts = []
        for axis, size in zip(logical_axes, shape, strict=True):
            mesh_axes = self.layout.table.get(axis, ())
            count = int(np.prod([self.mesh.shape[name] for name in mesh_axes], dtype=int))
            if size % count and axis in _STRICT:
                raise UserError(
                    f"layout '{self.layout.name}': {size} along '{axis}' do not divide among {count} devices"
                )
            parts.append(mesh_axes if mesh_axes and size % count == 0 else None)
        return PartitionSpec(*parts)

    def sharding(self, logical_axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Sharding of an array whose dimensions have these names."""
        return NamedSharding(self.mesh, self.spec(logical_axes, shape))

    def spec_of(self, parameter: nnx.Variable) -> PartitionSpec:
        """`spec` of a parameter."""
        return self.spec(parameter.get_metadata()["logical_axes"], parameter.get_value().shape)

    def experts_apart(
        self,
        op: Callable[..., Float[Array, "rows hidden"]],
        x_TD: Float[Array, "rows hidden"],
        ids_TK: Int[Array, "rows k"],
        weights_TK: Float[Array, "rows k"],
        experts: ExpertWeights,
        specs: ExpertWeights,
    ) -> Float[Array, "rows hidden"]:
        """An expert layer of which each device computes the part that its weights allow; one sum joins the parts.

        Args:
            op: `grouped_experts` but for its options. It skips ids that are out of range: other devices' experts.
            x_TD: rows, on every device.
            ids_TK: experts of each row.
            weights_TK: factor of each expert's output.
            experts: all weights.
            specs: `spec_of` in place of each.
        """

        def apart(x_TD: Array, ids_TK: Array, weights_TK: Array, mine: ExpertWeights) -> Array:
            if mine.down_bias is not None:  # it belongs to the sum, not to each part
                own = jnp.where(lax.axis_index(TENSOR) == 0, mine.down_bias, jnp.zeros_like(mine.down_bias))
                mine = replace(mine, down_bias=own)
            y_TD = op(x_TD, ids_TK - lax.axis_index(EXPERT) * mine.count, weights_TK, mine)
            return lax.psum(y_TD.astype(jnp.float32), _ALL)

        everywhere = PartitionSpec()
        whole = jax.shard_map(
            apart,
            mesh=self.mesh,
            in_specs=(everywhere, everywhere, everywhere, specs),
            out_specs=everywhere,
            check_vma=False,
        )
        return whole(x_TD, ids_TK, weights_TK, experts).astype(x_TD.dtype)


def data_parallel(count: int) -> tuple[NamedSharding, NamedSharding]:
    """Shardings over `count` devices: whole on each, and split along the first dimension. Too few are a `UserError`."""
    found = jax.devices()
    if count > len(found):
        raise UserError(f"{count} devices are asked for; there are {len(found)}")
    mesh = Mesh(np.array(found[:count]), (DATA,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(DATA))
