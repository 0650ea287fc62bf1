"""The drafter's states along a text, and how predictors learn from them (`models/state_predictors.py`)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ecospec_jax.generation import bucket
from ecospec_jax.models.drafter import Drafter
from ecospec_jax.models.state_predictors import DrafterFeatures, TargetGates
from ecospec_jax.models.target import Target
from ecospec_jax.training.drafter import STEPS, unrolled
from ecospec_jax.training.language_model import run_target
from ecospec_jax.training.predictor import Examples, live_tokens
from ecospec_jax.training.sequences import Packed, pack_documents

TOO_EARLY = 2  # tokens of a text that no state can propose: the first, and the one that the first state belongs to


def drafter_states(target: Target, drafter: Drafter, packed: Packed) -> Float[Array, "batch tokens steps state"]:
    """The state that would propose each token behind 0, 1, .. drafted ones; 0 where a document has too few before."""
    features_BTF = run_target(target, packed, drafter.boundaries).features_BRF
    steps = [
        jnp.roll(jnp.where(packed.reaches(TOO_EARLY + step)[:, :, None], state_BTH, 0), TOO_EARLY + step, axis=1)
        for step, state_BTH in enumerate(unrolled(drafter, packed, features_BTF))
    ]
    return jnp.stack(steps, axis=2)


_drafter_states = nnx.jit(drafter_states)


def states_of(target: Target, drafter: Drafter, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The same of whole sequences: float16 `[T, S, H]` each. Compiled once a bucket of lengths."""
    length = bucket(max(map(len, sequences)))
    packed = pack_documents([[*sequence, *[0] * (length - len(sequence))] for sequence in sequences], length)
    states_BTSH = np.asarray(_drafter_states(target, drafter, packed).astype(jnp.float16))
    return [states_TSH[: len(sequence)] for states_TSH, sequence in zip(states_BTSH, sequences, strict=True)]


def choice_loss(model: DrafterFeatures | TargetGates, examples: Examples) -> Float[Array, ""]:
    """Cross-entropy of the chosen experts under a softmax over all, of every draft step; mean over layers and tokens.

    Only the order of the logits matters to a predictor, and routers' logits have no zero.
    """
    assert examples.states_BTSH is not None
    experts, place_T = model.config.routing.experts, jnp.arange(examples.tokens_BT.shape[1])
    wanted_BTLE = jnp.mean(jax.nn.one_hot(examples.experts_BTLK, experts), axis=-2)
    total = jnp.zeros(())
    for step in range(STEPS):
        log_chance = jax.nn.log_softmax(model.logits(examples.tokens_BT, examples.states_BTSH[:, :, step]), axis=-1)
        loss_BT = -jnp.mean(jnp.sum(wanted_BTLE * log_chance, axis=-1), axis=-1)
        total += jnp.sum(loss_BT * (examples.live_BT & (place_T >= TOO_EARLY + step)))
    return total / (STEPS * jnp.maximum(live_tokens(examples), 1))
