"""The five stages of a decoding step, and the prefill before them.

    draft -> predict -> select -> verify -> commit

Plain decoding is the same step with an empty tree, so every method runs the same kernels in the same form of loop. All
functions are pure: a `StepPlan` (static) and `Weights` say what runs, a `DecodeState` goes in and comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from ecospec_jax import expert_bits
from ecospec_jax.adaptation import Adaptation
from ecospec_jax.cache import KVCache, Rows, commit_path
from ecospec_jax.calibration import calibrate
from ecospec_jax.config import SamplingConfig, SpecConfig
from ecospec_jax.cost import CostModel
from ecospec_jax.metrics import Counters, ExpertUse, expert_use
from ecospec_jax.models.drafter import Drafter
from ecospec_jax.models.predictor import Evidence, ExpertSets, Predictor
from ecospec_jax.models.target import Target, TargetOutput
from ecospec_jax.selection import Economy, ExpertForecast, Policy
from ecospec_jax.sharding import Placement, whole
from ecospec_jax.tree import CandidateTree, Selection, VerifyTree, empty_tree, expand_tree, verify_tree, whole_pool
from ecospec_jax.verification import accept_path, draw_tokens, rigged_draws

Carry = TypeVar("Carry")
CATCH_UP = 32  # entries that wait, as many as drafter and predictor process at once after plain steps


@dataclass(frozen=True)
class StepPlan:
    """What a step does; hashable, one compilation each. Without a drafter, decoding is plain.

    Attributes:
        target, drafter, predictor: the models.
        policy, spec, sampling, eos_ids: what is selected, drawn and ended.
        cost: what the policy weighs; needed by a plan that is calibrated or adaptive.
        calibrated: the policy sees learned acceptance probabilities instead of the drafter's.
        adaptive: each step decides whether to draft and how many rows to verify.
        placement: where the target is; None is one device.
        rigged_acceptance: how often a row goes on to its likeliest child, whatever the target says; None is lossless.
    """

    target: nnx.GraphDef
    drafter: nnx.GraphDef | None
    policy: Policy
    spec: SpecConfig
    sampling: SamplingConfig
    eos_ids: tuple[int, ...]
    predictor: nnx.GraphDef | None = None
    cost: CostModel | None = None
    calibrated: bool = False
    adaptive: bool = False
    placement: Placement | None = None
    rigged_acceptance: float | None = None

    @property
    def pending_slots(self) -> int:
        """Room for the committed entries that wait for the drafter: each step appends `max_emitted`, meant or not."""
        if not self.adaptive:
            return self.spec.max_emitted
        plain = self.spec.probe_every  # steps since the last that drafted
        return -(-(2 * self.spec.max_emitted + plain - 1) // CATCH_UP) * CATCH_UP

    def scratch_slots(self) -> int:
        """Cache slots that a step may write behind the committed tokens."""
        pool_rows = 0 if self.predictor is None else 1 + self.spec.pool_size
        # Blocks of waiting entries are as many as the sequence with most of them needs; it has fewer than `max_emitted`
        # more than any other.
        waiting_rows = self.spec.max_emitted + (CATCH_UP if self.adaptive else 0)
        return max(self.spec.rows, waiting_rows, (self.spec.depth - 1) * self.spec.branch, pool_rows)


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    """Parameters of the models that a plan names."""

    target: nnx.State
    drafter: nnx.State | None
    predictor: nnx.State | None = None


@jax.tree_util.register_dataclass
@dataclass
class DecodeState:
    """Everything that changes from step to step.

    Attributes:
        tokens_BS: prompt and emitted tokens; slot `length` holds the root.
        length_B: tokens whose keys and values are in the target's cache (the root's are not).
        limit_B: most tokens a sequence may have, prompt included.
        finished_B: sequences that take no further part.
        keys_B: random key of each sequence.
        target_cache, draft_cache, predictor_cache: the drafter's lags behind by the pending entries.
        pending_tokens_BP, pending_features_BPF, pending_count_B: committed entries the drafter has not seen yet: a
            token with the target's features of the position before it.
        last_BLW: true experts of the last token in the target's cache.
        previous_BLW: true experts of all rows of the previous verification.
        counters: what has been counted.
        adaptation: what a calibrated or adaptive plan has learned.
        drafted_BH: the drafter's state behind the last entry it has seen.
        before_BH: its state behind the entry before that: what would propose the root, once it has caught up.
    """

    tokens_BS: Int[Array, "batch slots"]
    length_B: Int[Array, " batch"]
    limit_B: Int[Array, " batch"]
    finished_B: Bool[Array, " batch"]
    keys_B: Key[Array, " batch"]
    target_cache: KVCache
    draft_cache: KVCache | None
    predictor_cache: KVCache | None
    pending_tokens_BP: Int[Array, "batch path"]
    pending_features_BPF: Float[Array, "batch path features"]
    pending_count_B: Int[Array, " batch"]
    last_BLW: UInt32[Array, "batch layers words"]
    previous_BLW: UInt32[Array, "batch layers words"]
    counters: Counters
    adaptation: Adaptation | None = None
    drafted_BH: Float[Array, "batch state"] | None = None
    before_BH: Float[Array, "batch state"] | None = None


@jax.tree_util.register_dataclass
@dataclass
class Verified:
    """A target pass over a verify tree: features and experts of each row, and the token drawn behind it."""

    tree: VerifyTree
    features_BRF: Float[Array, "batch rows features"]
    experts_BRLW: UInt32[Array, "batch rows layers words"]
    drawn_BR: Int[Array, "batch rows"]


def _target(plan: StepPlan, weights: Weights) -> Target:
    return nnx.merge(plan.target, weights.target)


def _drafter(plan: StepPlan, weights: Weights) -> Drafter | None:
    return None if plan.drafter is None else nnx.merge(plan.drafter, weights.drafter)


def _predictor(plan: StepPlan, weights: Weights) -> Predictor | None:
    return None if plan.predictor is None else nnx.merge(plan.predictor, weights.predictor)


def _expert_sets(target: Target, output: TargetOutput) -> UInt32[Array, "batch rows layers words"]:
    return jnp.moveaxis(expert_bits.from_ids(output.expert_ids_LBRK, target.num_experts), 0, 2)


def _causal(batch: int, rows: int) -> Bool[Array, "batch rows rows"]:
    return jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))


def _sequence_rows(tokens_BT: Int[Array, "batch bucket"], lengths_B: Int[Array, " batch"]) -> Rows:
    """Rows of right-padded sequences from position 0."""
    batch, bucket = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(bucket), (batch, bucket))
    return Rows(
        tokens_BR=tokens_BT,
        positions_BR=positions_BT,
        live_BR=positions_BT < lengths_B[:, None],
        context_B=jnp.zeros(batch, jnp.int32),
        mask_BRW=_causal(batch, bucket),
    )


def _is_eos(plan: StepPlan, tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
    return jnp.isin(tokens, jnp.array(plan.eos_ids, jnp.int32))


def prefill(
    plan: StepPlan,
    weights: Weights,
    prompts_BT: Int[Array, "batch bucket"],
    lengths_B: Int[Array, " batch"],
    limits_B: Int[Array, " batch"],
    keys_B: Key[Array, " batch"],
    capacity: int,
    adaptation: Adaptation | None = None,
) -> DecodeState:
    """Processes right-padded prompts and draws the first token of each.

    Args:
        plan: what to run.
        weights: parameters.
        prompts_BT: token ids, padded on the right to a bucket length.
        lengths_B: tokens of each prompt, at least 1.
        limits_B: most tokens of each sequence, prompt included; a sequence at its limit is finished from the start.
        keys_B: random keys.
        capacity: cache slots; at least `max(limits) + plan.scratch_slots()` and the bucket length.
        adaptation: what earlier decoding has learned.
    """
    target, drafter = _target(plan, weights), _drafter(plan, weights)
    batch, bucket = prompts_BT.shape
    finished_B = lengths_B >= limits_B
    rows = _sequence_rows(prompts_BT, jnp.where(finished_B, 0, lengths_B))
    boundaries = () if drafter is None else drafter.boundaries
    output, target_cache = target(rows, target.empty_cache(batch, capacity, plan.spec.rows), boundaries)
    last_B11 = (lengths_B - 1)[:, None, None]
    logits_B1V = target.logits(jnp.take_along_axis(output.hidden_BRD, last_B11, axis=1))
    first_B1 = draw_tokens(logits_B1V, lengths_B[:, None], keys_B, plan.sampling)

    draft_cache = drafted_BH = None
    if drafter is not None:
        # Entry t pairs the features of position t with token t + 1; the last entry waits for the first step.
        shifted = replace(rows, tokens_BR=jnp.roll(prompts_BT, -1, axis=1))
        states_BTH, draft_cache = drafter.catch_up(shifted, output.features_BRF, drafter.empty_cache(batch, capacity))
        drafted_BH = _behind(states_BTH, lengths_B - 1, jnp.zeros_like(states_BTH[:, 0]))
        if draft_cache.experts_read is not None:  # counted from the first step on
            draft_cache = replace(draft_cache, experts_read=jnp.zeros_like(draft_cache.experts_read))

    sets_BTLW = _expert_sets(target, output)
    last_BLW = jnp.take_along_axis(sets_BTLW, last_B11[..., None], axis=1)[:, 0]
    predictor, predictor_cache = _predictor(plan, weights), None
    if predictor is not None and (fresh := predictor.empty_cache(batch, capacity)) is not None:
        _, predictor_cache = predictor(rows, fresh, Evidence(last_BLW, lambda _: sets_BTLW))

    longest, slots = plan.spec.max_emitted, plan.pending_slots
    features_B1F = jnp.take_along_axis(output.features_BRF, last_B11, axis=1)
    tokens_BS = jnp.pad(prompts_BT, ((0, 0), (0, capacity - bucket)))
    return DecodeState(
        tokens_BS=jax.vmap(lambda tokens_S, first, at: tokens_S.at[at].set(first))(
            tokens_BS, first_B1[:, 0], lengths_B
        ),
        length_B=lengths_B,
        limit_B=limits_B,
        finished_B=finished_B | _is_eos(plan, first_B1[:, 0]) | (lengths_B + 1 >= limits_B),
        keys_B=keys_B,
        target_cache=target_cache,
        draft_cache=draft_cache,
        predictor_cache=predictor_cache,
        pending_tokens_BP=jnp.pad(first_B1, ((0, 0), (0, slots - 1))),
        pending_features_BPF=jnp.pad(features_B1F, ((0, 0), (0, slots - 1), (0, 0))),
        pending_count_B=jnp.ones_like(lengths_B),
        drafted_BH=drafted_BH,
        before_BH=drafted_BH,
        last_BLW=last_BLW,
        previous_BLW=last_BLW,
        counters=Counters.zeros(batch, longest, output.expert_ids_LBRK.shape[0]),
        adaptation=adaptation,
    )


def examine(
    target_def: nnx.GraphDef,
    target_state: nnx.State,
    tokens_BT: Int[Array, "batch bucket"],
    lengths_B: Int[Array, " batch"],
) -> tuple[Float[Array, "batch vocab"], Int[Array, "layers batch bucket k"]]:
    """One pass over right-padded sequences: logits of the next token, and the experts of every token (E in padding)."""
    target: Target = nnx.merge(target_def, target_state)
    batch, bucket = tokens_BT.shape
    output, _ = target(_sequence_rows(tokens_BT, lengths_B), target.empty_cache(batch, bucket), ())
    last_BD = jnp.take_along_axis(output.hidden_BRD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    return target.logits(last_BD), output.expert_ids_LBRK


def once_if(condition: Bool[Array, ""], function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`function(carry)` or `carry`: a loop of at most one turn, since XLA copies caches that a conditional changes."""
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.array(False), function(c[1])), (condition, carry))[1]


def draft(plan: StepPlan, weights: Weights, state: DecodeState) -> tuple[CandidateTree, DecodeState]:
    """Catches the drafter up on the pending entries, then expands the candidate tree."""
    drafter = _drafter(plan, weights)
    if drafter is None:
        return empty_tree(len(state.length_B)), state
    assert state.draft_cache is not None and state.drafted_BH is not None and state.before_BH is not None

    def catch_up(entries: int, turn: Array | int, carry: tuple[Array, Array, KVCache]) -> tuple[Array, Array, KVCache]:
        drafted_BH, before_BH, cache = carry
        features_BRF = lax.dynamic_slice_in_dim(state.pending_features_BPF, turn * entries, entries, axis=1)
        states_BRH, cache = drafter.catch_up(_waiting(state, entries, turn), features_BRF, cache)
        seen_B = jnp.clip(state.pending_count_B - turn * entries, 0, entries)
        before_BH = jnp.where(seen_B[:, None] > 0, _behind(states_BRH, seen_B - 1, drafted_BH), before_BH)
        return _behind(states_BRH, seen_B, drafted_BH), before_BH, cache

    few = plan.spec.max_emitted
    caught_up = (state.drafted_BH, state.before_BH, state.draft_cache)
    if not plan.adaptive:
        caught_up = catch_up(few, 0, caught_up)
    else:  # after plain steps more may wait than one step can emit
        most = _most_waiting(state)
        turns = jnp.where(most > few, -(-most // CATCH_UP), 0)
        caught_up = once_if(turns == 0, partial(catch_up, few, 0), caught_up)
        caught_up = lax.fori_loop(0, turns, partial(catch_up, CATCH_UP), caught_up)
    drafted_BH, before_BH, draft_cache = caught_up
    tree, draft_cache = expand_tree(drafter, draft_cache, drafted_BH, state.length_B, ~state.finished_B, plan.spec)
    return tree, replace(
        state,
        draft_cache=draft_cache,
        pending_count_B=jnp.where(state.finished_B, state.pending_count_B, 0),
        drafted_BH=drafted_BH,
        before_BH=before_BH,
    )


def _behind(
    states_BRH: Float[Array, "batch rows state"], count_B: Int[Array, " batch"], before_BH: Float[Array, "batch state"]
) -> Float[Array, "batch state"]:
    """The state behind the first `count` rows; behind none, the one before them."""
    index_B11 = jnp.maximum(count_B - 1, 0)[:, None, None]
    return jnp.where(count_B[:, None] > 0, jnp.take_along_axis(states_BRH, index_B11, axis=1)[:, 0], before_BH)


def _waiting(state: DecodeState, entries: int, turn: Array | int, *, ahead: int = 0) -> Rows:
    """Block `turn` of the committed tokens that wait, `entries` at once.

    Each has the position of the features that it is paired with, the one before it; with `ahead` 1 it has its own, and
    the last of them, the root, is left out.
    """
    first, place_R = turn * entries, jnp.arange(entries)
    context_B = state.length_B - state.pending_count_B + ahead + first
    return Rows(
        tokens_BR=lax.dynamic_slice_in_dim(state.pending_tokens_BP, first, entries, axis=1),
        positions_BR=context_B[:, None] + place_R,
        live_BR=(first + place_R < (state.pending_count_B - ahead)[:, None]) & ~state.finished_B[:, None],
        context_B=context_B,
        mask_BRW=_causal(len(context_B), entries),
    )


def _most_waiting(state: DecodeState) -> Int[Array, ""]:
    return jnp.max(jnp.where(state.finished_B, 0, state.pending_count_B))


def remind(plan: StepPlan, weights: Weights, state: DecodeState) -> DecodeState:
    """Catches the predictor up on the tokens of plain steps, which it has not seen; they wait for the drafter too."""
    predictor = _predictor(plan, weights)
    if predictor is None or state.predictor_cache is None or state.adaptation is None or not plan.adaptive:
        return state
    evidence = Evidence(state.last_BLW, _true_routing(plan, weights, state))

    def catch_up(turn: Array, cache: KVCache) -> KVCache:
        _, cache_after = predictor(_waiting(state, CATCH_UP, turn, ahead=1), cache, evidence)
        assert cache_after is not None
        return cache_after

    turns = jnp.where(state.adaptation.idle > 0, -(-_most_waiting(state) // CATCH_UP), 0)
    caught_up = lax.fori_loop(0, turns, catch_up, state.predictor_cache)
    return replace(state, predictor_cache=caught_up)


def _true_routing(plan: StepPlan, weights: Weights, state: DecodeState) -> Callable[[Rows], ExpertSets]:
    target = _target(plan, weights)
    return lambda rows: _expert_sets(target, target(rows, state.target_cache, ())[0])


def _evidence(plan: StepPlan, weights: Weights, state: DecodeState, tree: CandidateTree, pool: VerifyTree) -> Evidence:
    """About the root and the whole pool."""
    last_B1 = jnp.take_along_axis(state.tokens_BS, state.length_B[:, None] - 1, axis=1)
    parents_BN = jnp.take_along_axis(pool.rows.tokens_BR, pool.parent_rows_BR[:, 1:], axis=1)
    states_BRH = None
    if tree.states_BNH is not None and state.before_BH is not None:
        states_BRH = jnp.concatenate([state.before_BH[:, None], tree.states_BNH], axis=1)
    before_BR = jnp.concatenate([last_B1, parents_BN], axis=1)
    return Evidence(state.last_BLW, _true_routing(plan, weights, state), before_BR, states_BRH)


def predict(
    plan: StepPlan, weights: Weights, state: DecodeState, tree: CandidateTree
) -> tuple[ExpertForecast | None, DecodeState]:
    """Predicts the experts of the root and of every candidate node, in one pass over the whole pool."""
    predictor = _predictor(plan, weights)
    if predictor is None:
        return None, state
    pool = verify_tree(tree, whole_pool(tree), _roots(state), state.length_B, state.finished_B)
    evidence = _evidence(plan, weights, state, tree, pool)
    sets_BRLW, predictor_cache = predictor(pool.rows, state.predictor_cache, evidence)
    return forecast_of(plan, state, sets_BRLW), replace(state, predictor_cache=predictor_cache)


def forecast_of(
    plan: StepPlan, state: DecodeState, sets_BRLW: UInt32[Array, "batch rows layers words"]
) -> ExpertForecast:
    """What the policy sees of the experts predicted for the root (row 0) and every candidate node."""
    finished_B11 = state.finished_B[:, None, None]
    sets_BRLW = jnp.where(finished_B11[..., None], jnp.uint32(0), sets_BRLW)
    root_BLW, previous_BLW = sets_BRLW[:, 0], jnp.where(finished_B11, jnp.uint32(0), state.previous_BLW)
    buffers = {"empty": jnp.zeros_like(root_BLW), "root": root_BLW, "previous": previous_BLW}
    return ExpertForecast(root_BLW, sets_BRLW[:, 1:], buffers[plan.spec.buffer])


def select(plan: StepPlan, state: DecodeState, tree: CandidateTree, forecast: ExpertForecast | None) -> Selection:
    """Asks the policy which nodes to verify."""
    if state.adaptation is None:
        return plan.policy(tree, forecast, plan.spec, None)
    assert plan.cost is not None
    if plan.calibrated:
        tree = calibrate(tree, state.adaptation.calibration)
    return plan.policy(tree, forecast, plan.spec, Economy(plan.cost, state.adaptation.overall.rate))


def verify(
    plan: StepPlan, weights: Weights, state: DecodeState, tree: CandidateTree, selection: Selection
) -> tuple[Verified, DecodeState]:
    """One target pass over the root and the selected nodes; draws the token behind every row."""
    target, drafter = _target(plan, weights), _drafter(plan, weights)
    rows = verify_tree(tree, selection, _roots(state), state.length_B, state.finished_B)
    boundaries = () if drafter is None else drafter.boundaries
    output, target_cache = target(rows.rows, state.target_cache, boundaries)
    drawn_BR = draw_tokens(target.logits(output.hidden_BRD), rows.rows.positions_BR + 1, state.keys_B, plan.sampling)
    if plan.rigged_acceptance is not None:
        drawn_BR = rigged_draws(rows, drawn_BR, state.keys_B, plan.rigged_acceptance)
    verified = Verified(rows, output.features_BRF, _expert_sets(target, output), drawn_BR)
    return verified, replace(state, target_cache=target_cache)


def commit(plan: StepPlan, state: DecodeState, verified: Verified, forecast: ExpertForecast | None) -> DecodeState:
    """Keeps the accepted path: tokens, cache rows, features for the drafter; ends sequences at EOS or their limit."""
    longest = min(plan.spec.max_emitted, verified.drawn_BR.shape[1])
    path = accept_path(verified.tree, verified.drawn_BR, longest)
    place_P = jnp.arange(longest)

    room_B = state.limit_B - state.length_B - 1
    count_B = jnp.minimum(path.count_B, room_B)
    ends_BP = _is_eos(plan, path.tokens_BP) & (place_P < count_B[:, None])
    has_eos_B = jnp.any(ends_BP, axis=1)
    count_B = jnp.where(has_eos_B, jnp.argmax(ends_BP, axis=1) + 1, count_B)
    count_B = jnp.where(state.finished_B, 0, count_B)
    length_B = state.length_B + count_B

    def put(tokens_S: Array, new_P: Array, start: Array, count: Array) -> Array:
        old_P = lax.dynamic_slice(tokens_S, (start,), (longest,))
        return lax.dynamic_update_slice(tokens_S, jnp.where(place_P < count, new_P, old_P), (start,))

    features_BPF = jnp.take_along_axis(verified.features_BRF, path.rows_BP[:, :, None], axis=1)
    going_B = ~state.finished_B
    waiting_B = jnp.zeros_like(state.pending_count_B) if plan.drafter is None else state.pending_count_B

    def append(old_P: Array, new_P: Array, start: Array, going: Array) -> Array:
        kept_P = lax.dynamic_slice_in_dim(old_P, start, longest)
        return lax.dynamic_update_slice_in_dim(old_P, jnp.where(going, new_P.astype(old_P.dtype), kept_P), start, 0)

    last_row_B = jnp.take_along_axis(path.rows_BP, jnp.maximum(count_B - 1, 0)[:, None], axis=1)
    last_BLW = jnp.take_along_axis(verified.experts_BRLW, last_row_B[:, :, None, None], axis=1)[:, 0]
    predictor_cache = state.predictor_cache
    if predictor_cache is not None:
        pool_path_BP = jnp.take_along_axis(verified.tree.pool_rows_BR, path.rows_BP, axis=1)
        predictor_cache = commit_path(predictor_cache, state.length_B, pool_path_BP)
    return replace(
        state,
        tokens_BS=jax.vmap(put)(state.tokens_BS, path.tokens_BP, state.length_B + 1, count_B),
        length_B=length_B,
        finished_B=state.finished_B | has_eos_B | (length_B + 1 >= state.limit_B),
        target_cache=commit_path(state.target_cache, *whole(plan.placement, (state.length_B, path.rows_BP))),
        predictor_cache=predictor_cache,
        pending_tokens_BP=jax.vmap(append)(state.pending_tokens_BP, path.tokens_BP, waiting_B, going_B),
        pending_features_BPF=jax.vmap(append)(state.pending_features_BPF, features_BPF, waiting_B, going_B),
        pending_count_B=jnp.where(going_B, waiting_B + count_B, state.pending_count_B),
        last_BLW=jnp.where(going_B[:, None, None], last_BLW, state.last_BLW),
        previous_BLW=expert_bits.union(verified.experts_BRLW, axis=1),
        counters=state.counters.add(count_B, _expert_use(verified, forecast), verified.tree.rows.live_BR),
    )


def _roots(state: DecodeState) -> Int[Array, " batch"]:
    return jnp.take_along_axis(state.tokens_BS, state.length_B[:, None], axis=1)[:, 0]


def _expert_use(verified: Verified, forecast: ExpertForecast | None) -> ExpertUse:
    if forecast is None:
        predicted_BRLW = jnp.zeros_like(verified.experts_BRLW)
    else:
        pool_BRLW = jnp.concatenate([forecast.root_BLW[:, None], forecast.nodes_BNLW], axis=1)
        predicted_BRLW = jnp.take_along_axis(pool_BRLW, verified.tree.pool_rows_BR[:, :, None, None], axis=1)
    return expert_use(verified.experts_BRLW, predicted_BRLW, verified.tree.rows.live_BR)


def choose(
    plan: StepPlan, weights: Weights, state: DecodeState
) -> tuple[CandidateTree, ExpertForecast | None, Selection, DecodeState]:
    """The first three stages."""
    tree, state = draft(plan, weights, remind(plan, weights, state))
    forecast, state = predict(plan, weights, state, tree)
    return tree, forecast, select(plan, state, tree, forecast), state
