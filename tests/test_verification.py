"""From logits to tokens and from tokens to the accepted path: the output law is the target's, exactly."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ecospec_jax.cache import Rows
from ecospec_jax.config import SamplingConfig, SpecConfig
from ecospec_jax.decoding import StepPlan, Weights
from ecospec_jax.program import Program
from ecospec_jax.selection import likelihood
from ecospec_jax.tree import ROOT, Selection, VerifyTree, build_tree, verify_tree
from ecospec_jax.verification import accept_path, draw_tokens, processed_logits, sequence_keys
from tests import tiny
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]
VOCAB = 5
PROCESSED = SamplingConfig(temperature=0.7, top_k=4, top_p=0.93)


# ---------------------------------------------------------------------------------------------------------------------
# The distribution that tokens are drawn from


def transformers_logits(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(torch.zeros((len(logits), 1), dtype=torch.long), torch.tensor(logits)).numpy()


@pytest.mark.parametrize("top_k", [0, 1, 3, 20, 50, 51, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6, 0.999])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_processed_logits_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    sampling = SamplingConfig(temperature, top_k, top_p)
    logits = np.random.default_rng(1).normal(size=(40, 50)).astype(np.float32) * 3
    ours, reference = np.asarray(processed_logits(jnp.asarray(logits), sampling)), transformers_logits(logits, sampling)
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(reference))
    assert (np.isfinite(ours).sum(axis=1) >= 1).all()
    kept = np.isfinite(ours)
    np.testing.assert_allclose(ours[kept], reference[kept], rtol=1e-6)


def test_order_is_temperature_then_top_k_then_top_p() -> None:
    """A case in which every other order keeps another set."""
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.07, 0.03]], np.float32))
    # After T = 2 and top-2 the first two have 0.54 and 0.46, so top-p 0.5 keeps one.
    kept = np.isfinite(processed_logits(jnp.asarray(logits), SamplingConfig(2.0, 2, 0.5)))
    assert kept.tolist() == [[True, False, False, False, False]]
    # Top-p alone: T = 2 flattens, so more are needed; before the temperature two would do.
    kept = np.isfinite(processed_logits(jnp.asarray(logits), SamplingConfig(2.0, 0, 0.69)))
    assert kept.tolist() == [[True, True, True, False, False]]


def test_ties_with_the_last_one_kept_are_kept() -> None:
    logits = jnp.array([[1.0, 3.0, 1.0, 1.0, -2.0]])
    assert np.isfinite(processed_logits(logits, SamplingConfig(1.0, top_k=2))).tolist() == [[True] * 4 + [False]]
    assert np.isfinite(processed_logits(logits, SamplingConfig(1.0, top_p=0.75))).tolist() == [[True] * 4 + [False]]


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of observed counts; rare outcomes are pooled, and nothing may fall where the probability is 0."""
    assert counts[law == 0].sum() == 0
    expected = counts.sum() * law / law.sum()
    rare = (expected < 5) & (law > 0)
    pooled = [(counts[rare].sum(), expected[rare].sum())] if rare.any() else []
    observed, expected = zip(*pooled, *zip(counts[expected >= 5], expected[expected >= 5], strict=True), strict=True)
    return scipy.stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize("sampling", [SamplingConfig(1.0), PROCESSED], ids=str)
def test_draws_follow_the_processed_distribution(sampling: SamplingConfig) -> None:
    """Frequencies over 20,000 sequences; draws at different positions, and of different sequences, are independent."""
    keys = sequence_keys(jnp.full(20_000, 3), jnp.arange(20_000))
    logits = jnp.array([[0.3, -1.0, 1.2, 0.5, -0.4], [2.0, 0.1, 0.0, -0.5, 0.4], [0.3, -1.0, 1.2, 0.5, -0.4]])
    positions = jnp.broadcast_to(jnp.array([17, 18, 19]), (20_000, 3))
    drawn = np.asarray(draw_tokens(jnp.broadcast_to(logits, (20_000, 3, VOCAB)), positions, keys, sampling))
    law = np.asarray(jax.nn.softmax(processed_logits(logits, sampling), axis=-1), np.float64)
    law /= law.sum(axis=1, keepdims=True)
    for row in range(3):
        assert chi_square_p(np.bincount(drawn[:, row], minlength=VOCAB), law[row]) > 1e-3
    pairs = [(drawn[:, 0], drawn[:, 1], law[0], law[1]), (drawn[:, 0], drawn[:, 2], law[0], law[2])]
    pairs.append((drawn[:-1, 0], drawn[1:, 0], law[0], law[0]))
    for first, second, first_law, second_law in pairs:
        counts = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
        assert chi_square_p(counts, np.outer(first_law, second_law).ravel()) > 1e-3


def test_a_draw_depends_on_seed_sequence_position_and_logits_only() -> None:
    """Not on the row, on batch mates or on how many rows there are."""
    random = np.random.default_rng(0)
    logits, positions = jnp.asarray(random.normal(size=(4, 6, VOCAB)), jnp.float32), jnp.arange(6) + 9
    keys = sequence_keys(jnp.array([1, 1, 2, 2]), jnp.array([0, 3, 0, 3]))
    sampling = SamplingConfig(1.0)
    drawn = draw_tokens(logits, jnp.broadcast_to(positions, (4, 6)), keys, sampling)
    for order in ([3, 1], [2, 0, 2]):
        order = np.array(order)
        some = draw_tokens(
            logits[order][:, ::-2], jnp.broadcast_to(positions[::-2], (len(order), 3)), keys[order], sampling
        )
        np.testing.assert_array_equal(some, np.asarray(drawn)[order][:, ::-2])
    same = draw_tokens(jnp.zeros((4, 40, VOCAB)), jnp.broadcast_to(jnp.arange(40), (4, 40)), keys, sampling)
    assert len({tuple(row) for row in np.asarray(same).tolist()}) == 4


def test_greedy_takes_the_first_maximum() -> None:
    logits = jnp.array([[[0.0, 2.0, 2.0, 1.0, -1.0], [-jnp.inf, -1.0, -3.0, -1.0, -jnp.inf]]])
    keys = sequence_keys(jnp.zeros(1, int), jnp.zeros(1, int))
    assert draw_tokens(logits, jnp.zeros((1, 2), int), keys, SamplingConfig()).tolist() == [[1, 1]]


# ---------------------------------------------------------------------------------------------------------------------
# The accepted path

# Node tokens and parents in pool order; `None` is the root.
TREES: dict[str, list[tuple[int, int | None]]] = {
    "root alone": [],
    "chain": [(1, None), (1, 0), (4, 1)],
    "siblings": [(3, None), (0, None), (2, None)],
    "two levels": [(2, None), (4, None), (2, 0), (0, 1)],
    "all below the second": [(0, None), (3, None), (1, 1), (3, 1)],
    "equal tokens": [(2, None), (2, None), (2, 0), (2, 1)],
}


def as_verify_tree(nodes: list[tuple[int, int | None]], batch: int, *, unused: int = 0) -> VerifyTree:
    """All nodes as rows behind 6 committed tokens; the last `unused` lie in slots that are not meant."""
    size = len(nodes)
    parents = [ROOT if parent is None else parent for _, parent in nodes]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    spread = lambda values: jnp.broadcast_to(jnp.array(values, jnp.int32), (batch, len(values)))  # noqa: E731
    tokens = [token for token, _ in nodes]
    tree = build_tree(spread(tokens), spread(parents), jnp.array(depths, jnp.int32), jnp.zeros((batch, size)))
    chosen = Selection(spread(range(size)), jnp.full(batch, size - unused))
    return verify_tree(tree, chosen, jnp.full(batch, 1), jnp.full(batch, 6), jnp.zeros(batch, bool))


def walk(nodes: list[tuple[int, int | None]], drawn: tuple[int, ...]) -> list[int]:
    """What plain decoding emits when the token behind node i is `drawn[i + 1]`: the definition."""
    at, emitted = None, []
    while True:
        token = drawn[0 if at is None else at + 1]
        emitted.append(token)
        child = next((i for i, (own, parent) in enumerate(nodes) if parent == at and own == token), None)
        if child is None:
            return emitted
        at = child


@pytest.mark.parametrize(("name", "unused"), [*((name, 0) for name in TREES), ("siblings", 2), ("two levels", 1)])
def test_path_is_the_coupled_plain_walk_for_every_draw(name: str, unused: int) -> None:
    """All 5^rows assignments of drawn tokens to the rows; what lies in unused slots is never followed."""
    nodes = TREES[name]
    draws = list(itertools.product(range(VOCAB), repeat=len(nodes) + 1))
    tree = as_verify_tree(nodes, len(draws), unused=unused)
    path = jax.tree.map(np.asarray, accept_path(tree, jnp.array(draws, jnp.int32), longest=4))
    nodes = nodes[: len(nodes) - unused]
    for drawn, rows, tokens, count in zip(draws, path.rows_BP, path.tokens_BP, path.count_B, strict=True):
        expected = walk(nodes, drawn)
        assert tokens[:count].tolist() == expected
        assert rows[0] == 0 and (np.diff(rows[:count]) > 0).all()
        assert (rows[count:] == rows[count - 1]).all()
        assert [nodes[row - 1][0] for row in rows[1:count]] == expected[:-1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_path_in_random_trees(data: st.DataObject) -> None:
    """Seven nodes in any shape, equal siblings included; half of the draws try to follow the tree."""
    nodes: list[tuple[int, int | None]] = []
    for index in range(7):
        parent = data.draw(st.sampled_from([None, *range(index)]))
        nodes.append((data.draw(st.integers(0, VOCAB - 1)), parent))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    draws = random.integers(0, VOCAB, (64, 8))
    for row in draws[::2]:
        for at in range(8):
            children = [token for token, parent in nodes if (-1 if parent is None else parent) == at - 1]
            if children:
                row[at] = random.choice(children)
    path = accept_path(as_verify_tree(nodes, 64), jnp.asarray(draws, jnp.int32), longest=8)
    for drawn, tokens, count in zip(draws, np.asarray(path.tokens_BP), np.asarray(path.count_B), strict=True):
        expected = walk(nodes, tuple(drawn.tolist()))
        assert tokens[:count].tolist() == expected


def test_no_path_is_longer_than_asked() -> None:
    nodes = [(1, None), (1, 0), (1, 1)]
    path = accept_path(as_verify_tree(nodes, 1), jnp.ones((1, 4), jnp.int32), longest=3)
    assert path.count_B.tolist() == [3] and path.rows_BP.tolist() == [[0, 1, 2]]


# ---------------------------------------------------------------------------------------------------------------------
# The output law, by enumeration and end to end

SMALL = replace(tiny.TARGET, vocab_size=VOCAB)
PREFIX = [3, 0, 4, 1, 2, 1]  # six committed tokens; the root behind them is token 1, as in `as_verify_tree`


def plain_law(texts: list[list[int]], sampling: SamplingConfig) -> np.ndarray:
    """Probabilities of the token behind each text, each text run by itself from an empty cache."""
    graph, state = nnx.split(tiny.make_target(SMALL))
    longest = max(map(len, texts))
    padded = jnp.array([text + [0] * (longest - len(text)) for text in texts], jnp.int32)

    def run(state: nnx.State) -> jax.Array:
        target = nnx.merge(graph, state)
        rows = Rows(
            tokens_BR=padded,
            positions_BR=jnp.broadcast_to(jnp.arange(longest), padded.shape),
            live_BR=jnp.ones(padded.shape, bool),
            context_B=jnp.zeros(len(texts), jnp.int32),
            mask_BRW=jnp.broadcast_to(jnp.tril(jnp.ones((longest, longest), bool)), (*padded.shape, longest)),
        )
        output, _ = target(rows, target.empty_cache(len(texts), longest), ())
        return target.logits(output.hidden_BRD)

    last = np.array([len(text) - 1 for text in texts])
    return law_of(jax.jit(run)(state)[np.arange(len(texts)), last], sampling)


def law_of(logits: jax.Array, sampling: SamplingConfig) -> np.ndarray:
    kept = np.asarray(processed_logits(logits, sampling), np.float64)
    return scipy.special.softmax(kept, axis=-1)


@pytest.mark.parametrize("sampling", [SamplingConfig(1.0), PROCESSED], ids=str)
@pytest.mark.parametrize("name", ["two levels", "all below the second"])
def test_output_law_by_enumeration(name: str, sampling: SamplingConfig) -> None:
    """Sum over all draws of the verified rows = product of the target's plain conditional laws, for each output."""
    nodes = TREES[name]
    graph, state = nnx.split(tiny.make_target(SMALL))

    def run(state: nnx.State) -> jax.Array:
        target = nnx.merge(graph, state)
        length = len(PREFIX)
        prefix = Rows(
            tokens_BR=jnp.array([PREFIX], jnp.int32),
            positions_BR=jnp.arange(length)[None],
            live_BR=jnp.ones((1, length), bool),
            context_B=jnp.zeros(1, jnp.int32),
            mask_BRW=jnp.tril(jnp.ones((1, length, length), bool)),
        )
        _, cache = target(prefix, target.empty_cache(1, 16), ())
        output, _ = target(as_verify_tree(nodes, 1).rows, cache, ())
        return target.logits(output.hidden_BRD)[0]

    law_RV = law_of(jax.jit(run)(state), sampling)
    draws = np.array(list(itertools.product(range(VOCAB), repeat=len(nodes) + 1)))
    weights = np.prod(law_RV[np.arange(draws.shape[1]), draws], axis=1)
    path = accept_path(as_verify_tree(nodes, len(draws)), jnp.asarray(draws, jnp.int32), longest=3)
    law: dict[tuple[int, ...], float] = {}
    for tokens, count, weight in zip(np.asarray(path.tokens_BP), np.asarray(path.count_B), weights, strict=True):
        output = tuple(tokens[:count].tolist())
        law[output] = law.get(output, 0.0) + weight
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)

    contexts = sorted({output[:j] for output in law for j in range(len(output))})
    laws = plain_law([[*PREFIX, 1, *context] for context in contexts], sampling)
    conditional = dict(zip(contexts, laws, strict=True))
    assert len({len(output) for output in law if law[output] > 0}) >= 2
    for output, probability in law.items():
        expected = np.prod([conditional[output[:j]][token] for j, token in enumerate(output)])
        assert probability == pytest.approx(expected, abs=2e-6)


def test_output_law_end_to_end() -> None:
    """First three tokens of 4,000 speculative answers to one prompt against the enumerated plain law."""
    sequences = 4000
    target = tiny.make_target(SMALL)
    drafter = tiny.make_drafter(replace(tiny.DRAFTER, vocab_size=VOCAB, draft_vocab_size=4))
    (graph, state), (head_graph, head_state) = nnx.split(target), nnx.split(drafter)
    program = Program(StepPlan(graph, head_graph, likelihood, SpecConfig(depth=2, branch=2, budget=4), PROCESSED, ()))
    generations, stats = tiny.decode(
        program,
        Weights(state, head_state),
        [PREFIX] * sequences,
        seeds=[(11, index) for index in range(sequences)],
        max_new_tokens=3,
    )
    assert 1.2 < stats.tau
    counts = np.bincount([a * 25 + b * 5 + c for a, b, c in tiny.tokens_of(generations)], minlength=VOCAB**3)

    contexts = [(), *itertools.product(range(VOCAB)), *itertools.product(range(VOCAB), repeat=2)]
    laws = plain_law([[*PREFIX, *context] for context in contexts], PROCESSED)
    conditional = dict(zip(contexts, laws, strict=True))
    outputs = itertools.product(range(VOCAB), repeat=3)
    law = [np.prod([conditional[output[:j]][token] for j, token in enumerate(output)]) for output in outputs]
    assert chi_square_p(counts, np.array(law)) > 1e-3
