"""Other implementations of the same expert layer, to time beside this project's."""

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ecospec_jax.kernels import ExpertWeights
from experiments.kernel_shapes import Shape, chained_calls

TORCH_IMPLEMENTATIONS = ("eager", "grouped_mm")
# More than this, and the copies that `gather` and `ragged_dot` make or need are too many.
MOST_JAX_BYTES = 3 << 30


@dataclass(frozen=True)
class Peer:
    """Something to compare with: its name in tables, and the time of calls `(x_TD, ids_NTK)` one after the other."""

    name: str
    seconds: Callable[[jax.Array, np.ndarray], float]


def package_versions(*packages: str) -> dict[str, str | None]:
    """Installed versions, None where a package is missing."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) if name in installed else None for name in packages}


def torch_missing() -> str | None:
    """Why there are no peers of torch, if so."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def applicable_peers(shape: Shape, storage: str) -> list[str]:
    """Names of the peers that know this layout and format. `xla` is this project's own."""
    if storage not in ("float32", "bfloat16") or shape.gpt_oss:
        return ["xla"]
    torch_peers = [f"transformers {name}" for name in TORCH_IMPLEMENTATIONS]
    affordable = shape.layer_bytes(storage) < MOST_JAX_BYTES
    return ["xla", *torch_peers, *(("gather", "ragged_dot") if affordable else ())]


def build_peers(shape: Shape, storage: str, experts: ExpertWeights) -> Iterator[Peer]:
    """The applicable ones that can run here, with copies of the weights where their layout differs."""
    names = applicable_peers(shape, storage)
    yield xla(shape, experts)
    if "transformers eager" in names and torch_missing() is None:
        yield from transformers_experts(shape, experts)
    if "gather" in names:
        yield gather(experts)
        yield ragged_dot(experts)


def xla(shape: Shape, experts: ExpertWeights) -> Peer:
    """This project's own loop in plain XLA."""
    run = chained_calls(shape, "xla")

    def seconds(x_TD: jax.Array, ids_NTK: np.ndarray) -> float:
        ids = jnp.asarray(ids_NTK)
        return _timed(lambda: run(x_TD, ids, experts))

    return Peer("xla", seconds)


def transformers_experts(shape: Shape, experts: ExpertWeights) -> Iterator[Peer]:
    """`Qwen3MoeExperts`, on one thread."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.set_num_threads(1)
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.k,
    )
    (gate, up), down = _plain(experts)
    with torch.device("meta"):
        layers = [Qwen3MoeExperts(config) for _ in range(down.shape[0])]
    for index, layer in enumerate(layers):
        gate_up = torch.cat([to_torch(gate[index]), to_torch(up[index])], dim=1)
        layer.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        layer.down_proj = torch.nn.Parameter(to_torch(down[index]).clone(), requires_grad=False)

    def peer(implementation: str) -> Peer:
        def seconds(x_TD: jax.Array, ids_NTK: np.ndarray) -> float:
            config._experts_implementation = implementation
            x, ids = to_torch(x_TD), torch.from_numpy(ids_NTK.astype(np.int64))
            weights = torch.full(ids.shape[1:], 1 / shape.k, dtype=x.dtype)
            with torch.inference_mode():
                started = time.perf_counter()
                for call in range(len(ids)):
                    layers[call % len(layers)](x, ids[call], weights)
                return time.perf_counter() - started

        return Peer(f"transformers {implementation}", seconds)

    yield from map(peer, TORCH_IMPLEMENTATIONS)


def gather(experts: ExpertWeights) -> Peer:
    """The weights of every (row, expert) pair collected, then batched products."""
    (gate, up), down = _plain(experts)
    layers = [(layer, gate, up, down) for layer in range(down.shape[0])]

    @jax.jit
    def run(x_TD: jax.Array, ids_TK: jax.Array, layer: int, *parts: jax.Array) -> jax.Array:
        gate_TKFD, up_TKFD, down_TKDF = (part[layer, ids_TK] for part in parts)
        gate_TKF, up_TKF = (jnp.einsum("td,tkfd->tkf", x_TD, part) for part in (gate_TKFD, up_TKFD))
        return jnp.einsum("tkf,tkdf->td", jax.nn.silu(gate_TKF) * up_TKF, down_TKDF) / ids_TK.shape[1]

    return Peer("gather", _call_by_call(run, layers))


def ragged_dot(experts: ExpertWeights) -> Peer:
    """`lax.ragged_dot` over rows sorted by expert; its weights are transposed beforehand."""
    (gate, up), down = _plain(experts)
    layers = [tuple(part[i].swapaxes(1, 2) for part in (gate, up, down)) for i in range(down.shape[0])]

    @jax.jit
    def run(x_TD: jax.Array, ids_TK: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        ids_P = ids_TK.reshape(-1)
        order_P = jnp.argsort(ids_P)
        row_P = order_P // ids_TK.shape[1]
        sizes_E = jnp.bincount(ids_P, length=gate.shape[0]).astype(jnp.int32)
        x_PD = x_TD[row_P]
        h_PF = jax.nn.silu(lax.ragged_dot(x_PD, gate, sizes_E)) * lax.ragged_dot(x_PD, up, sizes_E)
        y_PD = lax.ragged_dot(h_PF, down, sizes_E)
        return jnp.zeros_like(x_TD).at[row_P].add(y_PD / ids_TK.shape[1])

    return Peer("ragged_dot", _call_by_call(run, layers))


def _call_by_call(run: Callable[..., jax.Array], layers: list[tuple]) -> Callable[[jax.Array, np.ndarray], float]:
    def seconds(x_TD: jax.Array, ids_NTK: np.ndarray) -> float:
        ids = [jnp.asarray(ids_TK) for ids_TK in ids_NTK]
        return _timed(lambda: [run(x_TD, one, *layers[call % len(layers)]) for call, one in enumerate(ids)])

    return seconds


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def _plain(experts: ExpertWeights) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    assert isinstance(experts.gate_up, tuple)
    gate, up = (matrix.weight for matrix in experts.gate_up)  # pyright: ignore[reportAttributeAccessIssue]
    return (gate, up), experts.down.weight  # pyright: ignore[reportAttributeAccessIssue]


def to_torch(array: jax.Array):
    """The same memory as a tensor."""
    import torch

    return torch.from_dlpack(array)
