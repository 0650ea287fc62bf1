"""The loop over steps, and the compiled functions of a plan."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ecospec_jax.adaptation import Adaptation
from ecospec_jax.decoding import DecodeState, StepPlan, Weights, prefill
from ecospec_jax.stepping import step


def decode_steps(plan: StepPlan, weights: Weights, state: DecodeState, steps: Int[Array, ""]) -> DecodeState:
    """Up to `steps` steps, fewer once every sequence is finished."""

    def going(carry: tuple[Array, DecodeState]) -> Array:
        return (carry[0] < steps) & ~jnp.all(carry[1].finished_B)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        return carry[0] + 1, step(plan, weights, carry[1])

    return lax.while_loop(going, body, (jnp.zeros((), jnp.int32), state))[1]


class Program:
    """The compiled functions of a plan: one compilation per (batch, bucket, capacity).

    `adaptation` is what decoding with this plan has learned so far, and what the next prefill begins with.
    """

    def __init__(self, plan: StepPlan, adaptation: Adaptation | None = None) -> None:
        """Nothing is compiled before the first call."""
        self.plan = plan
        self.adaptation = adaptation
        self.prefill = jax.jit(partial(prefill, plan), static_argnames=("capacity",))
        self.decode_steps = jax.jit(partial(decode_steps, plan), donate_argnames=("state",))
        self._shapes: set[tuple[int, ...]] = set()

    def is_new(self, shape: tuple[int, ...]) -> bool:
        """Whether this is the first call for a (batch, bucket, capacity), which compiles."""
        new = shape not in self._shapes
        self._shapes.add(shape)
        return new
