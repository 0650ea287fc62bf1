"""Mesh layouts: one table each from logical axis names to mesh axes. Nothing else names a mesh axis."""

from dataclasses import dataclass, field

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ecospec_jax.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Where each logical axis lives; axes that the table does not name are replicated."""

    name: str
    table: dict[str, str] = field(hash=False)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("replicated", {}),
        Layout("tp", {"heads": "model", "kv_heads": "model", "ffn": "model", "mlp": "model", "vocab": "model"}),
    )
}


@dataclass(frozen=True)
class Placement:
    """A layout on the devices of a mesh."""

    mesh: Mesh
    layout: Layout

    @staticmethod
    def create(layout: str, devices: int) -> "Placement":
        """The named layout on the first `devices` devices."""
        if layout not in LAYOUTS:
            raise UserError(f"unknown layout '{layout}'; known: {', '.join(LAYOUTS)}")
        if devices > jax.device_count():
            raise UserError(f"layout '{layout}' asks for {devices} devices; there are {jax.device_count()}")
        mesh = jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        return Placement(mesh, LAYOUTS[layout])

    def sharding(self, logical_axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Sharding of an array whose dimensions have these names; a dimension that does not divide is replicated."""
        spec = []
        for axis, size in zip(logical_axes, shape, strict=True):
            mesh_axis = self.layout.table.get(axis)
            divides = mesh_axis is not None and size % self.mesh.shape[mesh_axis] == 0
            spec.append(mesh_axis if divides else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))
