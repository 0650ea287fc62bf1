"""DeepSeek-V3 with its own MTP module as the drafter: tokens, latent caches, whose experts are counted where."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder, decoding
from ecospec_jax.checkpoint import borrow
from ecospec_jax.config import MtpConfig, RoutingShape, SamplingConfig, SpecConfig
from ecospec_jax.decoding import DecodeState, StepPlan, Weights
from ecospec_jax.metrics import DecodeStats
from ecospec_jax.models.deepseek_v3 import DeepseekV3
from ecospec_jax.models.moe import GroupedSigmoidRouter
from ecospec_jax.models.mtp import Mtp
from ecospec_jax.models.predictor import Previous
from ecospec_jax.selection import cost_aware, likelihood
from tests import tiny, tiny_predictors
from tests.test_decoding import assert_caches_equal
from tests.tiny import BUCKET, CAPACITY, PROMPTS, SAMPLINGS, quick_compilation
from tests.tiny_predictors import NEW_TOKENS, observe, sets_of

__all__ = ["quick_compilation"]

CONFIG = tiny.DEEPSEEK  # the first layer is dense, so layer 0 of every expert label is decoder layer 1
ROUTING = RoutingShape.of(CONFIG)
GREEDY, PLAIN = SAMPLINGS["greedy"], SAMPLINGS["plain"]
SPEC = SpecConfig(depth=3, branch=6, budget=16)  # many rows, since a random drafter is seldom right


class _Listening(nnx.Module):
    """A router that reports what it chose."""

    heard: list[np.ndarray] = []

    def __init__(self, inner: GroupedSigmoidRouter) -> None:
        self.inner = inner

    def __call__(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_TK, weights_TK = self.inner(x_TD)
        jax.debug.callback(lambda ids_TK: self.heard.append(np.asarray(ids_TK)), ids_TK, ordered=True)
        return ids_TK, weights_TK


@cache
def _target() -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(tiny.randomised(lambda: DeepseekV3(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=41))


@cache
def _mtp(*, listening: bool = False) -> tuple[nnx.GraphDef, nnx.State]:
    module = tiny.randomised(lambda: Mtp(MtpConfig(CONFIG), dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=42)
    borrow(module, module.config, nnx.merge(*_target()))
    if listening:
        module.layer.moe.router = _Listening(module.layer.moe.router)
    return nnx.split(module)


@cache
def _predictor(name: str | None) -> tuple[nnx.GraphDef, nnx.State] | tuple[None, None]:
    if name is None:
        return None, None
    table_VLK = tiny_predictors.random_ids((CONFIG.vocab_size, ROUTING.layers), ROUTING, 3)
    table = tiny_predictors.make_table(table_VLK, ROUTING)
    return nnx.split({"token_table": table, "previous": Previous()}[name])


def _plan(
    sampling: SamplingConfig, predictor: str | None = None, *, listening: bool = False
) -> tuple[StepPlan, Weights]:
    (graph, state), (drafter, drafter_state) = _target(), _mtp(listening=listening)
    speaker, speaker_state = _predictor(predictor)
    policy = likelihood if predictor is None else cost_aware
    plan = StepPlan(graph, drafter, policy, SPEC, sampling, (), speaker)
    return plan, Weights(state, drafter_state, speaker_state)


@cache
def plain_answers(sampling: SamplingConfig) -> list[tuple[int, ...]]:
    graph, state = _target()
    plan = StepPlan(graph, None, likelihood, tiny.PLAIN, sampling, ())
    generations, stats = tiny.decode(tiny.compiled(plan), Weights(state, None), max_new_tokens=NEW_TOKENS)
    assert stats.draft_experts == 0 and np.isnan(stats.draft_u)
    return tiny.tokens_of(generations)


def _decode(plan: StepPlan, weights: Weights, batch: int, size: int | None = None) -> tuple[list, DecodeStats]:
    prompts = PROMPTS[:batch]
    generations, stats = tiny.decode(
        tiny.compiled(plan), weights, prompts, max_new_tokens=NEW_TOKENS, batch_size=size or batch
    )
    return tiny.tokens_of(generations), stats


@pytest.mark.parametrize(
    ("sampling", "predictor", "batch"),
    [
        (GREEDY, None, 3),
        (GREEDY, None, 1),
        (PLAIN, "previous", 3),
        (GREEDY, "token_table", 3),
    ],
)
def test_tokens_equal_plain_ones(sampling: SamplingConfig, predictor: str | None, batch: int) -> None:
    answers, stats = _decode(*_plan(sampling, predictor), batch)
    assert answers == plain_answers(sampling)[:batch]
    assert 1.1 < stats.tau < 3
    assert len(stats.distinct_by_layer) == 2
    assert ROUTING.k < stats.u <= CONFIG.num_experts
    assert np.isnan(stats.overlap) if predictor is None else 0 < stats.overlap < 1
    # Three passes of the module a step; a row touches `k` of its experts.
    passes = SPEC.depth * stats.verifications
    assert passes * ROUTING.k <= stats.draft_experts <= passes * CONFIG.num_experts
    assert stats.draft_u == stats.draft_experts / stats.verifications


def test_tokens_equal_plain_ones_with_good_drafts() -> None:
    """A scripted EAGLE-3 head on the same target: long accepted paths of later siblings."""
    graph, state = _target()
    answers = plain_answers(PLAIN)
    plan = tiny.make_plan(spec=SpecConfig(budget=7), sampling=PLAIN, target=graph)
    script = tiny.answers_script(PROMPTS, answers, right=0.95, first=0.4)
    found, stats = _decode(plan, tiny.weights_with(script, target=state), 3)
    assert found == answers
    assert stats.tau > 2
    assert stats.draft_experts == 0


def test_tokens_of_a_method_that_decides_whether_to_draft() -> None:
    """Through the front door; steps that draft are counted, under a loop of their own."""
    decoder = Decoder(nnx.merge(*_target()), nnx.merge(*_mtp()), eos_ids=())
    result = decoder.generate(
        PROMPTS, method="rate-oracle", spec=SPEC, seed=5, max_new_tokens=NEW_TOKENS, ignore_eos=True, batch_size=3
    )
    assert [generation.tokens for generation in result.generations] == plain_answers(GREEDY)
    assert 0 < result.stats.draft_experts <= SPEC.depth * result.stats.verifications * CONFIG.num_experts


def test_padding_reads_none_of_the_modules_experts() -> None:
    """A prompt alone, and with two sequences that are none."""
    alone, padded = (_decode(*_plan(GREEDY), 1, size) for size in (1, 3))
    assert alone[0] == padded[0] == plain_answers(GREEDY)[:1]
    assert alone[1].draft_experts == padded[1].draft_experts > 0
    assert alone[1].distinct_by_layer == padded[1].distinct_by_layer


def test_caches_equal_a_fresh_prefill_after_each_step() -> None:
    """Latents and shared keys of target and module, while rows move and a batch mate is finished."""
    plan, weights = _plan(PLAIN)
    limits = [len(start) + NEW_TOKENS for start in PROMPTS]
    limits[1] -= 9
    program = tiny.compiled(plan)
    state, moved = tiny.prefilled(program, weights, limits=limits), 0
    while not state.finished_B.all():
        seen = observe(plan, weights, state)
        going, before = ~np.asarray(state.finished_B), np.asarray(state.length_B)
        state = seen.after
        length = np.asarray(state.length_B)
        moved += int((length - before)[going].max() > 1)
        committed = [np.asarray(state.tokens_BS)[b, : length[b]].tolist() for b in range(3)]
        fresh = tiny.prefilled(program, weights, committed, limits=[CAPACITY] * 3)
        assert_caches_equal(state.target_cache, fresh.target_cache, length)
        assert_caches_equal(state.draft_cache, fresh.draft_cache, length - np.asarray(state.pending_count_B))
        np.testing.assert_array_equal(state.last_BLW, fresh.last_BLW)
        last = np.asarray(state.pending_count_B) - 1
        np.testing.assert_allclose(
            np.asarray(state.pending_features_BPF)[np.arange(3), last], fresh.pending_features_BPF[:, 0], atol=1e-5
        )
    assert (length < BUCKET).all()
    assert moved > 3
    for b, answer in enumerate(plain_answers(PLAIN)):
        assert committed[b][len(PROMPTS[b]) :] == list(answer[: limits[b] - 1 - len(PROMPTS[b])])


_draft = jax.jit(decoding.draft, static_argnums=0)


def _drafted_experts(state: DecodeState) -> tuple[int, list[np.ndarray]]:
    """What drafting from a state adds to the count, and the experts of each pass, `[batch, rows, k]`."""
    plan, weights = _plan(PLAIN, listening=True)
    _Listening.heard.clear()
    _, after = _draft(plan, weights, state)
    jax.effects_barrier()
    batch = len(PROMPTS)
    added = int(after.draft_cache.experts_read) - int(state.draft_cache.experts_read)
    return added, [ids_TK.reshape(batch, -1, ROUTING.k) for ids_TK in _Listening.heard]


@pytest.mark.parametrize("finished", [[], [1], [0, 2], [0, 1, 2]], ids=str)
def test_the_modules_own_experts_are_counted(finished: list[int]) -> None:
    """Pass by pass, over the rows of sequences that are not finished; prefill is not counted."""
    plan, weights = _plan(PLAIN)
    program = tiny.compiled(plan)
    state = tiny.prefilled(program, weights, limits=[CAPACITY] * 3)
    assert int(state.draft_cache.experts_read) == 0
    while len(set(np.asarray(state.pending_count_B).tolist())) < 2:
        state = program.decode_steps(weights, state, jnp.int32(1))
    pending_B = np.asarray(state.pending_count_B)
    state.finished_B = jnp.asarray([b in finished for b in range(3)])
    added, passes = _drafted_experts(state)
    assert [ids_BRK.shape[1] for ids_BRK in passes] == [SPEC.max_emitted, SPEC.branch, SPEC.branch]
    expected = 0
    for index, ids_BRK in enumerate(passes):
        rows = {b: pending_B[b] if index == 0 else SPEC.branch for b in range(3) if b not in finished}
        expected += len({int(e) for b, count in rows.items() for e in ids_BRK[b, :count].ravel()})
    assert added == expected
    assert (expected == 0) == (len(finished) == 3)


def test_layer_0_of_a_label_is_the_first_layer_with_experts() -> None:
    """Decoder layers 1 and 2 are made to choose experts of their own."""
    graph, state = _target()
    model = nnx.clone(nnx.merge(graph, state))
    chosen = {1: [0, 2, 5], 2: [1, 4, 7]}
    for layer, experts in chosen.items():
        bias = np.zeros(CONFIG.num_experts, np.float32)
        bias[experts] = 100
        model.layers[layer].moe.router.bias.set_value(jnp.asarray(bias))
    plan = StepPlan(graph, None, likelihood, tiny.PLAIN, PLAIN, ())
    last_BLW = tiny.prefilled(tiny.compiled(plan), Weights(nnx.state(model), None)).last_BLW
    assert last_BLW.shape == (3, ROUTING.layers, 1)
    for b in range(3):
        assert sets_of(last_BLW[b]) == {(layer - 1, expert) for layer in chosen for expert in chosen[layer]}
