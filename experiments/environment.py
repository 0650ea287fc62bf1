"""What a result was measured with: versions and machine."""

import importlib.metadata
import os
import platform
from functools import cache
from pathlib import Path

import jax

PACKAGES = ("ecospec-jax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "transformers")


@cache
def environment() -> dict[str, object]:
    """Versions of what takes part, processor, devices."""
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        },
    }


def last_level_cache_bytes() -> int | None:
    """Size of the processor's last-level cache; None where the system does not tell."""
    levels = Path("/sys/devices/system/cpu/cpu0/cache")
    try:
        last = max(levels.glob("index*"), key=lambda index: int((index / "level").read_text()))
        return int((last / "size").read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
