"""Layers with a window that keep a ring of slots: the ring against plain bookkeeping, and decoding with it."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder, Method
from ecospec_jax.cache import KVCache, Rows, commit_path, empty_cache
from ecospec_jax.checkpoint import parameters
from ecospec_jax.config import SamplingConfig, SpecConfig
from ecospec_jax.models.gpt_oss import GptOss
from ecospec_jax.selection import cost_aware
from tests import tiny
from tests.tiny import BUCKET, CAPACITY, PROMPTS, SAMPLINGS, quick_compilation

__all__ = ["quick_compilation"]

NEW_TOKENS = 26
CONFIG = tiny.GPT_OSS
WINDOW = CONFIG.sliding_window


@cache
def split_target() -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(tiny.randomised(lambda: GptOss(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=4))


def program_of(method: str, sampling: SamplingConfig, spec: SpecConfig = SpecConfig()):
    return tiny.make_program(method, spec, sampling, target=split_target()[0])


@cache
def plain_answers(sampling: SamplingConfig) -> list[tuple[int, ...]]:
    weights = tiny.plain_weights(split_target()[1])
    return tiny.tokens_of(tiny.decode(program_of("ar", sampling), weights, max_new_tokens=NEW_TOKENS)[0])


def whole_forward(texts: list[list[int]]) -> tuple[np.ndarray, KVCache]:
    """Logits and caches of whole texts in one pass that keeps everything."""
    tokens = np.zeros((len(texts), CAPACITY), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    shape = tokens.shape

    def run(state: nnx.State) -> tuple[jax.Array, KVCache]:
        module = nnx.merge(split_target()[0], state)
        rows = Rows(
            tokens_BR=jnp.asarray(tokens),
            positions_BR=jnp.broadcast_to(jnp.arange(CAPACITY), shape),
            live_BR=jnp.ones(shape, bool),
            context_B=jnp.zeros(shape[0], jnp.int32),
            mask_BRW=jnp.broadcast_to(jnp.tril(jnp.ones((CAPACITY, CAPACITY), bool)), (*shape, CAPACITY)),
        )
        output, kept = module(rows, module.empty_cache(shape[0], CAPACITY), ())
        return module.logits(output.hidden_BRD), kept

    logits, kept = jax.jit(run)(split_target()[1])
    return np.asarray(logits), kept


def test_plain_decoding_with_rings_equals_whole_passes() -> None:
    """Each token is the likeliest of one pass over the whole text so far; the text is many windows long."""
    answers = plain_answers(SAMPLINGS["greedy"])
    texts = [start + list(answer) for start, answer in zip(PROMPTS, answers, strict=True)]
    logits, _ = whole_forward(texts)
    for sequence, (start, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        places = len(start) - 1 + np.arange(NEW_TOKENS)
        assert tuple(logits[sequence, places].argmax(-1)) == answer
    assert NEW_TOKENS > 5 * WINDOW and len({token for answer in answers for token in answer}) > 8


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("spec", [SpecConfig(), SpecConfig(depth=4, branch=3, budget=11)], ids=["small", "large"])
@pytest.mark.parametrize("right", [0.9, 0.0], ids=["good drafts", "bad drafts"])
def test_speculative_tokens_equal_plain_ones(name: str, spec: SpecConfig, right: float) -> None:
    """Trees that cross the window's edge, some wider than the window itself."""
    answers = plain_answers(SAMPLINGS[name])
    script = tiny.answers_script(PROMPTS, answers, right=right, first=0.6)
    weights = tiny.weights_with(script, target=split_target()[1])
    generations, stats = tiny.decode(
        program_of("likelihood", SAMPLINGS[name], spec), weights, max_new_tokens=NEW_TOKENS
    )
    assert tiny.tokens_of(generations) == answers
    assert stats.tau > 1.8 if right else stats.tau < 1.6


def test_rings_hold_what_a_whole_cache_would() -> None:
    """After each step, the last window of every sliding layer, bit for bit up to rounding."""
    answers = plain_answers(SAMPLINGS["greedy"])
    script = tiny.answers_script(PROMPTS, answers, right=0.9, first=0.6)
    plan = tiny.make_plan("likelihood", target=split_target()[0])
    weights = tiny.weights_with(script, target=split_target()[1])
    state = tiny.prefilled(tiny.compiled(plan), weights, limits=[BUCKET] * 3)
    _, whole = whole_forward([start + list(answer) for start, answer in zip(PROMPTS, answers, strict=True)])
    for _ in range(4):
        state = tiny.observer(plan)(weights, state).after
        for layer, keys in enumerate(state.target_cache.keys):
            ring = keys.shape[2]
            assert ring == (WINDOW + 5 if layer in CONFIG.sliding_layers else CAPACITY)
            for sequence, length in enumerate(np.asarray(state.length_B)):
                slots = np.arange(max(0, length - WINDOW + 1), length)
                for mine, theirs in (
                    (keys, whole.keys[layer]),
                    (state.target_cache.values[layer], whole.values[layer]),
                ):
                    np.testing.assert_allclose(
                        mine[sequence][:, slots % ring], theirs[sequence][:, slots], rtol=2e-5, atol=2e-5
                    )


@pytest.mark.parametrize("seed", range(6))
def test_a_ring_against_bookkeeping_by_hand(seed: int) -> None:
    """A random prefill, longer or shorter than the ring, then random trees of which random paths are committed."""
    random = np.random.default_rng(seed)
    rows, window, batch, capacity = 5, 3, 2, 90
    ring = window + rows
    cache = empty_cache([((1, 1), (1, 1))] * 2, slots=[ring, capacity], batch=batch, dtype=jnp.float32)
    held: list[list[float]] = [[] for _ in range(batch)]  # the committed tokens' values, in order
    value = iter(range(1, 10_000))

    def one_pass(count: int, live_BR: np.ndarray, mask_BRR: np.ndarray, positions_BR: np.ndarray) -> np.ndarray:
        nonlocal cache
        context = np.array([len(sequence) for sequence in held])
        block = Rows(
            tokens_BR=jnp.zeros((batch, count), jnp.int32),
            positions_BR=jnp.asarray(positions_BR),
            live_BR=jnp.asarray(live_BR),
            context_B=jnp.asarray(context),
            mask_BRW=jnp.asarray(mask_BRR),
        )
        new = np.array([[next(value) for _ in range(count)] for _ in range(batch)], np.float32)
        slots = block.ring(ring, window)
        kept, shown = slots.store(cache.keys[0], jnp.asarray(new)[:, None, :, None])
        full, _ = block.slots(capacity).store(cache.keys[1], jnp.asarray(new)[:, None, :, None])
        for sequence in range(batch):
            for row in np.flatnonzero(live_BR[sequence]):
                visible = np.asarray(shown[sequence, 0, :, 0])[np.asarray(slots.visible_BRS[sequence, row])]
                first = positions_BR[sequence, row] - window + 1
                expected = held[sequence][max(0, first) :]
                seen = mask_BRR[sequence, row] & (positions_BR[sequence] >= first)
                expected = expected + [v for v, m in zip(new[sequence], seen, strict=True) if m]
                assert sorted(visible) == sorted(expected)
        cache = KVCache([kept, full], [kept, full])
        return new

    longest = int(random.choice([3, ring, 2 * ring + 3]))
    lengths = random.integers(1, longest + 1, batch)
    causal = np.broadcast_to(np.tril(np.ones((longest, longest), bool)), (batch, longest, longest))
    new = one_pass(longest, np.arange(longest) < lengths[:, None], causal, np.tile(np.arange(longest), (batch, 1)))
    for sequence in range(batch):
        held[sequence] += new[sequence, : lengths[sequence]].tolist()
    for _ in range(8):
        parents = [[-1] + [int(random.integers(0, row)) for row in range(1, rows)] for _ in range(batch)]
        paths = [[_path(tree, row) for row in range(rows)] for tree in parents]
        mask = np.array([[[other in path for other in range(rows)] for path in tree] for tree in paths])
        depths = np.array([[len(path) - 1 for path in tree] for tree in paths])
        context = np.array([len(sequence) for sequence in held])
        new = one_pass(rows, np.ones((batch, rows), bool), mask, context[:, None] + depths)
        accepted = [tree[int(random.integers(0, rows))] for tree in paths]
        padded = [path + [int(random.integers(0, rows))] * (rows - len(path)) for path in accepted]
        cache = jax.jit(commit_path)(cache, jnp.asarray(context), jnp.asarray(padded))
        for sequence, path in enumerate(accepted):
            held[sequence] += new[sequence, path].tolist()
            length = len(held[sequence])
            slots = np.arange(max(0, length - window + 1), length)
            assert np.asarray(cache.keys[0][sequence, 0, slots % ring, 0]).tolist() == [
                held[sequence][i] for i in slots
            ]
            assert np.asarray(cache.keys[1][sequence, 0, :length, 0]).tolist() == held[sequence]


def _path(parents: list[int], row: int) -> list[int]:
    return ([] if parents[row] < 0 else _path(parents, parents[row])) + [row]


def test_a_finished_sequence_leaves_its_ring_alone() -> None:
    """Rows that are dead throughout are written nowhere."""
    block = Rows(
        tokens_BR=jnp.zeros((2, 3), jnp.int32),
        positions_BR=jnp.asarray([[7, 8, 9], [7, 8, 9]]),
        live_BR=jnp.asarray([[False] * 3, [True, True, False]]),
        context_B=jnp.asarray([7, 7]),
        mask_BRW=jnp.ones((2, 3, 3), bool),
    )
    before = jnp.arange(12.0).reshape(2, 1, 6, 1)
    after, _ = block.ring(6, 3).store(before, jnp.full((2, 1, 3, 1), -1.0))
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(np.flatnonzero(after[1, 0, :, 0] == -1), [1, 2])  # slots 7 and 8 modulo 6


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["processed"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("storage", ["plain", "mxfp4"])
def test_all_methods_give_the_same_tokens(storage: str, sampling: SamplingConfig) -> None:
    """With and without an expert forecast; experts kept in four bits as well."""
    config = replace(CONFIG, hidden_size=32, moe_intermediate_size=64, expert_storage=storage)
    head = replace(tiny.DRAFTER, target_hidden_size=32, own_embedding=True, boundaries=(1, 3))
    target = tiny.randomised(lambda: GptOss(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed=6)
    if storage == "mxfp4":
        random = np.random.default_rng(8)
        for path, variable in parameters(target).items():
            if path.endswith("blocks"):
                variable.set_value(jnp.asarray(random.integers(0, 256, variable.get_value().shape), jnp.uint8))
            elif path.endswith("scales"):
                variable.set_value(jnp.asarray(random.integers(122, 126, variable.get_value().shape), jnp.uint8))
    decoder = Decoder(target, tiny.make_drafter(head), eos_ids=())
    informed = [Method(name, policy=cost_aware, predictor=name) for name in ("previous", "oracle")]
    answers = {
        str(method): decoder.generate(
            PROMPTS, method=method, spec=SpecConfig(), sampling=sampling, max_new_tokens=24, batch_size=3
        )
        for method in ("ar", "likelihood", *informed)
    }
    expected = tiny.tokens_of(answers["ar"].generations)
    assert len({token for answer in expected for token in answer}) > 8
    for name, result in answers.items():
        assert tiny.tokens_of(result.generations) == expected, name
