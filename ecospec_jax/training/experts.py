"""The expert layer in training: rows sorted by expert, every expert on equally many, and a loss that keeps them busy.

The op of decoding reads all experts for its derivative. Here each expert has room for `CAPACITY` times its fair share
of rows, so the projections are batched matrix products, forwards and backwards. Rows beyond that skip the expert.
"""

import math
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels import Activation, ExpertWeights, Matrix
from ecospec_jax.models.moe import GroupedSigmoidRouter, MoELayer
from ecospec_jax.models.transformer import DecoderLayer
from ecospec_jax.training.quantise import straight_through

CAPACITY = 1.5
BALANCE_WEIGHT = 0.01
ModelT = TypeVar("ModelT")


class BalanceLoss(nnx.Variable):
    """How unevenly a layer's router used its experts in the last pass: 1 if evenly, E if one did all."""


class TrainingMoE(MoELayer):
    """A layer's router and experts under the same parameter names, for training; a pass leaves a `BalanceLoss`."""

    def __init__(self, layer: MoELayer, *, quantised: bool) -> None:
        """`quantised` lets the experts compute with mxfp4 matrices, whose gradients their exact values get."""
        super().__init__(layer.router, layer.experts, layer.activation, layer.shared)
        self.quantised, self.capacity = quantised, CAPACITY

    def routed(
        self, x_TD: Float[Array, "rows hidden"], ids_TK: Int[Array, "rows k"], weights_TK: Float[Array, "rows k"]
    ) -> Float[Array, "rows hidden"]:
        """What the chosen experts add, as far as they have room."""
        uneven = balance(self.router.gate(x_TD), ids_TK)
        if isinstance(self.router, GroupedSigmoidRouter):
            uneven += bias_pull(self.router.bias[...], ids_TK)
        self.balance = BalanceLoss(uneven)
        experts = self.experts.weights
        if self.quantised:
            gate_up, down = jax.tree.map(straight_through, (experts.gate_up, experts.down))
            experts = replace(experts, gate_up=gate_up, down=down)
        return capacity_experts(x_TD, ids_TK, weights_TK, experts, activation=self.activation, capacity=self.capacity)


def balance_loss(model: Any) -> Float[Array, ""]:
    """The mean over layers, times its weight, of what the last pass left; 0 for a model without experts."""
    left = jax.tree.leaves(nnx.pop(model, BalanceLoss))
    return BALANCE_WEIGHT * jnp.mean(jnp.stack(left)) if left else jnp.zeros(())


def prepare(model: ModelT, *, quantised: bool) -> ModelT:
    """Gives every expert layer of a model its form for training; parameters and their names stay."""
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, DecoderLayer) and layer.moe is not None:
            layer.moe = TrainingMoE(layer.moe, quantised=quantised)
    return model


def balance(logits_TE: Float[Array, "rows experts"], ids_TK: Int[Array, "rows k"]) -> Float[Array, ""]:
    """E times the sum over experts of (share of choices) x (mean probability), over live rows (Switch Transformer)."""
    experts = logits_TE.shape[-1]
    live_T = ids_TK[:, 0] < experts
    rows = jnp.maximum(jnp.sum(live_T), 1)
    share_E = jnp.bincount(ids_TK.reshape(-1), length=experts + 1)[:experts] / (rows * ids_TK.shape[1])
    probability_TE = jax.nn.softmax(logits_TE.astype(jnp.float32), axis=-1)
    return experts * jnp.sum(share_E * jnp.sum(probability_TE * live_T[:, None], axis=0) / rows)


def bias_pull(bias_E: Float[Array, " experts"], ids_TK: Int[Array, "rows k"]) -> Float[Array, ""]:
    """Zero, with a derivative by which the bias of an expert falls while the expert is chosen more than others.

    The bias of DeepSeek-V3 has no other derivative (its paper, section 2.1.2, moves it by the sign of this one).
    """
    experts = len(bias_E)
    share_E = jnp.bincount(ids_TK.reshape(-1), length=experts + 1)[:experts] / jnp.maximum(jnp.sum(ids_TK < experts), 1)
    return jnp.sum((bias_E - jax.lax.stop_gradient(bias_E)) * (share_E - 1 / experts))


def capacity_experts(
    x_TD: Float[Array, "rows hidden"],
    expert_ids_TK: Int[Array, "rows k"],
    combine_weights_TK: Float[Array, "rows k"],
    experts: ExpertWeights,
    *,
    activation: Activation,
    capacity: float,
) -> Float[Array, "rows hidden"]:
    """As `kernels.grouped_experts`, but an expert takes its first `capacity * rows * k / E` choices only.

    Args:
        x_TD: rows.
        expert_ids_TK: experts of each row; ids outside `0 .. E-1` are skipped.
        combine_weights_TK: factor of each expert's output.
        experts: weights, in any storage format; those in plain storage get gradients.
        activation: between the projections.
        capacity: room of each expert, in fair shares.
    """
    rows, k = expert_ids_TK.shape
    room = math.ceil(capacity * rows * k / experts.count)
    place_N, choice_S = _places(expert_ids_TK.reshape(-1), experts.count, room)

    def project(x_ECI: Array, matrix: Matrix, bias_EO: Array | None) -> Array:
        y_ECO = jnp.einsum("eci,eoi->eco", x_ECI, matrix.widen())
        return y_ECO if bias_EO is None else y_ECO + bias_EO[:, None].astype(jnp.float32)

    x_ND = jnp.repeat(x_TD.astype(jnp.float32), k, axis=0)
    x_ECD = _move(x_ND, choice_S, place_N).reshape(experts.count, room, -1)
    parts = [project(x_ECD, *part) for part in experts.gate_up_parts]
    y_ECD = project(activation(*experts.gate_and_up(parts)), experts.down, experts.down_bias)
    y_TKD = _move(y_ECD.reshape(-1, y_ECD.shape[-1]), place_N, choice_S).reshape(rows, k, -1)
    return jnp.einsum("tk,tkd->td", combine_weights_TK.astype(jnp.float32), y_TKD).astype(x_TD.dtype)


def _places(
    ids_N: Int[Array, " choices"], experts: int, room: int
) -> tuple[Int[Array, " choices"], Int[Array, " places"]]:
    """The place of each choice, among `room` of each expert; and the choice at each place. None: one past the last."""
    ids_N = jnp.where((ids_N >= 0) & (ids_N < experts), ids_N, experts)
    order_N = jnp.argsort(ids_N, stable=True)
    sorted_N = ids_N[order_N]
    count_E = jnp.bincount(ids_N, length=experts + 1)
    rank_N = jnp.arange(ids_N.size) - (jnp.cumsum(count_E) - count_E)[sorted_N]
    sorted_place_N = jnp.where((rank_N < room) & (sorted_N < experts), sorted_N * room + rank_N, experts * room)
    place_N = jnp.zeros_like(ids_N).at[order_N].set(sorted_place_N)
    choice_S = jnp.full(experts * room, ids_N.size).at[sorted_place_N].set(order_N, mode="drop")
    return place_N, choice_S


@jax.custom_vjp
def _move(
    x_FD: Float[Array, "source hidden"], from_T: Int[Array, " destination"], to_F: Int[Array, " source"]
) -> Float[Array, "destination hidden"]:
    """Row `from[t]` of x at t, zero where there is none; `to` is the way back, which is also the gradient's.

    Without it the derivative would be a scatter, which a CPU does row by row.
    """
    del to_F
    return jnp.take(x_FD, from_T, axis=0, mode="fill", fill_value=0)


def _move_forward(x_FD: Array, from_T: Array, to_F: Array) -> tuple[Array, tuple[Array, Array]]:
    return _move(x_FD, from_T, to_F), (from_T, to_F)


def _move_backward(places: tuple[Array, Array], gradient_TD: Array) -> tuple[Array, None, None]:
    from_T, to_F = places
    return _move(gradient_TD, to_F, from_T), None, None


_move.defvjp(_move_forward, _move_backward)
