"""What decoding learns about itself, on made-up worlds with a known answer; and that no token depends on it."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ecospec_jax import decoding
from ecospec_jax.adaptation import DRAFT_MEMORY, FIRST_WAIT, HOPE, MEMORY, TRIAL, Adaptation, Ledger
from ecospec_jax.cache import KVCache
from ecospec_jax.calibration import Calibration
from ecospec_jax.config import RoutingShape, SamplingConfig, SpecConfig
from ecospec_jax.cost import CostModel
from ecospec_jax.decoding import DecodeState, StepPlan
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.rate import rate
from ecospec_jax.selection import Policy, cost_aware
from ecospec_jax.stepping import processed_rows
from tests import tiny_predictors
from tests.tiny import PROMPTS, SAMPLINGS, quick_compilation
from tests.tiny_predictors import (
    LONGEST,
    NEW_TOKENS,
    Cast,
    answers_of,
    decode_steps,
    helpful,
    make_weights,
    plain_answers,
    prefilled,
)

__all__ = ["quick_compilation"]
ROUTING = RoutingShape(layers=3, experts=16, k=4)
COST = CostModel(fixed=100.0, per_expert=5.0, moe_layers=3, per_row=2.0, draft=30.0, predict=10.0)
SPEC = SpecConfig(probe_every=5)


def fresh(batch: int = 1) -> Adaptation:
    return Adaptation.fresh(COST, ROUTING, batch, Calibration.trusting())


@cache
def observing(spec: SpecConfig):
    return jax.jit(partial(Adaptation.observe, cost=COST, spec=spec))


def observe(before: Adaptation, *, spec: SpecConfig = SPEC, **seen: Any) -> Adaptation:
    return observing(spec)(before, **{name: jnp.asarray(value) for name, value in seen.items()})


def test_begins_with_the_rate_of_plain_decoding() -> None:
    """Were routing uniform: each of the batch draws 4 of 16 experts in 3 layers."""
    random = np.random.default_rng(0)
    for batch in (1, 3):
        draws = [random.permuted(np.tile(np.arange(16), (batch, 1)), axis=1)[:, :4] for _ in range(4000)]
        distinct = np.mean([len(np.unique(draw)) for draw in draws])
        plain = 100 + 5 * 3 * distinct + 2 * batch
        assert float(fresh(batch).overall.rate) == pytest.approx(batch / plain, rel=5e-3)


def booked(ledger: Ledger) -> tuple[float, float]:
    return float(ledger.tokens), float(ledger.cost)


def test_a_step_is_booked_with_all_that_it_cost() -> None:
    before = fresh()
    keep = 1 - 1 / MEMORY
    overall = [part * keep for part in booked(before.overall)]
    plain = observe(before, drafted=False, emitted=2, sequences=2, pairs=20, rows=2, root_pairs=20)
    assert booked(plain.overall) == pytest.approx((overall[0] + 2, overall[1] + 204))
    assert booked(plain.drafted) == booked(plain.undrafted) == (0, 0) and (plain.trials, plain.idle) == (0, 1)
    drafted = observe(plain, drafted=True, emitted=5, sequences=2, pairs=30, rows=7, root_pairs=18)
    assert float(drafted.overall.cost) == pytest.approx(float(plain.overall.cost) * keep + 100 + 150 + 14 + 40)
    assert booked(drafted.drafted) == pytest.approx((5, 304))
    assert booked(drafted.undrafted) == pytest.approx((2, 100 + 90 + 4))
    assert (drafted.trials, drafted.idle) == (1, 0)
    again = observe(drafted, drafted=True, emitted=2, sequences=1, pairs=12, rows=4, root_pairs=12)
    shorter = 1 - 1 / DRAFT_MEMORY
    assert booked(again.drafted)[0] == pytest.approx(5 * shorter + 2)
    assert booked(again.undrafted)[0] == pytest.approx(2 * shorter + 1)
    np.testing.assert_array_equal(again.calibration.weights_F, before.calibration.weights_F)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_step_without_live_sequences_changes_nothing(drafted: bool) -> None:
    before = observe(fresh(), drafted=True, emitted=3, sequences=1, pairs=20, rows=4, root_pairs=12)
    after = observe(before, drafted=drafted, emitted=0, sequences=0, pairs=0, rows=0, root_pairs=0)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_an_empty_ledger_has_a_finite_rate() -> None:
    assert Ledger(jnp.zeros(()), jnp.zeros(())).rate == 0


# Mean tokens, pairs and rows of what a step may choose.
ACTIONS = {
    "small trees": ([1.0, 1.7, 2.0, 2.1], [12, 15, 26, 40], [1, 2, 4, 8]),
    "large trees": ([1.0, 1.7, 2.6, 3.9], [12, 15, 20, 29], [1, 2, 4, 8]),
    "the root": ([1.0, 1.05, 1.1, 1.2], [12, 22, 33, 47], [1, 2, 4, 8]),
}


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("world", "wanted"), [("small trees", 1), ("large trees", 3), ("the root", 0)])
@pytest.mark.parametrize("start", [0.01, 1.0, 100.0])
def test_the_rate_converges_to_the_best_there_is(world: str, wanted: int, noisy: bool, start: float) -> None:
    """Choosing gain - rate * cost at each step finds max E[tokens] / E[cost] (Dinkelbach), from any start."""
    tokens, pairs, rows = (jnp.array(column, jnp.float32) for column in ACTIONS[world])
    costs = 100 + 5 * pairs + 2 * rows + 40
    best = float(jnp.max(tokens / costs))
    assert int(jnp.argmax(tokens / costs)) == wanted
    begin = fresh()
    begin = replace(begin, overall=Ledger(begin.overall.tokens * start, begin.overall.cost))

    @jax.jit
    def play(adaptation: Adaptation) -> tuple[Adaptation, jax.Array]:
        def one(adaptation: Adaptation, key: jax.Array) -> tuple[Adaptation, jax.Array]:
            action = jnp.argmax(tokens - adaptation.overall.rate * costs)
            mean = tokens[action]
            drawn = jnp.floor(mean) + jax.random.bernoulli(key, mean - jnp.floor(mean)) if noisy else mean
            after = adaptation.observe(
                COST,
                SPEC,
                drafted=jnp.array(True),
                emitted=drawn,
                sequences=jnp.int32(1),
                pairs=pairs[action],
                rows=rows[action],
                root_pairs=jnp.int32(12),
            )
            return after, action

        return jax.lax.scan(one, adaptation, jax.random.split(jax.random.key(0), 6000))

    after, actions = play(begin)
    assert float(after.overall.rate) == pytest.approx(best, rel=0.1 if noisy else 1e-3)
    assert float(jnp.mean(actions[2000:] == wanted)) > (0.8 if noisy else 0.999)


def live(adaptation: Adaptation, steps: int, gain: int, spec: SpecConfig = SPEC) -> tuple[Adaptation, list[bool]]:
    """Steps that draft when told to; drafting gives `gain` tokens, and costs 250 where a plain step costs 162."""
    drafting = jax.jit(partial(Adaptation.drafts, spec=spec))
    drafted = []
    for _ in range(steps):
        drafted.append(bool(drafting(adaptation)))
        seen: dict[str, Any]
        if drafted[-1]:
            seen = {"emitted": gain, "pairs": 20, "rows": 5}
        else:
            seen = {"emitted": 1, "pairs": 12, "rows": 1}
        adaptation = observe(adaptation, spec=spec, drafted=drafted[-1], sequences=1, root_pairs=12, **seen)
    return adaptation, drafted


def test_drafting_that_pays_goes_on() -> None:
    _, drafted = live(fresh(), 60, gain=2)
    assert all(drafted)


def test_drafting_that_does_not_pay_ends_after_its_trial_and_is_probed() -> None:
    adaptation, drafted = live(fresh(), TRIAL + 40, gain=1)
    period = [False] * SPEC.probe_every + [True]
    assert drafted == [True] * TRIAL + (period * 7)[:40]
    assert int(adaptation.trials) == TRIAL

    # Once it gives 4 tokens, the probes outweigh the trial after a while, and it is all drafting again.
    adaptation, drafted = live(adaptation, 150, gain=4)
    probes = np.flatnonzero(drafted)
    resumed = next(at for at in range(len(drafted)) if all(drafted[at:]))
    assert 2 * SPEC.probe_every < resumed < 90
    assert (np.diff(probes[probes < resumed]) == SPEC.probe_every + 1).all()
    # And it ends again, when the good steps are far enough behind.
    _, drafted = live(adaptation, 600, gain=1)
    assert drafted[0] and drafted[-SPEC.probe_every - 1 :].count(True) == 1


def test_probes_in_vain_become_rarer_until_drafting_pays() -> None:
    spec = SpecConfig(probe_every=50)
    adaptation, drafted = live(fresh(), TRIAL + 300, gain=1, spec=spec)
    waits = np.diff(np.flatnonzero(drafted[TRIAL - 1 :])) - 1
    assert waits.tolist() == [FIRST_WAIT, 2 * FIRST_WAIT, 50, 50, 50, 50]
    adaptation, drafted = live(adaptation, 800, gain=4, spec=spec)
    assert drafted[-1]
    _, drafted = live(adaptation, 600, gain=1, spec=spec)
    waits = (np.diff(np.flatnonzero(drafted)) - 1).tolist()
    assert [wait for wait in waits if wait][:4] == [FIRST_WAIT, 2 * FIRST_WAIT, 50, 50]


@pytest.mark.parametrize(("sequences", "wanted"), [(1, 6), (4, 2), (16, 1)])
def test_a_trial_without_hope_ends_early(sequences: int, wanted: int) -> None:
    """When tokens 2 standard errors above the mean would not pay either: sooner in a batch, which tells more a step."""
    keep, drafts, adaptation = 1 - 1 / DRAFT_MEMORY, 0, fresh(sequences)
    while bool(adaptation.drafts(SPEC)):
        seen: dict[str, Any] = {"emitted": sequences, "sequences": sequences, "rows": 4 * sequences}
        adaptation = observe(adaptation, drafted=True, pairs=30, root_pairs=12, **seen)
        drafts += 1
    plain, spent = 100 + 5 * 12 + 2 * sequences, 100 + 5 * 30 + 8 * sequences + 40
    weights = [sum(keep**age for age in range(steps)) for steps in range(TRIAL)]

    def hopeful(weight: float) -> bool:
        return weight * sequences + HOPE * (weight * sequences) ** 0.5 >= weight * spent * sequences / plain

    assert drafts == wanted == next(steps for steps in range(1, TRIAL) if not hopeful(weights[steps]))


def test_drafting_that_breaks_even_goes_on() -> None:
    even = Ledger(jnp.float32(3), jnp.float32(300))
    adaptation = replace(fresh(), drafted=even, undrafted=even, trials=jnp.int32(TRIAL))
    assert bool(adaptation.drafts(SPEC))
    assert not bool(replace(adaptation, undrafted=Ledger(jnp.float32(3.001), even.cost)).drafts(SPEC))


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

GREEDY, PLAIN = SAMPLINGS["greedy"], SAMPLINGS["plain"]
CHEAP = CostModel(fixed=1e3, per_expert=10.0, moe_layers=2, per_row=1.0, draft=20.0, predict=5.0)
DEAR = replace(CHEAP, draft=1e9)  # drafting never pays


@dataclass(frozen=True)
class Case:
    """What is compiled once; all else is data."""

    spec: SpecConfig
    sampling: SamplingConfig
    batch: int
    cost: CostModel = CHEAP
    policy: Policy = rate
    adaptive: bool = True

    @property
    def plan(self) -> StepPlan:
        plan = tiny_predictors.make_plan(self.spec, self.sampling, batch=self.batch, policy=self.policy)
        return replace(plan, cost=self.cost, calibrated=True, adaptive=self.adaptive)

    def fresh(self, calibration: Calibration | None = None) -> Adaptation:
        trusting = Calibration.trusting()
        return Adaptation.fresh(self.cost, tiny_predictors.ROUTING, self.batch, calibration or trusting)


CASES = {
    "one, all row counts": Case(SpecConfig(row_counts=(1, 2, 3), probe_every=2), GREEDY, 1),
    "three, sampled": Case(SpecConfig(budget=6, probe_every=5), PLAIN, 3),
    "three, dear drafts": Case(SpecConfig(depth=2, row_counts=(), probe_every=4), GREEDY, 3, DEAR),
    "one, always probing": Case(SpecConfig(depth=2, branch=4, probe_every=1), PLAIN, 1, DEAR),
    "three, not adaptive": Case(SpecConfig(depth=2, budget=3), PLAIN, 3, policy=cost_aware, adaptive=False),
}


def ledger(tokens: float, cost: float) -> Ledger:
    return Ledger(jnp.float32(tokens), jnp.float32(cost))


def beginnings(case: Case) -> dict[str, Adaptation]:
    """From a fresh start, at rates that take every node or none, with drafting out of favour for good or not."""
    fresh = case.fresh()
    poor = replace(fresh, trials=jnp.int32(TRIAL), drafted=ledger(0, 1))
    return {
        "fresh": fresh,
        "greedy": replace(fresh, overall=ledger(0, 1e30)),
        "thrifty": replace(fresh, overall=ledger(1e30, 1)),
        "out of favour": replace(poor, undrafted=ledger(1e30, 1)),
        "on the brink": replace(poor, undrafted=ledger(1, 1e3), overall=ledger(0, 1e30)),
    }


def calibrations() -> list[Calibration]:
    random = np.random.default_rng(0)
    eye = jnp.eye(5, dtype=jnp.float32)
    drawn = [random.normal(size=5) * scale for scale in (1.0, 30.0)]
    odd = [np.zeros(5), np.full(5, 1e30), np.array([1e30, 0, -1e30, 1e30, -1e30]), *drawn]
    return [Calibration(jnp.asarray(w, jnp.float32), eye * scale) for w in odd for scale in (1e-30, 1.0)]


def run(case: Case, adaptation: Adaptation, speaker: str, *, helped: bool) -> tuple[DecodeState, DecodeStats]:
    script = helpful(case.sampling, case.batch) if helped else None
    weights = make_weights(speaker, script, batch=case.batch)
    state = prefilled(case.plan, weights, PROMPTS[: case.batch], adaptation=adaptation)
    state = decode_steps(case.plan, weights, state, jnp.int32(10_000))
    return state, DecodeStats.create(state.counters, case.batch, 0.0, 1.0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_token_depends_on_what_is_learned(case: Case) -> None:
    """Whatever is predicted, calibrated and booked, the tokens are those of plain decoding; one compilation for all."""
    expected = plain_answers(case.sampling)[: case.batch]
    before = decode_steps._cache_size()  # pyright: ignore
    learned = case.fresh()
    for speaker in Cast.SPEAKERS:
        for helped in (True, False):
            state, _ = run(case, learned, speaker, helped=helped)
            assert answers_of(state, PROMPTS[: case.batch]) == expected, speaker
            assert state.adaptation is not None
            learned = state.adaptation  # as the next batch begins
    for calibration in calibrations():
        state, _ = run(case, case.fresh(calibration), "token_table", helped=True)
        assert answers_of(state, PROMPTS[: case.batch]) == expected
    stats = {}
    for name, adaptation in beginnings(case).items():
        state, stats[name] = run(case, adaptation, "backbone", helped=True)
        assert answers_of(state, PROMPTS[: case.batch]) == expected, name
    assert decode_steps._cache_size() == before + 1  # pyright: ignore
    rows = {name: one.live_rows / one.passes for name, one in stats.items()}
    if not case.adaptive:
        assert set(rows.values()) == {1.0 + case.spec.budget}
        return
    # The budget is a cap: all of it is used where cost does not matter, nothing where only cost does.
    assert rows["thrifty"] == 1 and stats["thrifty"].tau == 1
    assert 1 < rows["greedy"] <= 1 + case.spec.budget
    if case.cost is CHEAP:
        assert rows["greedy"] == 1 + case.spec.budget and stats["greedy"].tau > 1.3
        assert rows["out of favour"] < rows["on the brink"] < rows["greedy"]


@pytest.mark.parametrize(
    ("counts", "live", "wanted"), [((1, 3, 9), 1, 1), ((1, 3, 9), 2, 3), ((1, 3, 9), 4, 5), ((), 1, 5)]
)
def test_dead_rows_are_paid_for(counts: tuple[int, ...], live: int, wanted: int) -> None:
    """The least compiled count that holds the rows of the longest sequence; fixed trees always process all."""
    case = Case(SpecConfig(row_counts=counts), GREEDY, 3)
    live_BR = jnp.arange(5) < jnp.array([1, live, 0])[:, None]
    assert int(processed_rows(case.plan, live_BR)) == wanted
    assert int(processed_rows(replace(case, adaptive=False).plan, live_BR)) == 5


LONG_PAUSES = Case(SpecConfig(depth=2, row_counts=(), probe_every=9), GREEDY, 3, DEAR)  # caught up block by block


@pytest.mark.parametrize("name", ["one, all row counts", "three, sampled", "three, dear drafts", "three, long pauses"])
@pytest.mark.parametrize("beginning", ["fresh", "out of favour", "on the brink"])
def test_caches_after_each_step(name: str, beginning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of target, drafter and predictor are those of a fresh prefill, however many plain steps lie behind."""
    case = CASES.get(name, LONG_PAUSES)
    if case is LONG_PAUSES:
        monkeypatch.setattr(decoding, "CATCH_UP", 4)
    plan, prompts = case.plan, PROMPTS[: case.batch]
    weights = make_weights("backbone", helpful(case.sampling, case.batch), batch=case.batch)
    begin = beginnings(case)[beginning]
    limits = [len(start) + NEW_TOKENS for start in prompts]
    limits[-1] -= 5 if case.batch > 1 else 0
    state = prefilled(plan, weights, prompts, limits=limits, adaptation=replace(begin, trials=jnp.int32(TRIAL)))
    waited, drafts = [], []
    while not state.finished_B.all():
        waited.append(int(state.pending_count_B.max()))
        going = ~np.asarray(state.finished_B)
        state = decode_steps(plan, weights, state, jnp.int32(1))
        drafts.append(int(state.adaptation.idle) == 0)
        length, pending = np.asarray(state.length_B), np.asarray(state.pending_count_B)
        assert (pending <= plan.pending_slots).all() and (going <= (pending >= 1)).all()
        committed = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens_BS), length, strict=True)]
        fresh = prefilled(plan, weights, committed, limits=[2 * LONGEST] * case.batch, adaptation=begin)
        assert_equal(state.target_cache, fresh.target_cache, length)
        assert_equal(state.draft_cache, fresh.draft_cache, length - pending)
        if drafts[-1]:
            assert_equal(state.predictor_cache, fresh.predictor_cache, length)
        for b in range(case.batch):  # what waits is a token each, with the features before it
            at = np.asarray(state.tokens_BS)[b, length[b] - pending[b] + 1 : length[b] + 1]
            np.testing.assert_array_equal(state.pending_tokens_BP[b, : pending[b]], at)
            last = state.pending_features_BPF[b, pending[b] - 1]
            np.testing.assert_allclose(last, fresh.pending_features_BPF[b, 0], rtol=1e-4, atol=1e-5)
    assert True in drafts
    if beginning == "out of favour":
        assert drafts == [at % (case.spec.probe_every + 1) == case.spec.probe_every for at in range(len(drafts))]
    if beginning == "out of favour" or case.cost is DEAR:
        assert max(waited) > plan.spec.max_emitted  # the wide catch-up
    if case is LONG_PAUSES:
        assert max(waited) > 2 * decoding.CATCH_UP


def assert_equal(ours: KVCache | None, fresh: KVCache | None, length_B: np.ndarray) -> None:
    assert ours is not None and fresh is not None
    for buffer, expected in zip(ours.keys + ours.values, fresh.keys + fresh.values, strict=True):
        buffer, expected = np.asarray(buffer), np.asarray(expected)
        for b, length in enumerate(length_B):
            np.testing.assert_allclose(buffer[b, :, :length], expected[b, :, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["three, sampled"])
def test_finished_sequences_weigh_nothing(name: str) -> None:
    """A batch of three of which two are finished from the start books and verifies what it does if they differ."""
    case = CASES[name]
    weights = make_weights("backbone", helpful(case.sampling), batch=3)
    seen = []
    for mate in range(3):
        prompts = [PROMPTS[0], [mate + 1] * (3 + mate), [2 * mate] * (9 - mate)]
        limits = [len(start) + more for start, more in zip(prompts, (NEW_TOKENS, 0, 1), strict=True)]
        begin = beginnings(case)["on the brink"]
        state = prefilled(case.plan, weights, prompts, limits=limits, adaptation=begin)
        state = jax.device_get(decode_steps(case.plan, weights, state, jnp.int32(10_000)))
        assert answers_of(state, prompts)[0] == plain_answers(case.sampling)[0]
        seen.append((state.adaptation, state.counters.live_rows, state.counters.use, state.counters.emitted_BP[0]))
    for other in seen[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, seen[0])
