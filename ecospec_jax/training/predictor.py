"""Training of predictors: batches of traces, AdamW with a cosine schedule; the loss of a backbone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import Rows
from ecospec_jax.config import RoutingShape
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.training.sequences import PADDING, Packed, document_rows
from ecospec_jax.training.traces import Trace


@jax.tree_util.register_dataclass
@dataclass
class Examples:
    """A batch of right-padded sequences with their routing; padding has expert id E in every place.

    `states_BTSH` are the drafter's (`training/states.py`), float32, if the traces hold them.
    """

    tokens_BT: Int[Array, "batch tokens"]
    live_BT: Bool[Array, "batch tokens"]
    experts_BTLK: Int[Array, "batch tokens layers k"]
    states_BTSH: Float[Array, "batch tokens steps state"] | None = None


def pack(traces: Sequence[Trace], length: int, routing: RoutingShape) -> Examples:
    """Sequences as one array block, cut after `length` tokens."""
    batch = len(traces)
    tokens = np.zeros((batch, length), np.int32)
    live = np.zeros((batch, length), bool)
    experts = np.full((batch, length, routing.layers, routing.k), routing.experts, np.int32)
    for row, trace in enumerate(traces):
        n = min(length, len(trace.tokens_T))
        tokens[row, :n], live[row, :n], experts[row, :n] = trace.tokens_T[:n], True, trace.experts_TLK[:n]
    states = [trace.states_TSH[:length] for trace in traces if trace.states_TSH is not None]
    padded = [np.pad(part.astype(np.float32), ((0, length - len(part)), (0, 0), (0, 0))) for part in states]
    states_BTSH = jnp.asarray(np.stack(padded)) if padded else None
    return Examples(jnp.asarray(tokens), jnp.asarray(live), jnp.asarray(experts), states_BTSH)


def rows_of(examples: Examples) -> Rows:
    """Rows of whole sequences."""
    return document_rows(Packed(examples.tokens_BT, jnp.where(examples.live_BT, 0, PADDING)))


def sequence_logits(model: BackbonePredictor, examples: Examples) -> Float[Array, "batch tokens layers experts"]:
    """Logits of every token of whole sequences."""
    return model.logits(rows_of(examples), model.empty_cache(*examples.tokens_BT.shape))[0]


def multi_label_loss(model: BackbonePredictor, examples: Examples) -> Float[Array, ""]:
    """Binary cross-entropy of every expert of every layer, summed over experts, mean over live tokens and layers."""
    logits = sequence_logits(model, examples)
    experts = model.config.routing.experts
    wanted = jnp.sum(jax.nn.one_hot(examples.experts_BTLK, experts), axis=-2)
    loss_BTL = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, wanted), axis=-1)
    return jnp.sum(loss_BTL.mean(-1) * examples.live_BT) / jnp.maximum(live_tokens(examples), 1)


def live_tokens(examples: Examples) -> Int[Array, ""]:
    """What `multi_label_loss` is a mean over."""
    return jnp.sum(examples.live_BT)


@cache
def optimiser(learning_rate: float, steps: int, warmup: int, weight_decay: float) -> optax.GradientTransformation:
    """AdamW with linear warm-up and cosine decay to zero; gradients clipped to norm 1."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=weight_decay))
