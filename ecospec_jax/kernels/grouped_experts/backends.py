"""Which backend runs where, and what each supports."""

import importlib
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.grouped_experts.activations import Activation
from ecospec_jax.kernels.grouped_experts.weights import ExpertWeights
from ecospec_jax.kernels.platform import PLATFORMS, Lowering, notice

_ALL_STORAGES = ("float32", "bfloat16", "mxfp4", "fp8")


@dataclass(frozen=True)
class Backend:
    """A module of this package with a function `grouped_experts`, imported where it is used first."""

    name: str
    platforms: tuple[str, ...]
    storages: tuple[str, ...] = _ALL_STORAGES

    def check(self, platform: str, experts: ExpertWeights) -> None:
        """Raises ValueError, naming what is supported, if this backend cannot serve."""
        if platform not in self.platforms:
            raise ValueError(
                f"backend '{self.name}' does not run on {platform}; on {platform}: "
                + ", ".join(backend.name for backend in BACKENDS.values() if platform in backend.platforms)
            )
        if experts.storage not in self.storages:
            raise ValueError(
                f"backend '{self.name}' does not support experts stored as {experts.storage}; it supports "
                f"{', '.join(self.storages)}. On {platform}, {experts.storage} is supported by: "
                + ", ".join(
                    backend.name
                    for backend in BACKENDS.values()
                    if platform in backend.platforms and experts.storage in backend.storages
                )
            )

    def __call__(self, x_TD: Array, ids_TK: Array, weights_TK: Array, experts: ExpertWeights, act: Activation) -> Array:
        """Runs it."""
        module = importlib.import_module(f"{__package__}.{self.name}")
        return module.grouped_experts(x_TD, ids_TK, weights_TK, experts, act)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", PLATFORMS),
        Backend("xla", PLATFORMS),
        Backend("cpu", ("cpu",)),
        Backend("mosaic_gpu", ("cuda",), ("bfloat16", "mxfp4", "fp8")),
        Backend("triton", ("cuda", "rocm")),
        Backend("mosaic_tpu", ("tpu",)),
    )
}


def default_backend(lowering: Lowering) -> str:
    """The best backend of a platform, with a notice where that is a second choice."""
    platform = lowering.platform
    if lowering.partitioned:
        notice("expert layers use the slower 'xla' backend: XLA divides this computation among devices")
        return "xla"
    if platform == "cpu":
        from ecospec_jax.kernels import native

        if (reason := native.unavailable()) is None:
            return "cpu"
        notice(f"expert layers use the slower 'xla' backend: {reason}")
        return "xla"
    if platform == "cuda":
        capability = cuda_capability()
        if capability is None or capability >= 9.0:
            return "mosaic_gpu"
        notice(f"expert layers use the 'triton' backend: compute capability {capability} is below 9.0")
        return "triton"
    return {"rocm": "triton", "tpu": "mosaic_tpu"}[platform]


def cuda_capability() -> float | None:
    """Compute capability of this process's NVIDIA GPU; None without one (compilation ahead of time)."""
    if jax.default_backend() != "gpu":
        return None
    return float(getattr(jax.devices()[0], "compute_capability", "9.0"))


def implement(
    lowering: Lowering,
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    *,
    activation: Activation,
    backend: str | None,
) -> Float[Array, "rows hidden"]:
    """The op as it is lowered; see `ecospec_jax.kernels.grouped_experts`."""
    chosen = BACKENDS[default_backend(lowering) if backend is None else backend]
    chosen.check(lowering.platform, experts)
    return chosen(x_TD, expert_ids_TK, combine_weights_TK, experts, activation)
