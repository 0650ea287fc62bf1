"""Training of a drafter on a frozen target: drafting is unrolled, and the target's distribution is the label.

Step 0 processes the text with the target's features; step i then processes, at every row, the token i places further on
with the row's own state of step i - 1, as drafting does (the EAGLE-3 paper's training-time test; docs/formats.md C.5).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ecospec_jax.cache import Rows
from ecospec_jax.models.drafter import Drafter
from ecospec_jax.models.target import Target
from ecospec_jax.training.experts import balance_loss
from ecospec_jax.training.language_model import run_target
from ecospec_jax.training.sequences import PADDING, Packed, document_rows

STEPS = 3
DECAY = 0.8  # of a step's weight in the loss, from step to step


@jax.tree_util.register_dataclass
@dataclass
class Lessons:
    """Text and what the target makes of it.

    Attributes:
        packed: the text.
        features_BTF: the target's states at the drafter's boundaries.
        logits_BTV: the target's logits of the token behind each.
    """

    packed: Packed
    features_BTF: Float[Array, "batch tokens features"]
    logits_BTV: Float[Array, "batch tokens vocab"]


def lessons(target: Target, packed: Packed, boundaries: tuple[int, ...]) -> Lessons:
    """One pass of the target."""
    output = run_target(target, packed, boundaries)
    return Lessons(packed, output.features_BRF, target.logits(output.hidden_BRD))


def unrolled_rows(packed: Packed, step: int) -> Rows:
    """The rows of a step, written behind those of the steps before it.

    Row t holds token t + 1 + `step` at position t + `step`. It sees the rows of step 0 up to t and its own row of each
    later step, its own document's only; it is dead if the document ends before its token.
    """
    first = document_rows(packed)
    length = packed.tokens_BT.shape[1]
    own_BTT = jnp.broadcast_to(jnp.eye(length, dtype=bool), first.mask_BRW.shape)
    return Rows(
        tokens_BR=jnp.roll(packed.tokens_BT, -1 - step, axis=1),
        positions_BR=first.positions_BR + step,
        live_BR=packed.reaches(1 + step),
        context_B=first.context_B,
        mask_BRW=jnp.concatenate([first.mask_BRW] + step * [own_BTT], axis=2),
        offset=step * length,
    )


def unrolled(
    drafter: Drafter, packed: Packed, features_BTF: Float[Array, "batch tokens features"]
) -> list[Float[Array, "batch tokens state"]]:
    """The drafter's states of each step. Row t of step i proposes token t + 2 + i."""
    batch, length = packed.tokens_BT.shape
    rows = unrolled_rows(packed, 0)
    state_BTH, cache = drafter.catch_up(rows, features_BTF, drafter.empty_cache(batch, STEPS * length))
    states = [state_BTH]
    for step in range(1, STEPS):
        state_BTH, cache = drafter.extend(unrolled_rows(packed, step), state_BTH, cache)
        states.append(state_BTH)
    return states


def unrolled_logits(
    drafter: Drafter, taught: Lessons
) -> tuple[list[Float[Array, "batch tokens proposable"]], list[Bool[Array, "batch tokens"]]]:
    """The drafter's logits of each step, and which rows count: those whose token is in the text."""
    states = unrolled(drafter, taught.packed, taught.features_BTF)
    return [drafter.logits(state) for state in states], [taught.packed.reaches(1 + step) for step in range(STEPS)]


def drafter_loss(drafter: Drafter, taught: Lessons) -> Float[Array, ""]:
    """Cross-entropies with the target's distribution over the draft vocabulary, weighted by step.

    Rows whose likeliest token the drafter cannot propose do not count. A drafter with experts of its own has to keep
    them busy in the last step.
    """
    vocabulary = drafter.vocabulary
    wanted_BTV = jax.nn.softmax(taught.logits_BTV[..., vocabulary], axis=-1)
    proposable_BT = jnp.isin(jnp.argmax(taught.logits_BTV, axis=-1), vocabulary)
    total = jnp.zeros(())
    for step, (logits_BTV, live_BT) in enumerate(zip(*unrolled_logits(drafter, taught), strict=True)):
        counts_BT = live_BT & jnp.roll(proposable_BT, -1 - step, axis=1)
        log_probs_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
        loss_BT = -jnp.sum(jnp.roll(wanted_BTV, -1 - step, axis=1) * log_probs_BTV, axis=-1)
        total += DECAY**step * jnp.sum(loss_BT * counts_BT) / jnp.maximum(jnp.sum(counts_BT), 1)
    return total / sum(DECAY**step for step in range(STEPS)) + balance_loss(drafter)


def agreement(drafter: Drafter, taught: Lessons) -> Float[Array, " steps"]:
    """For each step, the share of rows whose likeliest token is the target's."""
    best_BT = jnp.argmax(taught.logits_BTV, axis=-1)

    def share(step: int, logits_BTV: Array, live_BT: Array) -> Array:
        proposed_BT = drafter.vocabulary[jnp.argmax(logits_BTV, axis=-1)]
        same_BT = proposed_BT == jnp.roll(best_BT, -1 - step, axis=1)
        return jnp.sum(same_BT & live_BT) / jnp.maximum(jnp.sum(live_BT), 1)

    unrolled = zip(*unrolled_logits(drafter, taught), strict=True)
    return jnp.stack([share(step, *of_step) for step, of_step in enumerate(unrolled)])


def most_frequent(packed: Packed, vocab_size: int, count: int) -> Sequence[int]:
    """The `count` commonest tokens of a text, ascending: a draft vocabulary."""
    counts_V = jnp.bincount(packed.tokens_BT[packed.documents_BT != PADDING], length=vocab_size)
    return sorted(jax.lax.top_k(counts_V, count)[1].tolist())
