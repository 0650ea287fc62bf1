"""The kernel compiles for TPUs at the sizes of real models, and reads the weights where they are."""

import functools
from collections.abc import Callable

import jax
import pytest
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from ecospec_jax.ahead_of_time import Target
from ecospec_jax.kernels import grouped_experts
from ecospec_jax.kernels.grouped_experts.mosaic_tpu import memory_layouts
from tests.kernels.deployments import DEPLOYMENTS

MOST_TEMPORARIES = 64_000_000  # far below the weights: none is copied or widened
CASES = [(name, 5) for name in DEPLOYMENTS] + [("qwen3-235b-tp8", 16)]


def temporaries(device: Target, name: str, rows: int, default_layouts: bool) -> int:
    deployment, sharding = DEPLOYMENTS[name], SingleDeviceSharding(device.devices[0])
    *choices, experts = deployment.arguments(rows)
    layouts = memory_layouts(experts)
    placed = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding) for shape in choices]
    experts = jax.tree.map(
        lambda shape, layout: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=sharding if default_layouts else Format(layout, sharding)
        ),
        experts,
        layouts,
    )
    function = functools.partial(grouped_experts, activation=deployment.activation, backend="mosaic_tpu")
    memory = device.compile(function, *placed, experts).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("topology", ["v5e:2x4", "v4:2x2x2"])
@pytest.mark.parametrize(("name", "rows"), CASES)
def test_compiles(absent: Callable[[str], Target], topology: str, name: str, rows: int) -> None:
    assert temporaries(absent(topology), name, rows, default_layouts=False) < MOST_TEMPORARIES


@pytest.mark.parametrize("name", [name for name in DEPLOYMENTS if "gpt-oss" not in name])
def test_reads_default_layouts_in_place(absent: Callable[[str], Target], name: str) -> None:
    """Except for mxfp4, see `memory_layouts`."""
    assert temporaries(absent("v5e:2x4"), name, 5, default_layouts=True) < MOST_TEMPORARIES
