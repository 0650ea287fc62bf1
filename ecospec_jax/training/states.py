"""The drafter's states along a text: what predictors of `models/state_predictors.py` learn from."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ecospec_jax.models.drafter import Drafter
from ecospec_jax.models.target import Target
from ecospec_jax.training.drafter import unrolled
from ecospec_jax.training.language_model import run_target
from ecospec_jax.training.sequences import Packed


def drafter_states(target: Target, packed: Packed, drafter: Drafter) -> Float[Array, "batch tokens steps state"]:
    """The state that would propose each token behind 0, 1, .. drafted ones; 0 where a document has too few before."""
    features_BTF = run_target(target, packed, drafter.boundaries).features_BRF
    steps = [
        jnp.roll(jnp.where(packed.reaches(2 + step)[:, :, None], state_BTH, 0), 2 + step, axis=1)
        for step, state_BTH in enumerate(unrolled(drafter, packed, features_BTF))
    ]
    return jnp.stack(steps, axis=2)
