"""The kernels compile for GPUs at the sizes of real models; their registers suffice and their temporaries are small."""

import dataclasses
import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from ecospec_jax.ahead_of_time import Target, cuda_compiler
from ecospec_jax.kernels import grouped_experts
from tests.kernels.deployments import DEPLOYMENTS

MOST_TEMPORARIES = 64_000_000  # far below the weights: none is copied or widened
CASES = [(name, 5) for name in DEPLOYMENTS] + [("qwen3-235b-tp8", 16)]


def compile_for(device: Target, backend: str, name: str, rows: int) -> jax.stages.Compiled:
    deployment, sharding = DEPLOYMENTS[name], SingleDeviceSharding(device.devices[0])
    arguments = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), deployment.arguments(rows)
    )
    return device.compile(
        functools.partial(grouped_experts, activation=deployment.activation, backend=backend), *arguments
    )


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize(("name", "rows"), CASES)
def test_compiles_for_h200(absent: Callable[[str], Target], backend: str, name: str, rows: int) -> None:
    memory = compile_for(absent("h200"), backend, name, rows).memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < MOST_TEMPORARIES


@pytest.mark.parametrize(("gpu", "architecture"), [("h200", "sm_90a"), ("a100", "sm_80")])
@pytest.mark.parametrize("name", ["qwen3-235b-tp8", "gpt-oss-120b-ep8", "deepseek-v3.1-ep8"])
def test_triton_kernels_spill_no_registers(
    absent: Callable[[str], Target], tmp_path: Path, gpu: str, architecture: str, name: str
) -> None:
    device = absent(gpu)
    dumping = dataclasses.replace(device, options={**device.options, "xla_dump_to": str(tmp_path)})
    compile_for(dumping, "triton", name, 5)
    kernels = [
        path for path in tmp_path.glob("*.ptx") if re.search(r"\.entry _(gate_up|down)_kernel", path.read_text())
    ]
    assert len(kernels) == 2
    for path in kernels:
        command = [cuda_compiler() / "bin" / "ptxas", f"-arch={architecture}", "-v", path, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"], report
