"""Training of a backbone predictor: multi-label loss, AdamW, cosine schedule, and its top-k overlap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax import expert_bits
from ecospec_jax.cache import Rows
from ecospec_jax.config import RoutingShape
from ecospec_jax.models.predictor import BackbonePredictor, top_experts
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


def batches(traces: Sequence[Trace], size: int, seed: int, first_step: int) -> Iterator[list[Trace]]:
    """Endless shuffled batches from number `first_step` on, so a resumed run sees what it would have seen."""
    per_epoch = max(1, len(traces) // size)
    step = first_step
    while True:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(traces))
        yield [traces[i] for i in order[place * size : (place + 1) * size]]
        step += 1


def causal_rows(tokens_BT: Int[Array, "batch tokens"], live_BT: Bool[Array, "batch tokens"]) -> Rows:
    """Rows of whole sequences from position 0."""
    batch, length = tokens_BT.shape
    return Rows(
        tokens_BR=tokens_BT,
        positions_BR=jnp.broadcast_to(jnp.arange(length), (batch, length)),
        live_BR=live_BT,
        context_B=jnp.zeros(batch, jnp.int32),
        mask_BRW=jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length)),
    )


def sequence_logits(model: BackbonePredictor, examples: Examples) -> Float[Array, "batch tokens layers experts"]:
    """Logits of every token of whole sequences."""
    batch, length = examples.tokens_BT.shape
    rows = causal_rows(examples.tokens_BT, examples.live_BT)
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


def optimiser(learning_rate: float, steps: int, warmup: int, weight_decay: float) -> optax.GradientTransformation:
    """AdamW with linear warm-up and cosine decay to zero; gradients clipped to norm 1."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=weight_decay))


class Trainer:
    """A predictor in training: its trained parameters, the frozen rest, and the optimiser's state."""

    def __init__(self, model: BackbonePredictor, transformation: optax.GradientTransformation) -> None:
        """Takes the model's values over; read them back from `model`. The target's embedding stays as it is."""
        graph, self._trained, self._frozen = nnx.split(model, _is_trained, ...)
        self._graph = graph
        self._optimiser_state = transformation.init(self._trained)

        def update(trained: Any, frozen: Any, optimiser_state: Any, examples: Examples) -> tuple[Any, Any, Array]:
            def loss_of(values: Any) -> Array:
                return multi_label_loss(nnx.merge(graph, values, frozen), examples)

            loss, gradients = jax.value_and_grad(loss_of)(trained)
            changes, optimiser_state = transformation.update(gradients, optimiser_state, trained)
            return optax.apply_updates(trained, changes), optimiser_state, loss

        self._update = jax.jit(update, donate_argnums=(0, 2))

    def step(self, examples: Examples) -> Float[Array, ""]:
        """One optimiser step; returns the loss before it."""
        self._trained, self._optimiser_state, loss = self._update(
            self._trained, self._frozen, self._optimiser_state, examples
        )
        return loss

    @property
    def model(self) -> BackbonePredictor:
        """The model with its present values."""
        return nnx.merge(self._graph, self._trained, self._frozen)

    @property
    def state(self) -> Any:
        """What a checkpoint must hold to go on exactly: trained parameters and the optimiser's state."""
        return {"trained": nnx.to_pure_dict(self._trained), "optimiser": jax.tree.leaves(self._optimiser_state)}

    def restore(self, state: Any) -> None:
        """Takes up a `state`."""
        nnx.replace_by_pure_dict(self._trained, state["trained"])
        structure = jax.tree.structure(self._optimiser_state)
        self._optimiser_state = jax.tree.unflatten(structure, state["optimiser"])


def _is_trained(path: tuple[Any, ...], value: Any) -> bool:
    return isinstance(value, nnx.Param) and "embedding" not in path
