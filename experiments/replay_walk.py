"""Walk through a recording as a method would: the library's own selection, commitment and learning, without the models.

At position p the record of p is what the method sees; it chooses nodes, the recorded draws accept m of them, and the
next step begins at p + m + 1. The prompts of a batch step together and share their experts. What a method learns is
carried from batch to batch, as decoding does.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array

from ecospec_jax import SamplingConfig, SpecConfig, expert_bits
from ecospec_jax.adaptation import Adaptation
from ecospec_jax.cache import KVCache
from ecospec_jax.calibration import Calibration
from ecospec_jax.cost import CostModel
from ecospec_jax.decoding import DecodeState, StepPlan, Verified, commit, forecast_of, select
from ecospec_jax.methods import Method
from ecospec_jax.metrics import Counters
from ecospec_jax.models.predictor import Previous
from ecospec_jax.stepping import adapt
from ecospec_jax.tree import Selection, build_tree, verify_tree, whole_pool
from ecospec_jax.verification import accept_path
from experiments.recording import Recording
from experiments.replay_contenders import NO_KNOBS, Knobs, Tunable

NOBODY = -1  # a place of a batch without a prompt
NO_MODEL = nnx.graphdef(Previous())  # a plan names models; none of them runs


@jax.tree_util.register_dataclass
@dataclass
class Tape:
    """Prompts of a recording, padded to the longest answer: `G` batches of `B` prompts of at most `T` positions.

    Attributes:
        first_GB, count_GB: the answer's first token; its positions, 0 for a place without a prompt.
        previous_GBLW: true experts of the last token of the prompt.
        tokens_GBTN, parents_GBTN, log_probs_GBTN, drawn_GBTR, experts_GBTRLW: see `Recording`.
        forecast_GBTRLW: predicted experts, if there is a predictor.
    """

    first_GB: Array
    count_GB: Array
    previous_GBLW: Array
    tokens_GBTN: Array
    parents_GBTN: Array
    log_probs_GBTN: Array
    drawn_GBTR: Array
    experts_GBTRLW: Array
    forecast_GBTRLW: Array | None


@jax.tree_util.register_dataclass
@dataclass
class Steps:
    """What the steps of each batch did, `[G, T, ..]`; steps that did not happen emitted 0 tokens.

    Attributes:
        emitted_GTB: tokens.
        chosen_GTBN: nodes verified beside the root.
        pairs_GT: distinct (layer, expert) pairs that the verification touched.
        drafted_GT: whether the step drafted.
        tokens_GBT: the answers, their first tokens left out.
    """

    emitted_GTB: Array
    chosen_GTBN: Array
    pairs_GT: Array
    drafted_GT: Array
    tokens_GBT: Array


def make_tape(recording: Recording, predictor: str | None, prompts_GB: np.ndarray) -> Tape:
    """The given batches of prompts (indices, `NOBODY` for none), with the forecasts of a predictor or the `oracle`."""
    forecasts = recording.forecasts | {"oracle": recording.experts}
    counts_Q = np.diff(recording.starts)
    longest = max(1, int(counts_Q.max()))

    def pad(values_X: np.ndarray) -> Array:
        return jnp.asarray(padded(recording, values_X, prompts_GB, longest))

    known_GB = prompts_GB != NOBODY
    return Tape(
        first_GB=pad(recording.roots)[:, :, 0],
        count_GB=jnp.asarray(np.where(known_GB, counts_Q[prompts_GB], 0)),
        previous_GBLW=jnp.asarray(np.where(known_GB[..., None, None], recording.previous[prompts_GB], np.uint32(0))),
        tokens_GBTN=pad(recording.tokens),
        parents_GBTN=pad(recording.parents),
        log_probs_GBTN=pad(recording.log_probs),
        drawn_GBTR=pad(recording.drawn),
        experts_GBTRLW=pad(recording.experts),
        forecast_GBTRLW=None if predictor is None else pad(forecasts[predictor]),
    )


def padded(recording: Recording, values_X: np.ndarray, prompts_GB: np.ndarray, longest: int) -> np.ndarray:
    """`[G, B, longest, ..]` values of the positions of these prompts, zeros behind them."""
    values = np.zeros((*prompts_GB.shape, longest, *values_X.shape[1:]), values_X.dtype)
    for place in np.argwhere(prompts_GB != NOBODY):
        own_X = values_X[slice(*recording.starts[prompts_GB[tuple(place)] :][:2])]
        values[tuple(place)][: len(own_X)] = own_X
    return values


def make_plan(recording: Recording, method: Method, spec: SpecConfig, cost: CostModel | None) -> StepPlan:
    """The plan that decoding with this method has, but for the models."""
    plan = StepPlan(
        target=NO_MODEL,
        drafter=None,
        policy=method.policy,
        spec=spec,
        sampling=SamplingConfig(),  # nothing is drawn
        eos_ids=recording.header.eos_ids,
    )
    return replace(plan, cost=cost, calibrated=method.calibrated, adaptive=method.adaptive) if method.learns else plan


def walk(
    recording: Recording,
    plan: StepPlan,
    tape: Tape,
    *,
    tunable: Tunable | None = None,
    knobs: Knobs = NO_KNOBS,
    clairvoyant: bool = False,
    calibration: Calibration | None = None,
) -> tuple[Steps, Adaptation | None]:
    """Decodes all batches of the tape, one after the other.

    Args:
        recording: what the tape was made of.
        plan: what a step does.
        tape: the prompts.
        tunable: in place of the plan's policy, one that takes `knobs`.
        knobs: its settings.
        clairvoyant: the policy sees which nodes will be accepted in place of the drafter's probabilities.
        calibration: where learning begins; the drafter's own word if not given.

    Returns:
        The steps, and what was learned.
    """
    adaptation = None
    if plan.cost is not None:
        start = Calibration.trusting() if calibration is None else calibration
        adaptation = Adaptation.fresh(plan.cost, recording.header.routing, tape.first_GB.shape[1], start)
    depths_N, limit = jnp.asarray(recording.depths, jnp.int32), recording.header.max_new_tokens
    return _walk(plan, tunable, clairvoyant, limit, knobs, depths_N, tape, adaptation)


def _walk_batches(
    plan: StepPlan,
    tunable: Tunable | None,
    clairvoyant: bool,
    limit: int,
    knobs: Knobs,
    depths_N: Array,
    tape: Tape,
    adaptation: Adaptation | None,
) -> tuple[Steps, Adaptation | None]:
    if tunable is not None:
        plan = replace(plan, policy=partial(tunable, knobs))
    batch, positions, nodes = tape.tokens_GBTN.shape[1:]
    nothing = Steps(
        jnp.zeros((positions, batch), jnp.int32),
        jnp.zeros((positions, batch, nodes), bool),
        jnp.zeros(positions, jnp.int32),
        jnp.zeros(positions, bool),
        jnp.zeros((batch, positions), jnp.int32),
    )

    def one_batch(adaptation: Adaptation | None, own: Tape) -> tuple[Adaptation | None, Steps]:
        """`own` and the steps lack the axis of batches."""

        def going(carry: tuple[Array, DecodeState, Steps]) -> Array:
            return ~jnp.all(carry[1].finished_B)

        def body(carry: tuple[Array, DecodeState, Steps]) -> tuple[Array, DecodeState, Steps]:
            index, state, steps = carry
            chosen_BN, drafted, pairs, after = _step(plan, clairvoyant, depths_N, own, state)
            steps = replace(
                steps,
                emitted_GTB=steps.emitted_GTB.at[index].set(after.length_B - state.length_B),
                chosen_GTBN=steps.chosen_GTBN.at[index].set(chosen_BN),
                pairs_GT=steps.pairs_GT.at[index].set(pairs),
                drafted_GT=steps.drafted_GT.at[index].set(drafted),
            )
            return index + 1, after, steps

        before = _first_state(plan, own, limit, adaptation)
        _, after, steps = lax.while_loop(going, body, (jnp.int32(0), before, nothing))
        return after.adaptation, replace(steps, tokens_GBT=after.tokens_BS[:, 1 : positions + 1])

    learned, steps = lax.scan(one_batch, adaptation, tape)
    return steps, learned


_walk = jax.jit(_walk_batches, static_argnums=(0, 1, 2, 3))


def _first_state(plan: StepPlan, own: Tape, limit: int, adaptation: Adaptation | None) -> DecodeState:
    """The state behind the prefill, with positions counted from the answer's first token."""
    longest, (batch, positions) = plan.spec.max_emitted, own.tokens_GBTN.shape[:2]
    layers = own.experts_GBTRLW.shape[3]
    zeros_B = jnp.zeros(batch, jnp.int32)
    return DecodeState(
        tokens_BS=jnp.zeros((batch, positions + longest + 2), jnp.int32).at[:, 0].set(own.first_GB),
        length_B=zeros_B,
        limit_B=jnp.full(batch, limit, jnp.int32),
        finished_B=own.count_GB == 0,
        keys_B=jnp.broadcast_to(jax.random.key(0), batch),
        target_cache=KVCache([], []),
        draft_cache=None,
        predictor_cache=None,
        pending_tokens_BP=jnp.zeros((batch, longest), jnp.int32),
        pending_features_BPF=jnp.zeros((batch, longest, 0)),
        pending_count_B=zeros_B,
        last_BLW=own.previous_GBLW,
        previous_BLW=own.previous_GBLW,
        counters=Counters.zeros(batch, longest, layers),
        adaptation=adaptation,
    )


def _step(
    plan: StepPlan, clairvoyant: bool, depths_N: Array, own: Tape, state: DecodeState
) -> tuple[Array, Array, Array, DecodeState]:
    """One step: nodes chosen, whether it drafted, distinct pairs, the state after it."""

    def here(values_BTX: Array) -> Array:
        return jax.vmap(lambda values_TX, at: values_TX[at])(values_BTX, state.length_B)

    tree = build_tree(here(own.tokens_GBTN), here(own.parents_GBTN), depths_N, here(own.log_probs_GBTN))
    drawn_BR, experts_BRLW = here(own.drawn_GBTR), here(own.experts_GBTRLW)
    forecast = None if own.forecast_GBTRLW is None else forecast_of(plan, state, here(own.forecast_GBTRLW))
    root_B = jnp.take_along_axis(state.tokens_BS, state.length_B[:, None], axis=1)[:, 0]
    shown = tree
    if clairvoyant:
        pool = verify_tree(tree, whole_pool(tree), root_B, state.length_B, state.finished_B)
        path = accept_path(pool, drawn_BR, plan.spec.depth + 1)
        rows_BP = jnp.where(jnp.arange(plan.spec.depth + 1) < path.count_B[:, None], path.rows_BP, 0)
        accepted_BN = jnp.any(jnp.arange(1, 1 + len(depths_N))[:, None] == rows_BP[:, None, :], axis=2)
        shown = replace(tree, log_probs_BN=jnp.where(accepted_BN, 0.0, -jnp.inf))
    selection = select(plan, state, shown, forecast)
    drafted = jnp.array(True)
    if plan.adaptive:
        assert state.adaptation is not None
        drafted = state.adaptation.drafts(plan.spec)
        selection = Selection(
            jnp.where(drafted, selection.nodes_BM, 0), jnp.where(drafted, selection.count_B, 0).astype(jnp.int32)
        )
    rows = verify_tree(tree, selection, root_B, state.length_B, state.finished_B)
    verified = Verified(
        tree=rows,
        features_BRF=jnp.zeros((*rows.rows.tokens_BR.shape, 0)),
        experts_BRLW=jnp.where(
            rows.rows.live_BR[..., None, None],
            jnp.take_along_axis(experts_BRLW, rows.pool_rows_BR[:, :, None, None], axis=1),
            jnp.uint32(0),
        ),
        drawn_BR=jnp.take_along_axis(drawn_BR, rows.pool_rows_BR, axis=1),
    )
    after = commit(plan, state, verified, None)
    if state.adaptation is not None:
        after = adapt(plan, state, after, tree, verified, drafted)
    live_BR, rows_BR = rows.rows.live_BR, rows.pool_rows_BR
    place_B1 = jnp.arange(len(live_BR))[:, None]
    chosen_BN = jnp.zeros((len(live_BR), len(depths_N) + 1), bool).at[place_B1, rows_BR].max(live_BR)[:, 1:]
    pairs = jnp.sum(expert_bits.count(expert_bits.union(verified.experts_BRLW, axis=(0, 1))))
    return chosen_BN, drafted, pairs, after
