"""Layouts on meshes: where each axis goes, and equal tokens on two (virtual) devices."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import RopeConfig, SamplingConfig, SpecConfig
from ecospec_jax.decoding import Weights
from ecospec_jax.errors import UserError
from ecospec_jax.models.gpt_oss import GptOss
from ecospec_jax.models.moe import spread
from ecospec_jax.sharding import Layout, Placement
from tests import tiny

ROOT = Path(__file__).parents[1]
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
    assert set(Layout.named("tp1").table) <= used


@pytest.mark.parametrize(
    ("name", "tensor", "expert"), [("tp8", 8, 1), ("ep8", 1, 8), ("tp4ep2", 4, 2), ("tp2ep16", 2, 16), ("ep1", 1, 1)]
)
def test_names_say_what_is_split(name: str, tensor: int, expert: int) -> None:
    layout = Layout.named(name)
    assert (layout.tensor, layout.expert, layout.devices) == (tensor, expert, tensor * expert)


@pytest.mark.parametrize("name", ["diagonal", "", "tp", "tp0", "ep2tp2", "tp2x", "TP2"])
def test_unknown_layouts_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown layout '{name}'; layouts are called tp8, ep8, tp4ep2"):
        Placement.create(name)


def test_absent_devices_are_refused() -> None:
    with pytest.raises(UserError, match=f"layout 'tp256ep2' asks for 512 devices; there are {jax.device_count()}"):
        Placement.create("tp256ep2")


@pytest.mark.parametrize("layout", ["tp2", "ep2"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_two_devices_give_the_same_tokens(family: str, layout: str) -> None:
    """In a process of its own, since the number of devices is fixed when JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.test_sharding", family, layout]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


GPT_OSS = replace(tiny.GPT_OSS, num_experts=6, swiglu_limit=1.0, rope=RopeConfig(theta=1e4))
TARGETS = {
    "qwen3_moe": lambda: tiny.make_target(replace(tiny.TARGET, num_experts=6)),
    "gpt_oss": lambda: tiny.randomised(lambda: GptOss(GPT_OSS, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=4),
}
SAMPLING = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9)


def place(module: nnx.Module, state: nnx.State, placement: Placement) -> tuple[nnx.State, set[str]]:
    """The state on the mesh, and the paths that are really split."""
    copy = nnx.merge(nnx.graphdef(module), jax.tree.map(jnp.copy, state))
    split = set()
    for path, variable in parameters(copy).items():
        value = variable.get_value()
        sharding = placement.sharding(variable.get_metadata()["logical_axes"], value.shape)
        variable.set_value(jax.device_put(value, sharding))
        if not sharding.is_fully_replicated:
            split.add(path)
            assert variable.get_value().addressable_shards[0].data.size == value.size // 2
    return nnx.state(copy), split


@tiny.compiling_quickly()
def decode_on_two_devices(family: str, layout: str) -> None:
    placement = Placement.create(layout)
    both = ("expert", "tensor")
    assert placement.sharding(("vocab", "embed"), (30, 12)).spec == PartitionSpec(both, None)
    assert placement.sharding(("vocab", "embed"), (29, 12)).spec == PartitionSpec(None, None)  # does not divide
    with pytest.raises(UserError, match=f"layout '{layout}': 7 along '(ffn|expert)' do not divide among 2 devices"):
        placement.sharding(("ffn" if layout == "tp2" else "expert", "embed"), (7, 12))

    target, drafter = TARGETS[family](), tiny.scripted_drafter(3)
    graph, state = nnx.split(target)
    expected, _ = tiny.decode(tiny.make_program("ar", sampling=SAMPLING, target=graph), tiny.plain_weights(state))
    script = tiny.answers_script(tiny.PROMPTS, tiny.tokens_of(expected), right=0.9, first=0.7)

    weights = tiny.weights_with(script, target=state)
    target_state, split = place(target, weights.target, placement)
    experts = "gate.weight" if family == "qwen3_moe" else "gate_up.weight"
    assert {f"layers.0.moe.experts.{experts}", "layers.1.attention.q.weight"} <= split
    assert "head.weight" not in split and "layers.0.moe.router.gate.weight" not in split
    assert ("layers.1.moe.experts.down_bias" in split) == (family == "gpt_oss" and layout == "ep2")
    drafter_state, split = place(drafter, weights.drafter, placement)
    assert {"attention.o.weight", "mlp.down.weight"} <= split

    spread(target, placement)
    graph = nnx.graphdef(target)
    plain = tiny.make_program("ar", sampling=SAMPLING, target=graph)
    likely = tiny.make_program("likelihood", SpecConfig(), SAMPLING, target=graph)
    ours, _ = tiny.decode(plain, Weights(target_state, None))
    assert tiny.tokens_of(ours) == tiny.tokens_of(expected), "ar"
    ours, stats = tiny.decode(likely, Weights(target_state, drafter_state))
    assert tiny.tokens_of(ours) == tiny.tokens_of(expected), "likelihood"
    assert stats.tau > 2
    print("equal")


if __name__ == "__main__":
    decode_on_two_devices(*sys.argv[1:])
