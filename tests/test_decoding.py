"""Decoding: lossless for any drafter, caches as a fresh prefill would leave them, ends where it should."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.config import SamplingConfig, SpecConfig
from ecospec_jax.decoding import Weights
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.models.qwen3_moe import Qwen3Moe
from ecospec_jax.selection import Economy, ExpertForecast
from ecospec_jax.tree import CandidateTree, Selection
from tests import tiny
from tests.tiny import BUCKET, CAPACITY, PROMPTS, SAMPLINGS, SCRIPT_WIDTH, TARGET, Script, quick_compilation

__all__ = ["quick_compilation"]

NEW_TOKENS = 20
GREEDY, PROCESSED, PLAIN = SAMPLINGS["greedy"], SAMPLINGS["processed"], SAMPLINGS["plain"]


@cache
def plain_answers(sampling: SamplingConfig, batch: int = 3) -> list[tuple[int, ...]]:
    """What plain decoding gives: the reference of this file."""
    program = tiny.make_program("ar", sampling=sampling)
    generations, stats = tiny.decode(program, tiny.plain_weights(), PROMPTS[:batch], max_new_tokens=NEW_TOKENS)
    assert stats.tau == 1 and stats.rows <= batch
    return tiny.tokens_of(generations)


def forward(target: Qwen3Moe, texts: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    """Logits `[batch, CAPACITY, vocab]` and expert ids `[layers, batch, CAPACITY, k]` of whole texts."""
    shape = (len(texts), CAPACITY)
    tokens, live = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, alive, text in zip(tokens, live, texts, strict=True):
        row[: len(text)], alive[: len(text)] = text, True
    graph, state = nnx.split(target)

    def run(state: nnx.State) -> tuple[jax.Array, jax.Array]:
        module = nnx.merge(graph, state)
        rows = Rows(
            tokens_BR=jnp.asarray(tokens),
            positions_BR=jnp.broadcast_to(jnp.arange(CAPACITY), shape),
            live_BR=jnp.asarray(live),
            context_B=jnp.zeros(shape[0], jnp.int32),
            mask_BRW=jnp.broadcast_to(jnp.tril(jnp.ones((CAPACITY, CAPACITY), bool)), (*shape, CAPACITY)),
        )
        output, _ = module(rows, module.empty_cache(shape[0], CAPACITY), ())
        return module.logits(output.hidden_BRD), output.expert_ids_LBRK

    return jax.jit(run)(state)


@cache
def target_logits(sampling: SamplingConfig) -> np.ndarray:
    """Logits that predict each position of the plain answers, `[batch, CAPACITY, vocab]`."""
    texts = [start + list(answer) for start, answer in zip(PROMPTS, plain_answers(sampling), strict=True)]
    return np.roll(np.asarray(forward(tiny.make_target(), texts)[0]), 1, axis=1)


def good(sampling: SamplingConfig, batch: int) -> Script:
    """Right most of the time."""
    return tiny.answers_script(PROMPTS[:batch], plain_answers(sampling, batch), right=0.92, first=0.8)


def second(sampling: SamplingConfig, batch: int) -> Script:
    """Right every time, and seldom in the first place."""
    return tiny.answers_script(PROMPTS[:batch], plain_answers(sampling, batch), right=1, first=0.2)


def least_likely(sampling: SamplingConfig, batch: int) -> Script:
    """Proposes what the target is least likely to say, with full confidence."""
    tokens = np.argsort(target_logits(sampling)[:batch], axis=-1)[..., :SCRIPT_WIDTH]
    return Script(tokens, np.full(tokens.shape, -1e-6))


def constant(sampling: SamplingConfig, batch: int) -> Script:
    """Every proposal is the same token, siblings included; it is the answers' most frequent one."""
    token = np.bincount(np.concatenate(plain_answers(sampling, batch))).argmax()
    shape = (batch, CAPACITY, SCRIPT_WIDTH)
    return Script(np.full(shape, token), np.zeros(shape))


def nan_some(sampling: SamplingConfig, batch: int) -> Script:
    """Right tokens, but every other log-probability is NaN or infinite."""
    script = second(sampling, batch)
    odd = np.random.default_rng(0).choice([0, np.nan, -np.inf], script.log_probs.shape, p=[0.4, 0.4, 0.2])
    return Script(script.tokens, script.log_probs + odd)


def nan_all(sampling: SamplingConfig, batch: int) -> Script:
    """Right tokens without any log-probability."""
    script = good(sampling, batch)
    return Script(script.tokens, np.full(script.log_probs.shape, np.nan))


SCRIPTS = [good, second, least_likely, constant, nan_some, nan_all]

CASES = [
    *((SpecConfig(budget=budget), GREEDY, 3) for budget in range(9)),
    (SpecConfig(), PROCESSED, 3),
    (SpecConfig(budget=7), PLAIN, 3),
    (SpecConfig(), GREEDY, 1),
    (SpecConfig(), PLAIN, 1),
    (SpecConfig(depth=1, branch=1, budget=1), PLAIN, 3),
    (SpecConfig(depth=1, branch=4, budget=3), PROCESSED, 3),
    (SpecConfig(depth=4, branch=1, budget=4), GREEDY, 3),
    (SpecConfig(depth=2, branch=3, budget=8), PLAIN, 3),
    (SpecConfig(depth=4, branch=3, budget=6), PROCESSED, 3),
]


@pytest.mark.parametrize(("spec", "sampling", "batch"), CASES, ids=str)
def test_speculative_tokens_equal_plain_ones(spec: SpecConfig, sampling: SamplingConfig, batch: int) -> None:
    """Token by token, whatever the drafter says."""
    program = tiny.make_program(spec=spec, sampling=sampling, batch=batch)
    expected = plain_answers(sampling, batch)

    def check(weights: Weights) -> DecodeStats:
        generations, stats = tiny.decode(program, weights, PROMPTS[:batch], max_new_tokens=NEW_TOKENS)
        assert tiny.tokens_of(generations) == expected
        return stats

    check(tiny.weights_with(batch=batch))
    check(nan_drafter(batch))
    tau = {script.__name__: check(tiny.weights_with(script(sampling, batch), batch=batch)).tau for script in SCRIPTS}
    assert all(1 <= value <= spec.max_emitted for value in tau.values())
    if spec.budget >= 4 and spec.depth >= 3:
        assert tau["good"] > 2
    if spec.budget:
        assert tau["good"] > 1.4 and tau["constant"] > 1.05
    assert tau["least_likely"] == 1


def nan_drafter(batch: int) -> Weights:
    """A drafter whose every weight is NaN."""
    weights = tiny.weights_with(batch=batch)
    poisoned = jax.tree.map(
        lambda leaf: leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, weights.drafter
    )
    return Weights(weights.target, poisoned)


@pytest.mark.parametrize("sampling", [GREEDY, PROCESSED], ids=str)
def test_tokens_depend_on_no_batch_mate(sampling: SamplingConfig) -> None:
    """Batches of 3, of 1, padded, reordered: the tokens of a prompt and its seed stay."""
    expected = plain_answers(sampling)
    assert plain_answers(sampling, 1) == expected[:1]
    program = tiny.make_program(spec=SpecConfig(), sampling=sampling)
    weights = tiny.weights_with()
    for order in ([2, 0, 1], [1], [2, 1], [0, 0, 2]):
        generations, _ = tiny.decode(
            program,
            weights,
            [PROMPTS[index] for index in order],
            seeds=[(5, index) for index in order],
            max_new_tokens=NEW_TOKENS,
            batch_size=3,
        )
        assert tiny.tokens_of(generations) == [expected[index] for index in order]


def test_seeds_tell_sequences_apart() -> None:
    """The same prompt under another seed or sequence index goes another way; under the same, the same."""
    program = tiny.make_program("ar", sampling=PLAIN)
    seeds = [(5, 0), (5, 1), (6, 0)]
    one, other, third = tiny.tokens_of(tiny.decode(program, tiny.plain_weights(), [PROMPTS[0]] * 3, seeds=seeds)[0])
    assert one == plain_answers(PLAIN)[0]
    assert len({one, other, third}) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Caches (docs/formats.md F.20, F.23)


def assert_caches_equal(ours: KVCache, reference: KVCache, lengths: np.ndarray) -> None:
    """The first `lengths` slots of every sequence, in every layer."""
    for buffer, expected in zip(ours.keys + ours.values, reference.keys + reference.values, strict=True):
        for sequence, length in enumerate(lengths):
            np.testing.assert_allclose(
                buffer[sequence, :, :length], expected[sequence, :, :length], rtol=1e-5, atol=1e-5
            )


def test_caches_equal_a_fresh_prefill_after_each_step() -> None:
    """With accepted first and later siblings, with nothing accepted, and while a batch mate is finished."""
    program = tiny.make_program(spec=SpecConfig(budget=7), sampling=PLAIN)
    script = second(PLAIN, 3)
    script.tokens[0, 14:17] = (script.tokens[0, 14:17] + 1) % TARGET.vocab_size  # spoils what might be accepted
    weights = tiny.weights_with(script)
    limits = [len(start) + NEW_TOKENS for start in PROMPTS]
    limits[1] -= 9
    state = tiny.prefilled(program, weights, limits=limits)
    observe = tiny.observer(program.plan)
    moved, emitted = 0, []
    while not state.finished_B.all():
        seen = observe(weights, state)
        going = ~np.asarray(state.finished_B)
        rows = np.asarray(seen.path.rows_BP)
        count = np.asarray(seen.path.count_B)
        moved += sum(rows[b, j] != j for b in np.flatnonzero(going) for j in range(count[b]))
        emitted += count[going].tolist()

        state = program.decode_steps(weights, state, jnp.int32(1))
        np.testing.assert_array_equal(state.length_B, seen.after.length_B)
        length = np.asarray(state.length_B)
        assert (length < BUCKET).all()
        committed = [np.asarray(state.tokens_BS)[b, : length[b]].tolist() for b in range(3)]
        fresh = tiny.prefilled(program, weights, committed, limits=[CAPACITY] * 3)
        assert_caches_equal(state.target_cache, fresh.target_cache, length)
        assert state.draft_cache is not None and fresh.draft_cache is not None
        caught_up = length - np.asarray(state.pending_count_B)
        assert (caught_up >= [len(start) for start in PROMPTS] - np.array(1)).all()
        assert_caches_equal(state.draft_cache, fresh.draft_cache, caught_up)
        # The root that the fresh prefill draws is the one that decoding holds, since keys go by position.
        at_root = np.arange(3), length
        np.testing.assert_array_equal(
            np.asarray(state.tokens_BS)[at_root][going], np.asarray(fresh.tokens_BS)[at_root][going]
        )
        last = np.asarray(state.pending_count_B) - 1
        np.testing.assert_allclose(
            np.asarray(state.pending_features_BPF)[np.arange(3), last], fresh.pending_features_BPF[:, 0], atol=1e-5
        )
    assert moved > 5 and 1 in emitted and max(emitted) > 2
    assert np.asarray(state.length_B).tolist() == [limit - 1 for limit in limits]


def test_finished_sequences_stand_still() -> None:
    """What ended early, as by a stop string, keeps its tokens, length and counts; its mates go on."""
    program = tiny.make_program(spec=SpecConfig(budget=7), sampling=PLAIN)
    weights = tiny.weights_with(good(PLAIN, 3))
    state = program.decode_steps(weights, tiny.prefilled(program, weights), jnp.int32(2))
    before = replace(state, finished_B=jnp.array([True, False, False]))
    after = program.decode_steps(weights, jax.tree.map(jnp.copy, before), jnp.int32(3))
    assert (after.length_B > before.length_B).tolist() == [False, True, True]
    for name in ("tokens_BS", "length_B", "pending_tokens_BP", "pending_features_BPF", "pending_count_B"):
        np.testing.assert_array_equal(getattr(after, name)[0], getattr(before, name)[0], name)
    np.testing.assert_array_equal(after.counters.emitted_BP[0], before.counters.emitted_BP[0])
    assert_caches_equal(after.target_cache, before.target_cache, np.asarray(before.length_B))


def test_no_step_runs_once_all_are_finished() -> None:
    program = tiny.make_program(spec=SpecConfig(budget=7), sampling=PLAIN)
    weights = tiny.weights_with()
    state = tiny.prefilled(program, weights, limits=[len(start) + 1 for start in PROMPTS])
    assert state.finished_B.all()
    state = program.decode_steps(weights, state, jnp.int32(10))
    assert int(state.counters.verifications) == 0 and int(state.counters.live_rows) == 0
    assert np.asarray(state.length_B).tolist() == [len(start) for start in PROMPTS]


# ---------------------------------------------------------------------------------------------------------------------
# Where answers end (docs/formats.md F.24)


def chains(sampling: SamplingConfig) -> Script:
    """Always right in the first place, and the chain of first children is always selected: four tokens a pass."""
    script = tiny.answers_script(PROMPTS, plain_answers(sampling), right=1, first=1)
    script.log_probs[...] = np.array([-0.01, -1, -2, -3])
    return script


def histogram(emitted: int) -> tuple[int, ...]:
    """Passes that emit 1, 2, 3, 4 tokens when all but the last emit four."""
    rest = emitted % 4
    return tuple((emitted // 4 if n == 4 else 0) + (n == rest) for n in range(1, 5))


def test_eos_truncates() -> None:
    """As the first token, which ends a sequence before its first step, and inside an accepted path of four tokens."""
    answers = plain_answers(PLAIN)
    cut = {eos: [a[: a.index(eos) + 1] if eos in a else a for a in answers] for eos in range(TARGET.vocab_size)}
    inside = lambda answer: len(answer) < NEW_TOKENS and (len(answer) - 1) % 4 in (1, 2, 3)  # noqa: E731
    eos = next(e for e, texts in cut.items() if min(map(len, texts)) == 1 and any(map(inside, texts)))

    program = tiny.make_program(spec=SpecConfig(budget=7), sampling=PLAIN, eos_ids=(eos, TARGET.vocab_size + 1))
    generations, stats = tiny.decode(program, tiny.weights_with(chains(PLAIN)), max_new_tokens=NEW_TOKENS)
    assert tiny.tokens_of(generations) == cut[eos]
    assert [g.finish for g in generations] == ["eos" if eos in answer else "length" for answer in answers]
    assert stats.emitted_histograms == tuple(histogram(len(answer) - 1) for answer in cut[eos])
    assert stats.emitted == sum(len(answer) - 1 for answer in cut[eos])


@pytest.mark.parametrize("new_tokens", range(1, 7))
def test_the_limit_is_met_exactly(new_tokens: int) -> None:
    """Also where an accepted path would go beyond it."""
    answers = plain_answers(GREEDY)
    program = tiny.make_program(spec=SpecConfig())
    generations, stats = tiny.decode(program, tiny.weights_with(chains(GREEDY)), max_new_tokens=new_tokens)
    assert tiny.tokens_of(generations) == [answer[:new_tokens] for answer in answers]
    assert {generation.finish for generation in generations} == {"length"}
    assert stats.emitted == 3 * (new_tokens - 1)


def test_tau_counts_emitted_tokens_per_pass_without_the_prefills() -> None:
    program = tiny.make_program(spec=SpecConfig())
    generations, stats = tiny.decode(program, tiny.weights_with(chains(GREEDY)), max_new_tokens=NEW_TOKENS)
    assert {len(generation.tokens) for generation in generations} == {20}
    assert stats.emitted_histograms == (histogram(19),) * 3 == ((0, 0, 1, 4),) * 3
    assert stats.emitted == 57 and stats.verifications == 5 and stats.tau == pytest.approx(57 / 15)
    assert stats.live_rows == 5 * 3 * 5 and stats.rows == 15


# ---------------------------------------------------------------------------------------------------------------------
# Dead rows (docs/formats.md F.29)


UNUSED_SLOTS = (1, 0, 3)


def uneven(
    tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None
) -> Selection:
    """A policy that leaves `UNUSED_SLOTS` of the budget to the three sequences."""
    nodes_BM = jnp.broadcast_to(jnp.arange(spec.budget), (tree.tokens_BN.shape[0], spec.budget))
    return Selection(nodes_BM, spec.budget - jnp.array(UNUSED_SLOTS))


def orphans(
    tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None
) -> Selection:
    """A broken policy: the root's second child and the last nodes of the pool, whose parents are mostly missing."""
    batch, nodes = tree.tokens_BN.shape
    nodes_M = jnp.concatenate([jnp.array([1]), jnp.arange(nodes - spec.budget + 1, nodes)])
    return Selection(jnp.broadcast_to(nodes_M, (batch, spec.budget)), jnp.full(batch, spec.budget))


def test_a_node_without_its_ancestors_is_dead() -> None:
    """Such nodes spoil no token, are not counted, and what is left of the choice still speeds decoding up."""
    program = tiny.make_program(spec=SpecConfig(budget=4), policy=orphans)
    answers, stats = tiny.decode(program, tiny.weights_with(second(GREEDY, 3)), PROMPTS, max_new_tokens=NEW_TOKENS)
    assert tiny.tokens_of(answers) == plain_answers(GREEDY)
    assert stats.tau > 1.2
    assert stats.live_rows < stats.passes * 5


MANY_EXPERTS = replace(TARGET, num_experts=83, experts_per_token=2)


def test_dead_rows_change_nothing() -> None:
    """Padding, finished sequences, unused slots: none of them is counted or routed, and no live row sees them.

    A batch of one sequence, one finished from the start and one that finishes early runs twice: the second time, all
    experts that no live row of the first used hold NaN.
    """
    target = tiny.make_target(MANY_EXPERTS, seed=4)
    graph, target_state = nnx.split(target)
    program = tiny.make_program(spec=SpecConfig(budget=5), policy=uneven, target=graph)
    observe = tiny.observer(program.plan)
    weights = tiny.weights_with(target=target_state)
    limits = [BUCKET, len(PROMPTS[1]), len(PROMPTS[2]) + 3]

    used_LE = np.zeros((MANY_EXPERTS.num_layers, MANY_EXPERTS.num_experts), bool)
    for used_E, ids_BRK in zip(used_LE, np.asarray(forward(target, [PROMPTS[0], PROMPTS[2]])[1]), strict=True):
        used_E[[expert for expert in ids_BRK.ravel() if expert < MANY_EXPERTS.num_experts]] = True
    state = tiny.prefilled(program, weights, limits=limits)
    assert state.finished_B.tolist() == [False, True, False]
    distinct_L, live_rows, steps = np.zeros(MANY_EXPERTS.num_layers, int), 0, 0
    while not state.finished_B.all():
        seen = observe(weights, state)
        verified = seen.verified
        live_BR, words_BRLW = np.asarray(verified.tree.rows.live_BR), np.asarray(verified.experts_BRLW)
        used_BRLE = np.unpackbits(words_BRLW.view(np.uint8), axis=-1, bitorder="little").astype(bool)
        np.testing.assert_array_equal(live_BR.sum(axis=1), np.where(state.finished_B, 0, 6 - np.array(UNUSED_SLOTS)))
        assert not used_BRLE[~live_BR].any()
        step_LE = used_BRLE.any(axis=(0, 1))[:, : MANY_EXPERTS.num_experts]
        used_LE |= step_LE
        distinct_L += step_LE.sum(axis=1)
        live_rows, steps = live_rows + live_BR.sum(), steps + 1
        state = seen.after
    np.testing.assert_array_equal(state.counters.use.distinct_L, distinct_L)
    assert int(state.counters.live_rows) == live_rows and int(state.counters.verifications) == steps

    poisoned = nnx.clone(target)
    for layer, used_E in zip(poisoned.layers, used_LE, strict=True):
        assert (~used_E).sum() > 10
        for weight in (part.weight for part in (layer.moe.experts.gate, layer.moe.experts.up, layer.moe.experts.down)):
            weight.set_value(jnp.where(used_E[:, None, None], weight[...], jnp.nan))
    weights = Weights(nnx.state(poisoned), weights.drafter)
    again = tiny.prefilled(program, weights, limits=limits)
    for _ in range(steps):
        again = observe(weights, again).after
    np.testing.assert_array_equal(again.tokens_BS, state.tokens_BS)
    np.testing.assert_array_equal(again.counters.use.distinct_L, distinct_L)
    np.testing.assert_array_equal(again.counters.emitted_BP, state.counters.emitted_BP)


def test_padding_sequences_are_counted_nowhere() -> None:
    """A batch padded to three has the tokens and the figures of its one prompt."""
    alone, stats = tiny.decode(
        tiny.make_program(spec=SpecConfig(), batch=1), tiny.weights_with(good(GREEDY, 1), batch=1), PROMPTS[:1]
    )
    script = good(GREEDY, 3)
    script.tokens[:1], script.log_probs[:1] = good(GREEDY, 1).tokens, good(GREEDY, 1).log_probs
    padded, padded_stats = tiny.decode(
        tiny.make_program(spec=SpecConfig()), tiny.weights_with(script), PROMPTS[:1], batch_size=3
    )
    assert padded == alone
    assert (padded_stats.u, padded_stats.tau, padded_stats.rows) == (stats.u, stats.tau, stats.rows)
    assert padded_stats.emitted_histograms == stats.emitted_histograms
