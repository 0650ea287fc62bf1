"""Walk through a recording as a method would: the library's own selection, commitment and learning, without the models.

At position p the record of p is what the method sees; it chooses nodes, the recorded draws accept m of them, and the
next step begins at p + m + 1. What a method learns is carried from prompt to prompt, as decoding does.
"""

from dataclasses import dataclass, replace

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
from ecospec_jax.decoding import DecodeState, StepPlan, Verified, commit, select
from ecospec_jax.methods import Method
from ecospec_jax.metrics import Counters
from ecospec_jax.models.predictor import Previous
from ecospec_jax.selection import ExpertForecast
from ecospec_jax.stepping import adapt
from ecospec_jax.tree import Selection, build_tree, verify_tree, whole_pool
from ecospec_jax.verification import accept_path
from experiments.recording import Recording

NO_MODEL = nnx.graphdef(Previous())  # a plan names models; none of them runs


@jax.tree_util.register_dataclass
@dataclass
class Tape:
    """Prompts of a recording, padded to the longest answer: `Q` prompts of at most `T` positions.

    Attributes:
        first_Q, count_Q: the answer's first token; its positions.
        previous_QLW: true experts of the last token of the prompt.
        tokens_QTN, parents_QTN, log_probs_QTN, drawn_QTR, experts_QTRLW: see `Recording`.
        forecast_QTRLW: predicted experts, if there is a predictor.
    """

    first_Q: Array
    count_Q: Array
    previous_QLW: Array
    tokens_QTN: Array
    parents_QTN: Array
    log_probs_QTN: Array
    drawn_QTR: Array
    experts_QTRLW: Array
    forecast_QTRLW: Array | None


@jax.tree_util.register_dataclass
@dataclass
class Steps:
    """What the steps of each prompt did, `[Q, T, ..]`; steps that did not happen emitted 0 tokens.

    Attributes:
        emitted_QT: tokens.
        chosen_QTN: nodes verified beside the root.
        pairs_QT: distinct (layer, expert) pairs that the verification touched.
        drafted_QT: whether the step drafted.
        tokens_QT: the answer, its first token left out.
    """

    emitted_QT: Array
    chosen_QTN: Array
    pairs_QT: Array
    drafted_QT: Array
    tokens_QT: Array


def make_tape(recording: Recording, predictor: str | None, prompts: np.ndarray) -> Tape:
    """The given prompts (indices) in this order, with the forecasts of a predictor; `oracle` is the true routing."""
    counts = np.diff(recording.starts)
    longest = max(1, int(counts.max()))

    def pad(values_X: np.ndarray) -> Array:
        padded = np.zeros((len(prompts), longest, *values_X.shape[1:]), values_X.dtype)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: counts[prompt]] = values_X[recording.starts[prompt] : recording.starts[prompt + 1]]
        return jnp.asarray(padded)

    forecasts = recording.forecasts | {"oracle": recording.experts}
    return Tape(
        first_Q=pad(recording.roots)[:, 0],
        count_Q=jnp.asarray(counts[prompts]),
        previous_QLW=jnp.asarray(recording.previous[prompts]),
        tokens_QTN=pad(recording.tokens),
        parents_QTN=pad(recording.parents),
        log_probs_QTN=pad(recording.log_probs),
        drawn_QTR=pad(recording.drawn),
        experts_QTRLW=pad(recording.experts),
        forecast_QTRLW=None if predictor is None else pad(forecasts[predictor]),
    )


def make_plan(recording: Recording, method: Method, spec: SpecConfig, cost: CostModel | None) -> StepPlan:
    """The plan that decoding with this method has, but for the models."""
    plan = StepPlan(
        target=NO_MODEL,
        drafter=None,
        policy=method.policy,
        spec=spec,
        sampling=SamplingConfig(recording.header.temperature),
        eos_ids=recording.header.eos_ids,
    )
    return replace(plan, cost=cost, calibrated=method.calibrated, adaptive=method.adaptive) if method.learns else plan


def walk(
    recording: Recording,
    plan: StepPlan,
    tape: Tape,
    *,
    clairvoyant: bool = False,
    calibration: Calibration | None = None,
) -> tuple[Steps, Adaptation | None]:
    """Decodes all prompts of the tape, one after the other.

    Args:
        recording: what the tape was made of.
        plan: what a step does.
        tape: the prompts.
        clairvoyant: the policy sees which nodes will be accepted in place of the drafter's probabilities.
        calibration: where learning begins; the drafter's own word if not given.

    Returns:
        The steps, and what was learned.
    """
    adaptation = None
    if plan.cost is not None:
        start = Calibration.trusting() if calibration is None else calibration
        adaptation = Adaptation.fresh(plan.cost, recording.header.routing, 1, start)
    depths_N, limit = jnp.asarray(recording.depths, jnp.int32), recording.header.max_new_tokens
    return _walk(plan, clairvoyant, limit, depths_N, tape, adaptation)


def _walk_prompts(
    plan: StepPlan, clairvoyant: bool, limit: int, depths_N: Array, tape: Tape, adaptation: Adaptation | None
) -> tuple[Steps, Adaptation | None]:
    positions, nodes = tape.tokens_QTN.shape[1:]
    nothing = Steps(
        jnp.zeros(positions, jnp.int32),
        jnp.zeros((positions, nodes), bool),
        jnp.zeros(positions, jnp.int32),
        jnp.zeros(positions, bool),
        jnp.zeros(positions, jnp.int32),
    )

    def one_prompt(adaptation: Adaptation | None, own: Tape) -> tuple[Adaptation | None, Steps]:
        """`own` and the steps lack the axis of prompts."""

        def going(carry: tuple[Array, DecodeState, Steps]) -> Array:
            return ~carry[1].finished_B[0]

        def body(carry: tuple[Array, DecodeState, Steps]) -> tuple[Array, DecodeState, Steps]:
            index, state, steps = carry
            chosen_N, drafted, pairs, after = _step(plan, clairvoyant, depths_N, own, state)
            steps = replace(
                steps,
                emitted_QT=steps.emitted_QT.at[index].set((after.length_B - state.length_B)[0]),
                chosen_QTN=steps.chosen_QTN.at[index].set(chosen_N),
                pairs_QT=steps.pairs_QT.at[index].set(pairs),
                drafted_QT=steps.drafted_QT.at[index].set(drafted),
            )
            return index + 1, after, steps

        before = _first_state(plan, own, limit, adaptation)
        _, after, steps = lax.while_loop(going, body, (jnp.int32(0), before, nothing))
        return after.adaptation, replace(steps, tokens_QT=after.tokens_BS[0, 1 : positions + 1])

    learned, steps = lax.scan(one_prompt, adaptation, tape)
    return steps, learned


_walk = jax.jit(_walk_prompts, static_argnums=(0, 1, 2))


def _first_state(plan: StepPlan, own: Tape, limit: int, adaptation: Adaptation | None) -> DecodeState:
    """The state behind the prefill, with positions counted from the answer's first token."""
    longest, positions = plan.spec.max_emitted, own.tokens_QTN.shape[0]
    layers = own.experts_QTRLW.shape[2]
    tokens_BS = jnp.zeros((1, positions + longest + 2), jnp.int32).at[0, 0].set(own.first_Q)
    return DecodeState(
        tokens_BS=tokens_BS,
        length_B=jnp.zeros(1, jnp.int32),
        limit_B=jnp.full(1, limit, jnp.int32),
        finished_B=own.count_Q[None] == 0,
        keys_B=jax.random.key(0)[None],
        target_cache=KVCache([], []),
        draft_cache=None,
        predictor_cache=None,
        pending_tokens_BP=jnp.zeros((1, longest), jnp.int32),
        pending_features_BPF=jnp.zeros((1, longest, 0)),
        pending_count_B=jnp.zeros(1, jnp.int32),
        last_BLW=own.previous_QLW[None],
        previous_BLW=own.previous_QLW[None],
        counters=Counters.zeros(1, longest, layers),
        adaptation=adaptation,
    )


def _step(
    plan: StepPlan, clairvoyant: bool, depths_N: Array, own: Tape, state: DecodeState
) -> tuple[Array, Array, Array, DecodeState]:
    """One step: nodes chosen, whether it drafted, distinct pairs, the state after it."""
    at = state.length_B[0]
    tree = build_tree(own.tokens_QTN[at][None], own.parents_QTN[at][None], depths_N, own.log_probs_QTN[at][None])
    drawn_BR, experts_BRLW = own.drawn_QTR[at][None], own.experts_QTRLW[at][None]
    forecast = None if own.forecast_QTRLW is None else _forecast(plan, own.forecast_QTRLW[at][None], state)
    root_B = jnp.take_along_axis(state.tokens_BS, state.length_B[:, None], axis=1)[:, 0]
    shown = tree
    if clairvoyant:
        pool = verify_tree(tree, whole_pool(tree), root_B, state.length_B, state.finished_B)
        path = accept_path(pool, drawn_BR, plan.spec.depth + 1)
        rows_P = jnp.where(jnp.arange(plan.spec.depth + 1) < path.count_B, path.rows_BP[0], 0)
        accepted_N = jnp.any(jnp.arange(1, 1 + len(depths_N))[:, None] == rows_P, axis=1)
        shown = replace(tree, log_probs_BN=jnp.where(accepted_N, 0.0, -jnp.inf)[None])
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
        features_BRF=jnp.zeros((1, rows.rows.tokens_BR.shape[1], 0)),
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
    live_BR = rows.rows.live_BR
    chosen_N = jnp.zeros(len(depths_N) + 1, bool).at[rows.pool_rows_BR[0]].max(live_BR[0])[1:]
    pairs = jnp.sum(expert_bits.count(expert_bits.union(verified.experts_BRLW, axis=(0, 1))))
    return chosen_N, drafted, pairs, after


def _forecast(plan: StepPlan, sets_BRLW: Array, state: DecodeState) -> ExpertForecast:
    root_BLW = sets_BRLW[:, 0]
    buffers = {"empty": jnp.zeros_like(root_BLW), "root": root_BLW, "previous": state.previous_BLW}
    return ExpertForecast(root_BLW, sets_BRLW[:, 1:], buffers[plan.spec.buffer])
