"""The tables that are counted on routing traces."""

import numpy as np

from ecospec_jax.training.tables import PRIOR_WEIGHT, best_experts, expert_counts, layer_prior, token_scores
from ecospec_jax.training.traces import Trace
from tests.made_up_traces import ROUTING, VOCAB, make_trace


def test_tables_count() -> None:
    """Counts, prior and scores against plain loops."""
    traces = [make_trace("p", length, length) for length in (5, 1, 9, 4, 7, 7)]
    counts = np.zeros((VOCAB, ROUTING.layers, ROUTING.experts))
    for trace in traces:
        for token, experts_LK in zip(trace.tokens_T, trace.experts_TLK, strict=True):
            for layer, experts in enumerate(experts_LK):
                for expert in experts:
                    counts[token, layer, expert] += 1
    ours = expert_counts(traces, VOCAB, ROUTING)
    np.testing.assert_array_equal(ours, counts)
    prior = counts.sum(0) / (33 * ROUTING.k)
    np.testing.assert_allclose(layer_prior(ours), prior, rtol=1e-6)
    np.testing.assert_allclose(token_scores(ours), counts + PRIOR_WEIGHT * prior, rtol=1e-6)
    ranked = best_experts(token_scores(ours), ROUTING.k)
    assert ranked.shape == (VOCAB, ROUTING.layers, ROUTING.k)
    for token, layer in np.ndindex(VOCAB, ROUTING.layers):
        scores = counts[token, layer] + PRIOR_WEIGHT * prior[layer]
        best = sorted(range(ROUTING.experts), key=lambda expert: (-np.float32(scores[expert]), expert))
        assert ranked[token, layer].tolist() == best[: ROUTING.k]


def test_rare_tokens_fall_back_to_the_layers_favourites() -> None:
    """An unseen id gets the prior's experts; one observation is enough to prefer what was observed."""
    common = Trace("s", "a", 1, np.zeros(50, np.int32), np.broadcast_to([[[7, 9]] * 3], (50, 3, 2)).astype(np.uint16))
    rare = Trace("s", "b", 1, np.array([1], np.int32), np.full((1, 3, 2), [[3, 60]], np.uint16))
    ranked = best_experts(token_scores(expert_counts([common, rare], VOCAB, ROUTING)), ROUTING.k)
    assert (ranked[0] == [7, 9]).all() and (ranked[1] == [3, 60]).all() and (ranked[2:] == [7, 9]).all()


def test_no_traces_give_empty_tables() -> None:
    counts = expert_counts([], VOCAB, ROUTING)
    assert not counts.any() and not layer_prior(counts).any()
    assert (best_experts(layer_prior(counts), ROUTING.k) == [0, 1]).all()
