"""Decoding steps from their stages: fixed, plain, or deciding how many rows to verify."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ecospec_jax import expert_bits
from ecospec_jax.calibration import Calibration, edge_features, learn, outcomes
from ecospec_jax.decoding import (
    DecodeState,
    StepPlan,
    Verified,
    Weights,
    choose,
    commit,
    once_if,
    verify,
)
from ecospec_jax.tree import CandidateTree, empty_tree, whole_pool
from ecospec_jax.verification import accept_path


def fixed_step(plan: StepPlan, weights: Weights, state: DecodeState) -> DecodeState:
    """One step that always drafts and always verifies as many rows."""
    tree, forecast, selection, chosen = choose(plan, weights, state)
    verified, checked = verify(plan, weights, chosen, tree, selection)
    after = commit(plan, checked, verified, forecast)
    return after if state.adaptation is None else adapt(plan, state, after, tree, verified, jnp.array(True))


def drafting_step(plan: StepPlan, weights: Weights, state: DecodeState) -> DecodeState:
    """One step of an adaptive plan that drafts, and decides how many rows the target processes."""
    tree, forecast, selection, chosen = choose(plan, weights, state)

    def process(rows: int, chosen: DecodeState) -> DecodeState:
        fewer = replace(selection, nodes_BM=selection.nodes_BM[:, : rows - 1])
        verified, checked = verify(plan, weights, chosen, tree, fewer)
        return adapt(plan, chosen, commit(plan, checked, verified, forecast), tree, verified, jnp.array(True))

    counts = plan.spec.compiled_rows
    least = jnp.searchsorted(jnp.array(counts), 1 + jnp.max(jnp.where(state.finished_B, 0, selection.count_B)))
    after = chosen
    for index, count in enumerate(counts):
        after = once_if(least == index, partial(process, count), after)
    return after


def plain_step(plan: StepPlan, weights: Weights, state: DecodeState) -> DecodeState:
    """One step of an adaptive plan that does not draft: nothing of drafting is in it, so it is as fast as `ar`'s."""
    tree = empty_tree(len(state.length_B))
    verified, checked = verify(plan, weights, state, tree, whole_pool(tree))
    return adapt(plan, state, commit(plan, checked, verified, None), None, verified, jnp.array(False))


def adapt(
    plan: StepPlan,
    before: DecodeState,
    after: DecodeState,
    tree: CandidateTree | None,
    verified: Verified,
    drafted: Bool[Array, ""],
) -> DecodeState:
    """Books what a step cost and gave, and learns from the outcomes that it revealed of a drafted tree."""
    adaptation, cost = after.adaptation, plan.cost
    assert adaptation is not None and cost is not None
    live_BR = verified.tree.rows.live_BR
    if plan.calibrated and tree is not None:
        path = accept_path(verified.tree, verified.drawn_BR, plan.spec.max_emitted)

        def learned(before: Calibration) -> Calibration:
            seen = outcomes(tree, path, verified.tree.pool_rows_BR, live_BR[:, 0])
            return learn(before, edge_features(tree), seen)

        adaptation = replace(adaptation, calibration=once_if(drafted, learned, adaptation.calibration))
    roots_BLW = jnp.where(live_BR[:, 0, None, None], verified.experts_BRLW[:, 0], jnp.uint32(0))
    return replace(
        after,
        adaptation=adaptation.observe(
            cost,
            plan.spec,
            drafted=drafted,
            emitted=jnp.sum(after.length_B - before.length_B),
            sequences=jnp.sum(live_BR[:, 0]),
            # What the commit has counted already.
            pairs=jnp.sum(after.counters.use.distinct_L - before.counters.use.distinct_L),
            rows=jnp.sum(live_BR[:, 0]) * jnp.where(drafted, processed_rows(plan, live_BR), 1),
            root_pairs=jnp.sum(expert_bits.count(expert_bits.union(roots_BLW, axis=0))),
        ),
    )


def processed_rows(plan: StepPlan, live_BR: Bool[Array, "batch rows"]) -> Int[Array, ""]:
    """Rows of each sequence in a step that drafts, dead ones included: they cost time as well."""
    counts = jnp.array(plan.spec.compiled_rows if plan.adaptive else (plan.spec.rows,))
    return counts[jnp.searchsorted(counts, jnp.max(jnp.sum(live_BR, axis=1)))]
