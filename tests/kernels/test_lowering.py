"""Kernels for accelerators lower at the sizes of real models; that needs neither the accelerator nor its compiler."""

import contextlib
import functools

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ecospec_jax.kernels import grouped_experts
from tests.kernels.deployments import DEPLOYMENTS

# What each kernel is called in the lowered program, and how many there are.
KERNELS = {
    "mosaic_gpu": ("mosaic_gpu_v2", 2),
    "triton": ("__gpu$xla.gpu.triton", 2),
    "mosaic_tpu": ("tpu_custom_call", 1),
}
DEVICES = {"cuda": AbstractDevice("NVIDIA H200", None, "gpu"), "rocm": AbstractDevice("gfx942", None, "gpu")}
CASES = [("cuda", "mosaic_gpu"), ("cuda", "triton"), ("rocm", "triton"), ("tpu", "mosaic_tpu")]


def lower(platform: str, backend: str | None, name: str, rows: int) -> str:
    deployment = DEPLOYMENTS[name]
    function = jax.jit(functools.partial(grouped_experts, activation=deployment.activation, backend=backend))
    # From 0.11 on, JAX wants to know which GPU Triton is for.
    device = DEVICES.get(platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)) if device else contextlib.nullcontext():
        return function.trace(*deployment.arguments(rows)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "backend"), CASES)
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_lowers_with_its_kernels(platform: str, backend: str, name: str) -> None:
    call, count = KERNELS[backend]
    assert lower(platform, backend, name, rows=5).count(f"@{call}") == count


@pytest.mark.parametrize(
    ("platform", "backend"), [("cuda", "mosaic_gpu"), ("rocm", "triton"), ("tpu", "mosaic_tpu"), ("cpu", None)]
)
def test_default_of_a_platform(platform: str, backend: str | None) -> None:
    text = lower(platform, None, "qwen3-235b-ep8", rows=1)
    assert [name for name, (call, _) in KERNELS.items() if f"@{call}" in text] == ([backend] if backend else [])
