"""Layouts on meshes: what goes where, what is copied and what refused; tests/test_mesh_tokens.py decodes with them."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from ecospec_jax import Decoder
from ecospec_jax.cache import BUFFER_AXES
from ecospec_jax.checkpoint import parameters
from ecospec_jax.errors import UserError
from ecospec_jax.kernels.formats import FP8_BLOCK
from ecospec_jax.models import abstract
from ecospec_jax.presets import PRESETS, get_preset
from ecospec_jax.sharding import Layout, Placement
from tests import tiny

EVERY_OPTION = [
    lambda: tiny.make_target(replace(tiny.TARGET, attention_bias=True, dense_layers=(1,))),
    lambda: tiny.make_target(replace(tiny.TARGET, tie_embeddings=True)),
    lambda: tiny.make_drafter(replace(tiny.DRAFTER, norm_before_fc=True)),
    lambda: tiny.make_drafter(replace(tiny.DRAFTER, norm_each_boundary=True)),
]


@pytest.mark.parametrize("make", EVERY_OPTION)
def test_every_parameter_names_its_axes(make) -> None:
    """One name a dimension, and the layouts' tables know only names that occur."""
    for path, variable in parameters(make()).items():
        axes = variable.get_metadata()["logical_axes"]
        assert len(axes) == variable.get_value().ndim, path
        assert all(isinstance(axis, str) and axis for axis in axes), path


def test_layouts_name_axes_that_occur() -> None:
    used = {a for make in EVERY_OPTION for v in parameters(make()).values() for a in v.get_metadata()["logical_axes"]}
    for name in ("tp1", "dp_attn+tp1"):
        assert set(Layout.named(name).table) <= used | set(BUFFER_AXES)


@pytest.mark.parametrize(
    ("name", "tensor", "expert"),
    [("tp8", 8, 1), ("ep8", 1, 8), ("tp4ep2", 4, 2), ("tp2ep16", 2, 16), ("ep1", 1, 1), ("dp_attn+ep8", 1, 8)],
)
def test_names_say_what_is_split(name: str, tensor: int, expert: int) -> None:
    layout = Layout.named(name)
    assert (layout.tensor, layout.expert, layout.devices) == (tensor, expert, tensor * expert)


@pytest.mark.parametrize("name", ["diagonal", "", "tp", "tp0", "ep2tp2", "tp2x", "TP2", "dp_attn+", "dp_attn"])
def test_unknown_layouts_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown layout '{re.escape(name)}'; layouts are called tp8, ep8, tp4ep2"):
        Placement.create(name)


def test_absent_devices_are_refused() -> None:
    with pytest.raises(UserError, match=f"layout 'tp256ep2' asks for 512 devices; there are {jax.device_count()}"):
        Placement.create("tp256ep2")


@pytest.mark.parametrize(
    ("preset", "name", "kv_heads"),
    [
        ("qwen3-30b-a3b", "tp8", ()),
        ("qwen3-30b-a3b", "tp4", ("tensor", "expert")),
        ("qwen3-30b-a3b", "tp4ep2", ("tensor",)),
        ("qwen3-30b-a3b", "tp2ep4", ("tensor",)),
        ("gpt-oss-120b", "tp2ep4", ("tensor", "expert")),
        ("gpt-oss-120b", "ep16", ("tensor",)),  # of which there is one
        ("deepseek-v3.1", "tp8", ()),
        ("deepseek-v3.1", "dp_attn+ep8", None),
    ],
)
def test_kv_heads_are_split_as_whole_heads(preset: str, name: str, kv_heads: tuple[str, ...] | None) -> None:
    config, layout = get_preset(preset), Layout.named(name).for_model(get_preset(preset))
    assert layout.table.get("kv_heads") == kv_heads
    if kv_heads is not None:
        assert layout.table["heads"] == ("tensor", "expert")  # the queries' are split whatever happens to these
        assert getattr(config, "num_kv_heads", 1) % layout.count(kv_heads) == 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_every_parameter_of_a_published_target_divides_or_the_layout_is_refused(preset: str, devices: int) -> None:
    """Its shares are whole heads and whole storage blocks, so every scale lies with what it scales."""
    config = get_preset(preset, 4)
    names = {f"tp{devices}", f"ep{devices}", f"tp{max(1, devices // 2)}ep2", f"dp_attn+ep{devices}"}
    served = set()
    for name in names:
        try:
            placement = Placement.create(name, [object()] * 32).for_model(config)
        except UserError as error:
            assert re.search(r"cannot serve this \w+: \d+ .* do not divide among \d+ devices", str(error))
            continue
        served.add(name)
        shares = {
            path: shard_shape(placement.spec_of(variable), variable.get_value().shape, placement)
            for path, variable in parameters(abstract(placement.layout.fitted(config), jnp.dtype(jnp.bfloat16))).items()
        }
        for path, share in shares.items():
            if path.endswith("scales") and path.replace("scales", "weight") in shares:
                whole = tuple(-(-size // FP8_BLOCK) for size in shares[path.replace("scales", "weight")][-2:])
                assert share[-2:] == whole, (name, path)
            if path.endswith("down.scales") and path.replace("scales", "blocks") in shares:
                rows = shares[path.replace("down.scales", "gate_up.blocks")][1]
                assert rows == 2 * 32 * share[-1], (name, path)
    assert served == names


def shard_shape(spec: PartitionSpec, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
    grouped = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
    return tuple(size // placement.layout.count(axes) for size, axes in zip(shape, grouped, strict=True))


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (tiny.TARGET, "ep2", "layout 'ep2' cannot serve this qwen3_moe: 7 experts do not divide among 2 devices"),
        (replace(tiny.TARGET, num_experts=8), "ep8", "4 attention heads do not divide among 8 devices"),
        (
            replace(get_preset("deepseek-v3.1"), qk_rope_head_dim=32, num_heads=8),  # four heads fill five blocks
            "tp4",
            "2 groups of 4 attention heads do not divide among 4 devices",
        ),
    ],
)
def test_a_layout_that_cannot_serve_a_target_is_refused(config, name: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Layout.named(name).for_model(config)


def test_uneven_vocabularies_and_dense_layers_are_copied() -> None:
    config = replace(tiny.TARGET, num_experts=8, dense_layers=(1,), intermediate_size=15)
    table = Layout.named("ep2").for_model(config).table
    assert "vocab" not in table and "mlp" not in table
    assert table["channels"] == table["heads"] == ("tensor", "expert")


def test_a_batch_that_does_not_divide_is_refused() -> None:
    placement = Placement.create("dp_attn+ep4", [object()] * 4)
    assert placement.spec(("batch",), (8,)) == PartitionSpec(("tensor", "expert"))
    with pytest.raises(UserError, match="layout 'dp_attn.ep4': 6 along 'batch' do not divide among 4 devices"):
        placement.spec(("batch",), (6,))
    decoder = Decoder(tiny.make_target(), None, eos_ids=(), placement=placement)
    for use in (lambda: decoder.generate([[1, 2]], method="ar", batch_size=6), lambda: decoder.routing([[1, 2]] * 6)):
        with pytest.raises(UserError, match="6 along 'batch' do not divide among 4 devices"):
            use()


def test_a_replicated_placement_splits_nothing() -> None:
    placement = Placement.create("tp2ep2", [object()] * 4).replicated
    assert placement.layout.devices == 4
    axes = tuple(Layout.named("tp2ep2").table)
    assert placement.spec(axes, (7,) * len(axes)) == PartitionSpec(*[None] * len(axes))
