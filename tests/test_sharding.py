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
from ecospec_jax.config import SamplingConfig, SpecConfig
from ecospec_jax.decoding import Weights
from ecospec_jax.errors import UserError
from ecospec_jax.sharding import LAYOUTS, Placement
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
    for layout in LAYOUTS.values():
        assert set(layout.table) <= used, layout.name


def test_unknown_layouts_and_absent_devices_are_refused() -> None:
    with pytest.raises(UserError, match="unknown layout 'diagonal'; known: replicated, tp"):
        Placement.create("diagonal", 1)
    with pytest.raises(UserError, match=f"layout 'tp' asks for 512 devices; there are {jax.device_count()}"):
        Placement.create("tp", 512)


def test_two_devices_give_the_same_tokens() -> None:
    """In a process of its own, since the number of devices is fixed when JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.test_sharding"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


@tiny.compiling_quickly()
def decode_on_two_devices() -> None:
    placement = Placement.create("tp", 2)
    assert placement.sharding(("vocab", "embed"), (30, 12)).spec == PartitionSpec("model", None)
    assert placement.sharding(("vocab", "embed"), (29, 12)).spec == PartitionSpec(None, None)  # does not divide

    target, drafter = tiny.make_target(), tiny.scripted_drafter(3)
    sampling = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9)
    plain = tiny.make_program("ar", sampling=sampling)
    likely = tiny.make_program("likelihood", SpecConfig(), sampling)
    expected, _ = tiny.decode(plain, tiny.plain_weights())
    script = tiny.answers_script(tiny.PROMPTS, tiny.tokens_of(expected), right=0.9, first=0.7)

    def place(module: nnx.Module, state: nnx.State) -> tuple[nnx.State, set[str]]:
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

    weights = tiny.weights_with(script)
    target_state, split = place(target, weights.target)
    assert {"layers.0.moe.experts.gate", "layers.1.moe.experts.down", "layers.0.attention.q.weight"} <= split
    assert "head.weight" not in split and "layers.0.moe.router.gate.weight" not in split
    drafter_state, split = place(drafter, weights.drafter)
    assert {"attention.o.weight", "mlp.down.weight"} <= split

    ours, _ = tiny.decode(plain, Weights(target_state, None))
    assert tiny.tokens_of(ours) == tiny.tokens_of(expected), "ar"
    ours, stats = tiny.decode(likely, Weights(target_state, drafter_state))
    assert tiny.tokens_of(ours) == tiny.tokens_of(expected), "likelihood"
    assert stats.tau > 2
    print("equal")


if __name__ == "__main__":
    decode_on_two_devices()
