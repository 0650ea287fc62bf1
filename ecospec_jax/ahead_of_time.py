"""Compiling for accelerators that this machine does not have, as a check: will it compile, and with how much memory?

The packages of the `aot` extra hold the compilers. Devices are described by the facts in this file.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ {capability} }}
  core_count: {cores}
  fpus_per_core: {fpus_per_core}
  clock_rate_ghz: {clock_ghz}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory_optin}
  shared_memory_per_core: {shared_memory}
  l2_cache_size: {l2_cache}
  memory_bandwidth: {memory_bandwidth}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }}
"""
_GPUS = {
    "h200": _GPU.format(
        name="NVIDIA H200",
        capability="major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        shared_memory=228 << 10,
        shared_memory_optin=227 << 10,
        l2_cache=50 << 20,
        memory_bandwidth=4_800_000_000_000,
        memory=141 << 30,
    ),
    "a100": _GPU.format(
        name="NVIDIA A100-SXM4-80GB",
        capability="major: 8 minor: 0",
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        shared_memory=164 << 10,
        shared_memory_optin=163 << 10,
        l2_cache=40 << 20,
        memory_bandwidth=2_039_000_000_000,
        memory=80 << 30,
    ),
}


@dataclass(frozen=True)
class Target:
    """Absent devices, and the options that compiling for them needs.

    Attributes:
        platform: `cuda` or `tpu`, as in `lowering_platforms`.
        devices: for a mesh or a sharding.
        options: for `jax.stages.Lowered.compile`.
    """

    platform: str
    devices: Sequence[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def compile(self, function: Callable[..., Any], *args: Any, **jit: Any) -> jax.stages.Compiled:
        """Compiles for arguments that are `jax.ShapeDtypeStruct`s with a sharding or format over `devices`.

        `jit` are options of `jax.jit`.
        """
        device = self.devices[0]
        kind = AbstractDevice(device.device_kind, getattr(device, "num_cores", None), device.platform)
        # Pallas asks the mesh which device it lowers for.
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            return jax.jit(function, **jit).lower(*args).compile(self.options)


def target(name: str) -> Target:
    """Describes devices by name: `h200` or `a100`, eight of them, or a TPU topology such as `v5e:2x4`.

    Raises:
        ModuleNotFoundError: a package of the `aot` extra is missing.
        ValueError: there is no such device.
    """
    if ":" in name:
        _require("libtpu")
        # Else libtpu asks the network which TPU this machine is, and waits.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        return Target("tpu", topologies.get_topology_desc(name, "tpu").devices)
    if name not in _GPUS:
        raise ValueError(f"unknown device '{name}'; known: {', '.join(_GPUS)}, and TPU topologies such as v5e:2x4")
    _require("jax_cuda12_plugin")
    topology = topologies.get_topology_desc("", "cuda", topology="1x1x8", target_config=_GPUS[name])
    # Without a device there is nothing to tune on.
    options = {"xla_gpu_cuda_data_dir": str(cuda_compiler()), "xla_gpu_autotune_level": 0}
    return Target("cuda", topology.devices, options)


def cuda_compiler() -> Path:
    """The folder of NVIDIA's compiler; `bin/ptxas` lies in it."""
    _require("nvidia.cuda_nvcc")
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    return Path(next(iter(spec.submodule_search_locations)))  # pyright: ignore


def _require(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the parent package
        found = None
    if found is None:
        raise ModuleNotFoundError(f"compiling ahead of time needs '{module}': pip install 'ecospec-jax[aot]'")
