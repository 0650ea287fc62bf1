"""Training of a backbone predictor: multi-label loss, AdamW, cosine schedule, and its top-k overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax import expert_bits
from ecospec_jax.config import RoutingShape
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.models.predictor import top_experts
from ecospec_jax.training.sequences import PADDING, Packed, document_rows
from ecospec_jax.training.traces import Trace


@jax.tree_util.register_dataclass
@dataclass
class Examples:
    """A batch of right-padded sequences with their routing; padding has expert id E in every place."""

    tokens_BT: Int[Array, "batch tokens"]
    live_BT: Bool[Array, "batch tokens"]
    experts_BTLK: Int[Array, "batch tokens layers k"]


def pack(traces: Sequence[Trace], length: int, routing: RoutingShape) -> Examples:
    """Sequences as one array block, cut after `length` tokens."""
    batch = len(traces)
    tokens = np.zeros((batch, length), np.int32)
    live = np.zeros((batch, length), bool)
    experts = np.full((batch, length, routing.layers, routing.k), routing.experts, np.int32)
    for row, trace in enumerate(traces):
        n = min(length, len(trace.tokens_T))
        tokens[row, :n], live[row, :n], experts[row, :n] = trace.tokens_T[:n], True, trace.experts_TLK[:n]
    return Examples(jnp.asarray(tokens), jnp.asarray(live), jnp.asarray(experts))


def sequence_logits(model: BackbonePredictor, examples: Examples) -> Float[Array, "batch tokens layers experts"]:
    """Logits of every token of whole sequences."""
    batch, length = examples.tokens_BT.shape
    documents_BT = jnp.where(examples.live_BT, 0, PADDING)
    rows = document_rows(Packed(examples.tokens_BT, documents_BT))
    return model.logits(rows, model.empty_cache(batch, length))[0]


def multi_label_loss(model: BackbonePredictor, examples: Examples) -> Float[Array, ""]:
    """Binary cross-entropy of every expert of every layer, summed over experts, mean over live tokens and layers."""
    logits = sequence_logits(model, examples)
    experts = model.config.routing.experts
    wanted = jnp.sum(jax.nn.one_hot(examples.experts_BTLK, experts), axis=-2)
    loss_BTL = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, wanted), axis=-1)
    return jnp.sum(loss_BTL.mean(-1) * examples.live_BT) / jnp.maximum(jnp.sum(examples.live_BT), 1)


@nnx.jit
def overlap_counts(model: BackbonePredictor, examples: Examples) -> tuple[Float[Array, " layers"], Int[Array, ""]]:
    """Per layer, chosen experts that were predicted; and the live tokens."""
    routing = model.config.routing
    predicted = top_experts(sequence_logits(model, examples), routing)
    true = expert_bits.from_ids(examples.experts_BTLK, routing.experts)
    return jnp.sum(expert_bits.count(predicted & true), axis=(0, 1)), jnp.sum(examples.live_BT)


def top_k_overlap(model: BackbonePredictor, traces: Sequence[Trace], size: int, length: int) -> np.ndarray:
    """Share of the true top-k experts among the predicted top-k, per layer, over all live tokens."""
    hits, live = np.zeros(model.config.routing.layers), 0
    for first in range(0, len(traces), size):
        part = list(traces[first : first + size])
        block = pack(part, length, model.config.routing)
        hit_L, tokens = overlap_counts(model, block)
        hits, live = hits + np.asarray(hit_L), live + int(tokens)
    return hits / (model.config.routing.k * max(live, 1))


@cache
def optimiser(learning_rate: float, steps: int, warmup: int, weight_decay: float) -> optax.GradientTransformation:
    """AdamW with linear warm-up and cosine decay to zero; gradients clipped to norm 1."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=weight_decay))
