"""Next-token training of a target of any family."""

from functools import cache

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers, muon

from ecospec_jax.models.target import Target, TargetOutput
from ecospec_jax.training.experts import balance_loss
from ecospec_jax.training.sequences import Packed, document_rows

MUON_STEPS = 4  # Newton-Schulz iterations
FLAT_SHARE = 0.3  # of all steps, before the learning rates fall linearly to 0


def run_target(target: Target, packed: Packed, boundaries: tuple[int, ...] = ()) -> TargetOutput:
    """One pass over whole sequences."""
    batch, length = packed.tokens_BT.shape
    output, _ = target(document_rows(packed), target.empty_cache(batch, length, 1), boundaries)
    return output


def next_token_loss(target: Target, packed: Packed) -> Float[Array, ""]:
    """Cross-entropy of every token but the first of a document, mean."""
    logits_BTV = target.logits(run_target(target, packed).hidden_BRD)
    wanted_BT = jnp.roll(packed.tokens_BT, -1, axis=1)
    follows_BT = packed.reaches(1)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, wanted_BT)
    return jnp.sum(loss_BT * follows_BT) / jnp.maximum(jnp.sum(follows_BT), 1)


def training_loss(target: Target, packed: Packed) -> Float[Array, ""]:
    """`next_token_loss` of a target with `TrainingMoE` layers, plus their balance loss."""
    return next_token_loss(target, packed) + balance_loss(target)


@cache
def optimiser(*, steps: int, muon_rate: float, adam_rate: float) -> optax.GradientTransformation:
    """Muon for matrices, expert by expert; Adam for embeddings, heads, routers, norms, biases and sinks."""

    def schedule(rate: float) -> optax.Schedule:
        flat = round(FLAT_SHARE * steps)
        return optax.schedules.join_schedules(
            [optax.constant_schedule(rate), optax.linear_schedule(rate, 0.0, steps - flat)], [flat]
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            schedule(muon_rate),
            ns_steps=MUON_STEPS,
            adam_b2=0.95,
            adam_learning_rate=schedule(adam_rate),
            muon_weight_dimension_numbers=lambda params: jax.tree.map(
                _matrix_axes, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
            ),
        ),
    )


def _matrix_axes(variable: nnx.Variable) -> MuonDimensionNumbers | None:
    """Inputs and outputs of a matrix, or of a stack of experts' matrices; None for what Muon is not meant for."""
    axes = variable.get_metadata()["logical_axes"]
    matrix = [axis for axis in axes if axis != "expert"]
    if len(matrix) != 2 or {"vocab", "tokens", "router"} & set(matrix):
        return None
    return MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
