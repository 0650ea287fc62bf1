"""The loop over steps, and the compiled functions of a plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ecospec_jax.adaptation import Adaptation
from ecospec_jax.cache import BUFFER_AXES
from ecospec_jax.decoding import DecodeState, StepPlan, Weights, once_if, prefill
from ecospec_jax.sharding import Placement
from ecospec_jax.stepping import drafting_step, fixed_step, plain_step

Progress = tuple[Array, DecodeState]  # steps taken, and what they led to


def state_shardings(placement: Placement, state: DecodeState) -> DecodeState:
    """Where a state belongs: the target's cache as the layout has it, everything else on every device."""
    cache = jax.tree.map(lambda buffer: placement.sharding(BUFFER_AXES, buffer.shape), state.target_cache)
    return replace(jax.tree.map(lambda _: placement.everywhere, state), target_cache=cache)


def settled(plan: StepPlan, state: DecodeState) -> DecodeState:
    """The state where it belongs, so that a step finds it where it leaves it."""
    if plan.placement is None:
        return state
    return lax.with_sharding_constraint(state, state_shardings(plan.placement, state))


def decode_steps(plan: StepPlan, weights: Weights, state: DecodeState, steps: Int[Array, ""]) -> DecodeState:
    """Up to `steps` steps, fewer once every sequence is finished.

    An adaptive plan decides before each step whether to draft. Its plain steps have a loop of their own.
    """

    def going(carry: Progress) -> Array:
        return (carry[0] < steps) & ~jnp.all(carry[1].finished_B)

    def counted(step: Callable[[StepPlan, Weights, DecodeState], DecodeState]) -> Callable[[Progress], Progress]:
        return lambda carry: (carry[0] + 1, settled(plan, step(plan, weights, carry[1])))

    def plainly(carry: Progress) -> Array:
        adaptation = carry[1].adaptation
        assert adaptation is not None
        return going(carry) & ~adaptation.drafts(plan.spec)

    def stretch(carry: Progress) -> Progress:
        """Plain steps as long as drafting does not pay, then one that drafts."""
        carry = lax.while_loop(plainly, counted(plain_step), carry)
        return once_if(going(carry), counted(drafting_step), carry)

    body = stretch if plan.adaptive else counted(fixed_step)
    return lax.while_loop(going, body, (jnp.zeros((), jnp.int32), state))[1]


class Program:
    """The compiled functions of a plan: one compilation per (batch, bucket, capacity).

    `adaptation` is what decoding with this plan has learned so far, and what the next prefill begins with.
    """

    def __init__(self, plan: StepPlan, adaptation: Adaptation | None = None) -> None:
        """Nothing is compiled before the first call."""
        self.plan = plan
        self.adaptation = adaptation
        self.prefill = jax.jit(
            lambda *arguments, **options: settled(plan, prefill(plan, *arguments, **options)),
            static_argnames=("capacity",),
        )
        self.decode_steps = jax.jit(partial(decode_steps, plan), donate_argnames=("state",))
        self._shapes: set[tuple[int, ...]] = set()

    def is_new(self, shape: tuple[int, ...]) -> bool:
        """Whether this is the first call for a (batch, bucket, capacity), which compiles."""
        new = shape not in self._shapes
        self._shapes.add(shape)
        return new
