"""Decoding with expert predictors: the same tokens whatever they say, their caches, counters, label alignment."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder, decoding, expert_bits
from ecospec_jax.cache import KVCache
from ecospec_jax.config import RoutingShape, SamplingConfig, SpecConfig
from ecospec_jax.decoding import examine
from ecospec_jax.errors import UserError
from ecospec_jax.methods import METHODS, Method, get_method
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.rate import rate
from ecospec_jax.selection import Economy, ExpertForecast, cost_aware, likelihood
from ecospec_jax.training.tables import best_experts, expert_counts, token_scores
from ecospec_jax.training.traces import Trace
from ecospec_jax.tree import CandidateTree, Selection
from tests import tiny, tiny_predictors
from tests.tiny import PROMPTS, SAMPLINGS, quick_compilation
from tests.tiny_predictors import (
    LONGEST,
    NEW_TOKENS,
    PREDICTOR,
    ROUTING,
    TARGET,
    Cast,
    Observed,
    decode,
    helpful,
    make_plan,
    make_weights,
    observe,
    plain_answers,
    prefilled,
    sets_of,
)

__all__ = ["quick_compilation"]
GREEDY, PLAIN = SAMPLINGS["greedy"], SAMPLINGS["plain"]
EVERYTHING = 32 * expert_bits.words(ROUTING.experts)  # bits of a layer that the predictor "all" sets


# ---------------------------------------------------------------------------------------------------------------------
# The same tokens

SHARED = SpecConfig(budget=4, buffer="previous", shared_buffer=True)
WIDE = SpecConfig(budget=6, buffer="root")
CASES = [
    (SHARED, GREEDY, 3),
    (SHARED, GREEDY, 1),
    (SpecConfig(depth=2, branch=3, budget=8, eps=0.25, buffer="empty"), PLAIN, 1),
    (SpecConfig(depth=2, budget=1, eps=1e-30, buffer="empty", shared_buffer=True), PLAIN, 3),
    (SpecConfig(depth=1, budget=0, buffer="previous"), GREEDY, 3),
]


def name_of(value: object) -> str:
    if isinstance(value, SpecConfig):
        return f"budget {value.budget}, {value.buffer}, {'shared' if value.shared_buffer else 'own'}"
    return {GREEDY: "greedy", PLAIN: "sampled"}.get(value, str(value))


@pytest.mark.parametrize(("spec", "sampling", "batch"), CASES, ids=name_of)
def test_tokens_depend_on_no_predictor(spec: SpecConfig, sampling: SamplingConfig, batch: int) -> None:
    """Honest, untrained and lying predictors, with a helpful and a random drafter, decode what plain decoding does."""
    plan = make_plan(spec, sampling, batch=batch)
    expected = plain_answers(sampling)[:batch]
    stats: dict[str, DecodeStats] = {}
    for speaker in Cast.SPEAKERS:
        for script in (None, helpful(sampling, batch)):
            answers, stats[speaker] = decode(plan, make_weights(speaker, script, batch=batch), PROMPTS[:batch])
            assert answers == expected, speaker
            assert stats[speaker].emitted == batch * (NEW_TOKENS - 1)

    # Of the helpful drafter: selection has an effect, and what is counted fits what was predicted.
    figures = {speaker: (s.tau, s.u, s.rows) for speaker, s in stats.items()}
    assert all(tau > 1.3 for tau, _, _ in figures.values()) == (spec.budget > 0)
    assert len(set(figures.values())) >= (3 if spec.budget else 1)
    oracle, everything, nothing = (stats[name] for name in ("oracle", "all", "none"))
    assert (oracle.overlap, oracle.marginal_error) == (1, 0)
    assert oracle.predicted_u == oracle.u and oracle.predicted_by_layer == oracle.distinct_by_layer
    assert everything.overlap == 1 and everything.predicted_u == EVERYTHING
    assert all(np.isnan([nothing.overlap, nothing.predicted_u, nothing.marginal_error]))
    for speaker in ("backbone", "token_table", "frequency", "previous", "random"):
        assert 0 <= stats[speaker].overlap < 1, speaker
    assert stats["frequency"].predicted_u == ROUTING.k


def test_methods_by_name_give_the_same_tokens() -> None:
    """Through the front door, with text of token ids; `oracle` and `previous` need nothing trained."""
    small = replace(tiny.TARGET, num_layers=1)
    target, drafter = tiny.make_target(small), tiny.make_drafter(replace(tiny.DRAFTER, boundaries=(0, 1, 1)))
    routing = RoutingShape.of(small)
    backbone = replace(PREDICTOR, routing=routing, backbone=replace(PREDICTOR.backbone, num_layers=1))
    table_VLK = tiny_predictors.random_ids((small.vocab_size, routing.layers), routing, 0)
    predictors = {
        "backbone": tiny_predictors.make_backbone(backbone),
        "token_table": tiny_predictors.make_table(table_VLK, routing),
        "frequency": tiny_predictors.make_frequency(table_VLK[0], routing),
    }
    decoder = Decoder(target, drafter, eos_ids=(), predictors=predictors)
    spec = SpecConfig(depth=2, budget=4)
    generate = partial(decoder.generate, PROMPTS, spec=spec, sampling=PLAIN, seed=3, max_new_tokens=12, batch_size=3)
    plain, speculative = generate(method="ar"), generate(method="ecospec")
    assert [g.tokens for g in plain.generations] == [g.tokens for g in speculative.generations]
    assert {len(g.tokens) for g in plain.generations} == {12}
    assert 0 < speculative.stats.overlap < 1 and speculative.stats.rows > speculative.stats.passes / 12
    assert np.isnan(plain.stats.overlap) and plain.stats.tau == 1

    # The others run the same step: what differs is in the plan.
    wanted = {
        "ar": (likelihood, None),
        "likelihood": (likelihood, None),
        "ecospec": (cost_aware, predictors["backbone"]),
        "ecospec-table": (cost_aware, predictors["token_table"]),
        "ecospec-frequency": (cost_aware, predictors["frequency"]),
        "ecospec-previous": (cost_aware, tiny_predictors.Previous()),
        "ecospec-calibrated": (cost_aware, predictors["backbone"]),
        "rate": (rate, predictors["backbone"]),
        "rate-table": (rate, predictors["token_table"]),
        "rate-oracle": (rate, tiny_predictors.Oracle()),
        "oracle": (cost_aware, tiny_predictors.Oracle()),
    }
    assert METHODS.keys() == wanted.keys()
    for name, (policy, predictor) in wanted.items():
        plan = decoder.program(name, SHARED, PLAIN)[0].plan
        assert plan.policy is policy
        assert plan.predictor == (None if predictor is None else nnx.graphdef(predictor))
        assert (plan.drafter is None, plan.spec.budget) == ((True, 0) if name == "ar" else (False, 4))


def test_methods_that_cannot_run_are_refused() -> None:
    target, drafter = tiny.make_target(), tiny.make_drafter()
    with pytest.raises(UserError, match="unknown method 'best'; known: ar, likelihood, ecospec,"):
        get_method("best")
    decoder = Decoder(target, drafter, eos_ids=())
    with pytest.raises(UserError, match="method 'ecospec' needs the predictor 'backbone'; loaded: previous, oracle"):
        decoder.generate(PROMPTS, method="ecospec")
    with pytest.raises(UserError, match="method 'oracle' needs a drafter"):
        Decoder(target, None, eos_ids=()).generate(PROMPTS, method="oracle")


def modest(
    tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None
) -> Selection:
    """A user's policy: the first `budget - b` cost-aware nodes for sequence b, and now and then none."""
    selection = cost_aware(tree, forecast, spec)
    skips_B = jnp.sum(tree.tokens_BN, axis=1) % 3 == 0
    rest_B = jnp.maximum(selection.count_B - jnp.arange(len(skips_B)), 0)
    return Selection(selection.nodes_BM, jnp.where(skips_B, 0, rest_B))


def test_a_policy_of_ones_own_may_return_fewer_nodes() -> None:
    """The first nodes of a prefix-closed ascending set are one too."""
    graph, table_state = nnx.split(Cast().token_table)
    policy = get_method(Method("modest", policy=modest, predictor="token_table")).policy
    plan = make_plan(SpecConfig(budget=6), PLAIN, policy=policy, predictor=graph)
    answers, stats = decode(plan, make_weights(script=helpful(PLAIN), predictor=table_state))
    assert answers == plain_answers(PLAIN)
    assert 1 < stats.tau and stats.live_rows < stats.passes * 6


# ---------------------------------------------------------------------------------------------------------------------
# Step by step: predictor cache, buffers, counters


def assert_caches_equal(ours: KVCache, reference: KVCache, length_B: np.ndarray) -> None:
    assert len(ours.keys) == len(reference.keys) > 0
    for buffer, expected in zip(ours.keys + ours.values, reference.keys + reference.values, strict=True):
        buffer, expected = np.asarray(buffer), np.asarray(expected)
        for b, length in enumerate(length_B):
            np.testing.assert_allclose(buffer[b, :, :length], expected[b, :, :length], rtol=1e-5, atol=1e-5)


def layer_counts(pairs: frozenset[tuple[int, int]]) -> np.ndarray:
    return np.array([sum(layer == at for at, _ in pairs) for layer in range(ROUTING.layers)])


class Tally:
    """The counters of `metrics.py`, with Python sets."""

    def __init__(self) -> None:
        none = np.zeros(ROUTING.layers, int)
        self.distinct, self.predicted, self.hits, self.uses, self.added_error = none, none, none, 0, 0

    def add(self, seen: Observed, live_BR: np.ndarray) -> None:
        true_all, said_all = frozenset(), frozenset()
        root_BLW, nodes_BNLW = np.asarray(seen.forecast.root_BLW), np.asarray(seen.forecast.nodes_BNLW)
        nodes_BM, experts_BRLW = np.asarray(seen.selection.nodes_BM), np.asarray(seen.verified.experts_BRLW)
        for b in range(len(live_BR)):
            true_b, said_b, true_root, said_root = (frozenset(),) * 4
            for row in np.flatnonzero(live_BR[b]):
                true = sets_of(experts_BRLW[b, row])
                said = sets_of(root_BLW[b] if row == 0 else nodes_BNLW[b, nodes_BM[b, row - 1]])
                if row == 0:
                    true_root, said_root = true, said
                true_b, said_b = true_b | true, said_b | said
                self.hits = self.hits + layer_counts(true & said)
                self.uses += len(true)
            error = layer_counts(said_b - said_root) - layer_counts(true_b - true_root)
            self.added_error += np.abs(error).sum()
            true_all, said_all = true_all | true_b, said_all | said_b
        self.distinct = self.distinct + layer_counts(true_all)
        self.predicted = self.predicted + layer_counts(said_all)


@pytest.mark.parametrize("speaker", Cast.SPEAKERS)
def test_after_each_step(speaker: str) -> None:
    """The predictor's cache is that of a fresh prefill; counters are what Python sets say; tokens are the plain ones.

    With accepted first and later siblings, with nothing accepted, and with finished batch mates.
    """
    plan = make_plan(WIDE, PLAIN)
    script = helpful(PLAIN)
    script.tokens[0, 12:15] = (script.tokens[0, 12:15] + 1) % TARGET.vocab_size  # spoils what might be accepted
    weights = make_weights(speaker, script)
    limits = [len(start) + NEW_TOKENS for start in PROMPTS]
    limits[1] -= 9
    state = prefilled(plan, weights, limits=limits)
    tally, emitted = Tally(), []
    while not state.finished_B.all():
        seen = observe(plan, weights, state)
        finished, before = np.asarray(state.finished_B), np.asarray(state.length_B)
        live_BR = np.asarray(seen.verified.tree.rows.live_BR)
        assert (live_BR.any(axis=1) == ~finished).all()
        forecast = jax.device_get(seen.forecast)
        assert not forecast.root_BLW[finished].any() and not forecast.nodes_BNLW[finished].any()
        tally.add(seen, live_BR)

        state = seen.after
        length = np.asarray(state.length_B)
        emitted += (length - before)[~finished].tolist()
        committed = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens_BS), length, strict=True)]
        fresh = prefilled(plan, weights, committed, limits=[2 * LONGEST] * 3)
        assert_caches_equal(state.predictor_cache, fresh.predictor_cache, length)
        assert_caches_equal(state.target_cache, fresh.target_cache, length)
        # A fresh prefill also knows the experts of the last token, and the next step predicts the same after it.
        np.testing.assert_array_equal(state.last_BLW, fresh.last_BLW)
        experts_BRLW = np.asarray(seen.verified.experts_BRLW)
        for b in range(3):
            everything = frozenset().union(*(sets_of(experts_BRLW[b, row]) for row in np.flatnonzero(live_BR[b])))
            assert sets_of(state.previous_BLW[b]) == everything
    # Two accepted nodes are never neighbours in the pool, so their cache rows were moved.
    assert 1 in emitted and max(emitted) > 2
    for b, (row, answer) in enumerate(zip(committed, plain_answers(PLAIN), strict=True)):
        assert row[len(PROMPTS[b]) :] == list(answer[: limits[b] - 1 - len(PROMPTS[b])])
    use = jax.device_get(state.counters.use)
    np.testing.assert_array_equal(use.distinct_L, tally.distinct)
    np.testing.assert_array_equal(use.predicted_L, tally.predicted)
    np.testing.assert_array_equal(use.hits_L, tally.hits)
    assert (use.uses, use.added_error) == (tally.uses, tally.added_error)

    stats = DecodeStats.create(state.counters, 3, 0.0, 1.0)
    steps, passes = stats.verifications, len(emitted)
    assert (stats.passes, stats.emitted, stats.tau) == (passes, sum(emitted), pytest.approx(np.mean(emitted)))
    assert stats.u == pytest.approx(tally.distinct.mean() / steps)
    both = stats + stats
    assert (both.u, both.tau, both.passes) == (stats.u, stats.tau, 2 * passes)
    figures = [stats.predicted_u, stats.overlap, stats.marginal_error]
    if speaker == "none":
        assert np.isnan(figures).all()
        return
    expected = [
        tally.predicted.mean() / steps,
        tally.hits.sum() / tally.uses,
        tally.added_error / (passes * ROUTING.layers),
    ]
    assert figures == pytest.approx(expected) == [both.predicted_u, both.overlap, both.marginal_error]
    if speaker == "oracle":
        assert figures == [stats.u, 1, 0]


@pytest.mark.parametrize("buffer", ["empty", "root", "previous"])
def test_initial_buffer(buffer: str) -> None:
    """Nothing, the experts predicted for the root, or the true ones of the previous verification; none if finished."""
    table = tiny_predictors.make_table(tiny_predictors.random_ids((TARGET.vocab_size, ROUTING.layers), ROUTING, 5))
    graph, table_state = nnx.split(table)
    plan = make_plan(SpecConfig(buffer=buffer), predictor=graph)
    weights = make_weights(predictor=table_state)
    state = last_state()
    previous_BLW = jax.random.bits(jax.random.key(1), state.previous_BLW.shape, jnp.uint32)
    state = replace(state, previous_BLW=previous_BLW, finished_B=jnp.array([False, True, False]))
    tree = seen_tree()
    forecast, _ = jax.jit(partial(decoding.predict, plan))(weights, state, tree)
    root_B = [int(state.tokens_BS[b, state.length_B[b]]) for b in range(3)]
    for b in range(3):
        live = b != 1
        root = sets_of(table.bits_VLW[...][root_B[b]]) if live else frozenset()
        assert sets_of(forecast.root_BLW[b]) == root
        wanted = {"empty": frozenset(), "root": root, "previous": sets_of(previous_BLW[b]) if live else frozenset()}
        assert sets_of(forecast.buffer_BLW[b]) == wanted[buffer]
        for node, token in enumerate(np.asarray(tree.tokens_BN[b]).tolist()):
            said = sets_of(table.bits_VLW[...][token]) if live else frozenset()
            assert sets_of(forecast.nodes_BNLW[b, node]) == said


@cache
def last_state() -> decoding.DecodeState:
    return prefilled(make_plan(WIDE, PLAIN), make_weights("backbone", helpful(PLAIN)))


@cache
def seen_tree() -> CandidateTree:
    return observe(make_plan(WIDE, PLAIN), make_weights("backbone", helpful(PLAIN)), last_state()).tree


@pytest.mark.parametrize("speaker", ["backbone", "oracle"])
def test_finished_sequences_change_nothing_for_live_ones(speaker: str) -> None:
    """One buffer for all, filled with what was used before: a batch of three of which two are finished decodes as one.

    One of the two is finished before its prompt is read, the other by the token that its prefill gives.
    """
    script = helpful(GREEDY)
    one = tiny.Script(script.tokens[:1], script.log_probs[:1])
    alone_answers, alone = decode(make_plan(SHARED, batch=1), make_weights(speaker, one, batch=1), PROMPTS[:1])
    for mate in range(8):
        prompts = [PROMPTS[0], PROMPTS[1], tiny.prompt(5 + mate, mate)]
        limits = [len(start) + more for start, more in zip(prompts, (NEW_TOKENS, 0, 1), strict=True)]
        answers, batch = decode(make_plan(SHARED), make_weights(speaker, script), prompts, limits=limits)
        assert answers[0] == alone_answers[0] == plain_answers()[0]
        assert batch.emitted_histograms[0] == alone.emitted_histograms[0]
        fields = ("verifications", "distinct_by_layer", "predicted_by_layer", "hits_by_layer", "uses", "added_error")
        for field in (*fields, "live_rows"):
            assert getattr(batch, field) == getattr(alone, field), field


# ---------------------------------------------------------------------------------------------------------------------
# Label alignment (docs/formats.md F.30)


def test_labels_are_those_of_the_token_itself() -> None:
    """Where routing depends on the token id alone, a table counted on traces predicts every verified row."""
    target = tiny_predictors.token_routed(tiny_predictors.make_target())
    graph, target_state = nnx.split(target)
    random = np.random.default_rng(0)
    texts = [random.permutation(TARGET.vocab_size) for _ in range(2)]
    lengths = jnp.full(2, TARGET.vocab_size)
    _, ids_LBTK = jax.device_get(jax.jit(partial(examine, graph))(target_state, jnp.asarray(np.stack(texts)), lengths))
    assert ids_LBTK.shape == (ROUTING.layers, 2, TARGET.vocab_size, ROUTING.k)

    def table(shift: int) -> nnx.State:
        traces = [
            Trace("texts", str(b), 1, text, np.roll(ids_LBTK[:, b].swapaxes(0, 1), shift, axis=0))
            for b, text in enumerate(texts)
        ]
        scores = token_scores(expert_counts(traces, TARGET.vocab_size, ROUTING))
        return nnx.state(tiny_predictors.make_table(best_experts(scores, ROUTING.k)))

    plan = make_plan(SpecConfig(depth=2), predictor=nnx.graphdef(Cast().token_table), target=graph)
    _, stats = decode(plan, make_weights(predictor=table(0), target=target_state))
    assert stats.overlap == 1 and stats.hits_by_layer == (stats.uses // 2,) * 2
    assert stats.predicted_by_layer == stats.distinct_by_layer and stats.marginal_error == 0
    for shift in (-1, 1):
        _, shifted = decode(plan, make_weights(predictor=table(shift), target=target_state))
        assert shifted.overlap < 0.5
