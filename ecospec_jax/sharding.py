"""Mesh layouts: one table each from logical axis names to mesh axes. Nothing else names a mesh axis.

A layout's name says how many devices split what: `tp8` splits every expert's hidden units, `ep8` hands out whole
experts, `tp4ep2` does both, on 4 x 2 devices. Everything else is split over all of them, by heads, hidden units,
vocabulary or, of the embedding, channels. In `dp_attn+ep8` attention and its caches are split over the batch instead,
its weights being on every device: a latent cache has no heads to split. `replicated` has everything everywhere.

What does not divide in whole parts (heads, blocks of a quantised matrix) is decided per model, in `Layout.for_model`:

- KV heads are split over as many of the mesh's axes as they divide among, and copied along the others, never cut; the
  heads of the queries are split all the same.
- A vocabulary, the hidden units of a dense MLP, and the embedding's channels are copied.
- Hidden units of an expert that are split are padded with zeros to as many on each device (`Layout.fitted`).
- Heads and experts are refused: copies of them would leave nothing of the layout.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ecospec_jax.config import DeepseekV3Config, GptOssConfig, ModelConfig, Qwen3MoeConfig
from ecospec_jax.errors import UserError
from ecospec_jax.kernels import ExpertWeights
from ecospec_jax.kernels.formats import FP8_BLOCK, MXFP4_BLOCK

Arrays = TypeVar("Arrays")
EXPERT, TENSOR = "expert", "tensor"  # the mesh's axes
DATA = "data"  # the axis of a training's own mesh
_NAME = re.compile(r"(?P<batch>dp_attn\+)?(?:tp(?P<tensor>[1-9]\d*))?(?:ep(?P<expert>[1-9]\d*))?")
# Heads go along TENSOR first, so that KV heads which divide among TENSOR alone lie where their queries are.
_ALL = (TENSOR, EXPERT)
_FEED_FORWARD = {"mlp": _ALL, "vocab": _ALL, "channels": _ALL, "expert": (EXPERT,), "ffn": (TENSOR,)}
_BY_HEADS = MappingProxyType({"heads": _ALL, "kv_heads": _ALL, **_FEED_FORWARD})
_BY_BATCH = MappingProxyType({"batch": _ALL, **_FEED_FORWARD})
_NOTHING: Mapping[str, tuple[str, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class Parts:
    """Along one axis, the least parts that a device may hold of a model's arrays.

    Attributes:
        count: of them; a device takes as many as any other.
        what: they are, for messages.
    """

    count: int
    what: str


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _blocks(size: int, block: int, what: str, blocks: str = "blocks") -> Parts:
    """Parts of a dimension that is only split between blocks; one that ends within a block is not split."""
    if block == 1:
        return Parts(size, f"{size} {what}")
    if size % block:
        return Parts(1, f"{size} {what}, which end within a block of {block},")
    return Parts(size // block, f"{size // block} {blocks} of {block} {what}")


def _expert_block(config: ModelConfig) -> int:
    """Hidden units of an expert between which its matrices can be split."""
    match config:
        case Qwen3MoeConfig():
            return 1
        case GptOssConfig():
            return MXFP4_BLOCK if config.expert_storage == "mxfp4" else 1
        case DeepseekV3Config():
            return FP8_BLOCK if config.storage == "fp8" else 1


def _parts(config: ModelConfig) -> dict[str, tuple[Parts, ...]]:
    """What each logical axis of a target consists of, but for the hidden units of experts, which `fitted` sees to."""
    block = 1
    match config:
        case Qwen3MoeConfig():
            dense = (config.intermediate_size,) if config.dense_layers else ()
            heads, kv_heads = _blocks(config.num_heads, 1, "attention heads"), config.num_kv_heads
        case GptOssConfig():
            dense = ()
            heads, kv_heads = _blocks(config.num_heads, 1, "attention heads"), config.num_kv_heads
        case DeepseekV3Config():
            block = _expert_block(config)
            dense = (config.intermediate_size, config.shared_experts * config.moe_intermediate_size)
            widths = (
                config.qk_nope_head_dim + config.qk_rope_head_dim,
                config.qk_nope_head_dim + config.v_head_dim,
                config.v_head_dim,
            )
            together = math.lcm(*(block // math.gcd(block, width) for width in widths))  # heads that fill whole blocks
            heads, kv_heads = _blocks(config.num_heads, together, "attention heads", "groups"), 1  # the latent
    return {
        "heads": (heads,),
        "kv_heads": (_blocks(kv_heads, 1, "KV heads"),),
        "mlp": tuple(_blocks(width, block, "hidden units") for width in dense),
        "vocab": (_blocks(config.vocab_size, 1, "tokens"),),
        "channels": (_blocks(config.hidden_size, 1, "channels"),),
        "expert": (_blocks(config.num_experts, 1, "experts"),),
    }


_NEVER_COPIED = ("heads", "expert")
_TILE = 64  # hidden units of an expert that kernels for GPUs take at once


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
    table: Mapping[str, tuple[str, ...]] = field(hash=False)

    @staticmethod
    def named(name: str) -> "Layout":
        """The layout of a name; one that says nothing is a `UserError`."""
        match = _NAME.fullmatch(name)
        if match is None or not (match["tensor"] or match["expert"]):
            raise UserError(f"unknown layout '{name}'; layouts are called tp8, ep8, tp4ep2, dp_attn+ep8 and so on")
        table = _BY_BATCH if match["batch"] else _BY_HEADS
        return Layout(name, int(match["tensor"] or 1), int(match["expert"] or 1), table)

    @property
    def devices(self) -> int:
        """How many it needs."""
        return self.tensor * self.expert

    @property
    def replicated(self) -> "Layout":
        """Everything on each of the same devices."""
        return replace(self, name="replicated", table=_NOTHING)

    def count(self, mesh_axes: tuple[str, ...]) -> int:
        """Devices along these axes of the mesh together."""
        return math.prod({TENSOR: self.tensor, EXPERT: self.expert}[axis] for axis in mesh_axes)

    def fitted(self, config: ModelConfig) -> ModelConfig:
        """A target's config with its experts as wide as this layout stores them: zeros behind their hidden units.

        If experts are split, each device has as many units, whole blocks of them, and whole tiles of kernels unless
        that is less than one tile. Zeros add nothing to what an expert computes, whatever its activation and biases.
        """
        if self.tensor == 1:
            return config
        block = _expert_block(config)
        share = _up(-(-config.moe_intermediate_size // self.tensor), block)
        share = _up(share, math.lcm(block, _TILE)) if share > _TILE else share
        return replace(config, moe_intermediate_size=share * self.tensor)

    def for_model(self, config: ModelConfig) -> "Layout":
        """The layout as it serves a target: its table without what the target is too uneven for (see the module).

        Raises:
            UserError: it cannot serve this target, and why.
        """
        parts, table = _parts(self.fitted(config)), {}
        for axis, mesh_axes in self.table.items():
            uneven = [part for part in parts.get(axis, ()) if part.count % self.count(mesh_axes)]
            if uneven and axis in _NEVER_COPIED:
                raise UserError(
                    f"layout '{self.name}' cannot serve this {config.family}: {uneven[0].what} "
                    f"do not divide among {self.count(mesh_axes)} devices"
                )
            if uneven and axis == "kv_heads":  # fewer axes, in the order of the queries' heads
                while uneven[0].count % self.count(mesh_axes):
                    mesh_axes = mesh_axes[:-1]
                table[axis] = mesh_axes
            elif not uneven:
                table[axis] = mesh_axes
        return replace(self, table=MappingProxyType(table))


@dataclass(frozen=True)
class Placement:
    """A layout on the devices of a mesh."""

    mesh: Mesh
    layout: Layout

    @staticmethod
    def create(layout: str, devices: list[Any] | None = None) -> "Placement":
        """The named layout on the first of `devices` (default: those of all processes).

        Raises:
            UserError: there are too few, or so many that a process of this run would have nothing to do.
        """
        table, found = Layout.named(layout), jax.devices() if devices is None else devices
        if table.devices > len(found):
            raise UserError(f"layout '{layout}' asks for {table.devices} devices; there are {len(found)}")
        if devices is None:
            processes = len({device.process_index for device in found[: table.devices]})
            if processes < jax.process_count():
                raise UserError(
                    f"layout '{layout}' takes {table.devices} of {len(found)} devices, all of {processes} of the "
                    f"{jax.process_count()} processes"
                )
        grid = np.array(found[: table.devices]).reshape(table.expert, table.tensor)
        return Placement(Mesh(grid, (EXPERT, TENSOR)), table)

    def for_model(self, config: ModelConfig) -> "Placement":
        """The same with `Layout.for_model`."""
        return replace(self, layout=self.layout.for_model(config))

    @property
    def replicated(self) -> "Placement":
        """Everything on each of the same devices: for models so small that collectives would cost more than reading."""
        return replace(self, layout=self.layout.replicated)

    def spec(self, logical_axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Where the dimensions of an array go; one that does not divide is a `UserError`."""
        parts = []
        for axis, size in zip(logical_axes, shape, strict=True):
            mesh_axes = self.layout.table.get(axis, ())
            if size % self.layout.count(mesh_axes):
                raise UserError(
                    f"layout '{self.layout.name}': {size} along '{axis}' do not divide among "
                    f"{self.layout.count(mesh_axes)} devices"
                )
            parts.append(mesh_axes or None)
        return PartitionSpec(*parts)

    def sharding(self, logical_axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Sharding of an array whose dimensions have these names."""
        return NamedSharding(self.mesh, self.spec(logical_axes, shape))

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of what every device has as a whole."""
        return NamedSharding(self.mesh, PartitionSpec())

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
        by_expert, by_unit = (self.layout.table.get(axis, ()) for axis in ("expert", "ffn"))

        def apart(x_TD: Array, ids_TK: Array, weights_TK: Array, mine: ExpertWeights) -> Array:
            if mine.down_bias is not None:  # it belongs to the sum, not to each part
                own = jnp.where(lax.axis_index(by_unit) == 0, mine.down_bias, jnp.zeros_like(mine.down_bias))
                mine = replace(mine, down_bias=own)
            y_TD = op(x_TD, ids_TK - lax.axis_index(by_expert) * mine.count, weights_TK, mine)
            return lax.psum(y_TD.astype(jnp.float32), (*by_expert, *by_unit))

        everywhere = PartitionSpec()
        whole = jax.shard_map(
            apart,
            mesh=self.mesh,
            in_specs=(everywhere, everywhere, everywhere, specs),
            out_specs=everywhere,
            check_vma=False,
        )
        return whole(x_TD, ids_TK, weights_TK, experts).astype(x_TD.dtype)


def whole(placement: Placement | None, arrays: Arrays) -> Arrays:
    """The same arrays, on every device; it also keeps XLA from splitting by itself what they are computed from."""
    return arrays if placement is None else lax.with_sharding_constraint(arrays, placement.everywhere)


class Placed(nnx.Module):
    """A module that knows where its parts are; on one device until `spread` says otherwise."""

    placement: Placement | None = None

    def pin(self, x: Float[Array, "..."], logical_axes: tuple[str, ...]) -> Float[Array, "..."]:
        """The same array, where the layout has it."""
        if self.placement is None:
            return x
        return lax.with_sharding_constraint(x, self.placement.sharding(logical_axes, x.shape))

    def whole(self, arrays: Arrays) -> Arrays:
        """The same arrays, on every device."""
        return whole(self.placement, arrays)


def spread(module: nnx.Module, placement: Placement | None) -> None:
    """Lets every part of a module compute where its weights are."""
    if placement is None:
        return  # as modules are built
    for _, node in nnx.iter_graph(module):
        if isinstance(node, Placed):
            node.placement = placement


def data_parallel(count: int) -> tuple[NamedSharding, NamedSharding]:
    """Shardings over `count` devices: whole on each, and split along the first dimension. Too few are a `UserError`."""
    found = jax.devices()
    if count > len(found):
        raise UserError(f"{count} devices are asked for; there are {len(found)}")
    mesh = Mesh(np.array(found[:count]), (DATA,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(DATA))
