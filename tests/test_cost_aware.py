"""Cost-aware selection against sets in plain Python, and what must hold for any tree (docs/formats.md F.21)."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ecospec_jax import expert_bits
from ecospec_jax.config import SpecConfig
from ecospec_jax.errors import UserError
from ecospec_jax.selection import ExpertForecast, cost_aware, new_experts, path_sets
from ecospec_jax.tree import ROOT, CandidateTree, build_tree
from tests.tiny import quick_compilation
from tests.tiny_predictors import sets_of

__all__ = ["quick_compilation"]
BATCH, NODES, LAYERS, EXPERTS, K = 3, 10, 2, 40, 3
Experts = frozenset[tuple[int, int]]
TINY = float(np.finfo(np.float32).tiny)
exp = jax.jit(jnp.exp)


@dataclass
class Sequence:
    """One sequence's candidates: parents (of non-decreasing depth, `ROOT` on the first level) and expert ids."""

    parents: np.ndarray  # [N]
    log_probs: np.ndarray  # [N], cumulative
    nodes: np.ndarray  # [N, L, K]
    root: np.ndarray  # [L, K]
    buffer: np.ndarray  # [L, any]

    def path(self, node: int) -> list[int]:
        return [] if node == ROOT else [*self.path(self.parents[node]), node]

    def path_experts(self, node: int) -> Experts:
        return ids_of(np.concatenate([self.nodes[step] for step in self.path(node)], axis=-1))


def ids_of(ids: np.ndarray) -> Experts:
    return frozenset((layer, int(e)) for layer, row in enumerate(ids) for e in row if 0 <= e < EXPERTS)


def draw_sequence(random: np.random.Generator, universe: int, edges: list[float], buffer: str) -> Sequence:
    parents = np.sort([random.integers(ROOT, i) for i in range(NODES)])
    log_probs = random.choice(edges, NODES)
    for node, parent in enumerate(parents):
        log_probs[node] += 0.0 if parent == ROOT else log_probs[parent]
    experts = random.choice(EXPERTS, universe, replace=False)
    nodes, root = random.choice(experts, (NODES, LAYERS, K)), random.choice(experts, (LAYERS, K))
    previous = random.choice(experts, (LAYERS, 4 * K))
    buffers = {"empty": np.zeros((LAYERS, 0), int), "root": root, "previous": previous}
    return Sequence(parents, log_probs.astype(np.float32), nodes, root, buffers[buffer])


def dead(sequence: Sequence) -> Sequence:
    """What a finished sequence looks like: nothing predicted, no buffer, and log-probabilities that mean nothing."""
    none = np.full((NODES, LAYERS, K), EXPERTS)
    odd = np.where(np.arange(NODES) % 3 == 0, np.nan, sequence.log_probs).astype(np.float32)
    return Sequence(sequence.parents, odd, none, none[0], none[0])


def tree_of(sequences: list[Sequence]) -> CandidateTree:
    parents = jnp.asarray(np.stack([s.parents for s in sequences]), jnp.int32)
    log_probs = jnp.asarray(np.stack([s.log_probs for s in sequences]))
    return build_tree(jnp.zeros_like(parents), parents, jnp.ones(NODES, jnp.int32), log_probs)


def forecast_of(sequences: list[Sequence]) -> ExpertForecast:
    def bits(ids: list[np.ndarray]) -> jax.Array:
        width = max(i.shape[-1] for i in ids)
        padded = [np.pad(i, [(0, 0)] * (i.ndim - 1) + [(0, width - i.shape[-1])], constant_values=-1) for i in ids]
        return expert_bits.from_ids(jnp.asarray(np.stack(padded), jnp.int32), EXPERTS)

    root, nodes = bits([s.root for s in sequences]), bits([s.nodes for s in sequences])
    return ExpertForecast(root, nodes, bits([s.buffer for s in sequences]))


@cache
def compiled(spec: SpecConfig):
    return jax.jit(lambda tree, forecast: cost_aware(tree, forecast, spec))


def select(sequences: list[Sequence], spec: SpecConfig) -> list[list[int]]:
    """What the policy chooses, checked for form: ascending nodes in range, as many as it says."""
    selection = compiled(spec)(tree_of(sequences), forecast_of(sequences))
    nodes_BM, count_B = np.asarray(selection.nodes_BM), np.asarray(selection.count_B)
    assert nodes_BM.shape == (len(sequences), spec.budget)
    assert ((nodes_BM >= 0) & (nodes_BM < NODES)).all()
    chosen = [row[:count].tolist() for row, count in zip(nodes_BM, count_B, strict=True)]
    assert all(row == sorted(set(row)) for row in chosen)
    return chosen


def added(experts: Experts, buffer: Experts, device_experts: int | None) -> int:
    """How many experts are new; of the busiest device in each layer, if devices have so many."""
    if device_experts is None:
        return len(experts - buffer)

    def busiest(pairs: Experts) -> int:
        return sum(
            max(Counter(e // device_experts for at, e in pairs if at == layer).values(), default=0)
            for layer in range(LAYERS)
        )

    return busiest(experts | buffer) - busiest(buffer)


def brute_force(sequences: list[Sequence], spec: SpecConfig) -> list[list[int]]:
    """The rule of docs/design.md section 3 with Python sets; knows nothing of parents but paths.

    Scores are float32 in the order of operations that the formula names, so that equal scores are equal here too.
    """
    chosen: list[list[int]] = [[] for _ in sequences]
    probability = [np.asarray(exp(s.log_probs)) for s in sequences]
    groups = [range(len(sequences))] if spec.shared_buffer else [[i] for i in range(len(sequences))]
    for group in groups:
        buffer = frozenset().union(*(ids_of(sequences[i].buffer) for i in group))
        while True:
            best, best_score = None, None
            for i, node in itertools.product(group, range(NODES)):
                if node in chosen[i] or len(chosen[i]) == spec.budget:
                    continue
                cost = added(sequences[i].path_experts(node), buffer, spec.device_experts)
                score = probability[i][node] / (np.float32(cost) + np.float32(max(spec.eps, TINY)))
                if best_score is None or score > best_score:  # ties: the lower index, which is not deeper
                    best, best_score = (i, node), score
            if best is None:
                break
            chosen[best[0]].append(best[1])
            buffer |= sequences[best[0]].path_experts(best[1])
    return [sorted(nodes) for nodes in chosen]


SPECS = [
    SpecConfig(budget=4, eps=1.0),
    SpecConfig(budget=1, eps=0.25),
    SpecConfig(budget=7, eps=16.0),
    SpecConfig(budget=4, eps=1e-30),
    SpecConfig(budget=10, eps=1e6),
    SpecConfig(budget=4, eps=1.0, shared_buffer=True),
    SpecConfig(budget=1, eps=1e-30, shared_buffer=True),
    SpecConfig(budget=7, eps=0.25, shared_buffer=True),
    SpecConfig(budget=4, eps=1.0, device_experts=10),
    SpecConfig(budget=7, eps=0.25, shared_buffer=True, device_experts=5),
]
BUFFERS = ["empty", "root", "previous"]
EDGES = [[0.0, -0.25, -0.5], [0.0, -1.0, -3.0, -7.0], [-0.7, -2.1, -2.8, -0.1]]


@st.composite
def batches(draw) -> list[Sequence]:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    universe, edges = draw(st.sampled_from([3, 6, 40])), draw(st.sampled_from(EDGES))
    return [draw_sequence(random, universe, edges, draw(st.sampled_from(BUFFERS))) for _ in range(BATCH)]


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"budget {s.budget}, eps {s.eps}, shared {s.shared_buffer}, device {s.device_experts}"
)
@settings(deadline=None, max_examples=40)
@given(sequences=batches())
def test_equals_brute_force(spec: SpecConfig, sequences: list[Sequence]) -> None:
    """The very same nodes; they are prefix-closed and within the budget."""
    chosen = select(sequences, spec)
    assert chosen == brute_force(sequences, spec)
    for nodes, sequence in zip(chosen, sequences, strict=True):
        assert len(nodes) == spec.budget
        assert all(sequence.parents[node] in (ROOT, *nodes) for node in nodes)


@settings(deadline=None, max_examples=40)
@given(sequences=batches(), finished=st.integers(0, BATCH - 1), spec=st.sampled_from([SPECS[0], SPECS[5], SPECS[7]]))
def test_finished_sequences_change_nothing(sequences: list[Sequence], finished: int, spec: SpecConfig) -> None:
    """The live ones choose as if the finished one were not there."""
    live = [s for i, s in enumerate(sequences) if i != finished]
    batch = [dead(s) if i == finished else s for i, s in enumerate(sequences)]
    chosen = select(batch, spec)
    del chosen[finished]
    assert chosen == brute_force(live, spec)


@settings(deadline=None, max_examples=40)
@given(sequences=batches())
@example(sequences=[draw_sequence(np.random.default_rng(0), 3, [0.0], "root")] * BATCH)
def test_path_sets_and_new_experts(sequences: list[Sequence]) -> None:
    """A path holds its nodes' experts, not the root's; marginal counts are those of sets."""
    forecast = forecast_of(sequences)
    path_BNLW = path_sets(tree_of(sequences), forecast)
    for b, sequence in enumerate(sequences):
        cost_N = np.asarray(new_experts(path_BNLW[b : b + 1], forecast.buffer_BLW[b]))[0]
        for node in range(NODES):
            experts = sequence.path_experts(node)
            assert sets_of(path_BNLW[b, node]) == experts
            assert cost_N[node] == len(experts - ids_of(sequence.buffer))


def chain_free(nodes: np.ndarray, log_probs: list[float], **options: np.ndarray) -> Sequence:
    """Ten children of the root; those not given are unlikely and use experts of their own."""
    rest = NODES - len(nodes)
    others = np.stack([np.full((LAYERS, K), 20 + i) for i in range(rest)])
    probabilities = np.array([*log_probs, *[-60.0] * rest], np.float32)
    fields = {"root": np.zeros((LAYERS, K), int), "buffer": np.zeros((LAYERS, 0), int)} | options
    return Sequence(np.full(NODES, ROOT), probabilities, np.concatenate([nodes, others]), **fields)


def experts(*ids: int) -> np.ndarray:
    return np.broadcast_to(ids, (LAYERS, K))


def test_second_sibling_with_the_same_experts_is_free() -> None:
    """It costs 0 once the first is chosen, so it comes before a likelier node that costs something."""
    nodes = np.stack([experts(1, 2, 3), experts(4, 5, 6), experts(1, 2, 3)])
    sequence = chain_free(nodes, [-0.5, -0.6, -3.0])
    assert select([sequence] * BATCH, SpecConfig(budget=1, eps=0.25)) == [[0]] * BATCH
    # 0 first; then exp(-3) / 0.25 = 0.20 against exp(-0.6) / 6.25 = 0.09.
    assert select([sequence] * BATCH, SpecConfig(budget=2, eps=0.25)) == [[0, 2]] * BATCH
    # With eps 4 the second sibling has 0.01 against 0.05.
    assert select([sequence] * BATCH, SpecConfig(budget=2, eps=4.0)) == [[0, 1]] * BATCH


def test_experts_of_an_idle_device_are_free() -> None:
    """Of two devices with 20 experts each the first has three to read anyway; the second may as well read three."""
    nodes = np.stack([experts(4, 5, 6), experts(20, 21, 22)])
    sequence = chain_free(nodes, [-0.5, -2.0], buffer=experts(1, 2, 3))
    spec = SpecConfig(budget=1, eps=0.25)
    assert select([sequence] * BATCH, spec) == [[0]] * BATCH
    assert select([sequence] * BATCH, replace(spec, device_experts=20)) == [[1]] * BATCH


def test_root_experts_are_not_new_when_the_buffer_holds_them() -> None:
    nodes = np.stack([experts(4, 5, 6), experts(1, 2, 3)])
    sequence = chain_free(nodes, [-0.5, -2.0], root=experts(1, 2, 3))
    spec = SpecConfig(budget=1, eps=0.25)
    assert select([sequence] * BATCH, spec) == [[0]] * BATCH
    assert select([replace(sequence, buffer=sequence.root)] * BATCH, spec) == [[1]] * BATCH


def test_shared_buffer_lets_one_sequence_pay_for_another() -> None:
    """The first sequence's best node comes first in the batch; then the second's node of the same experts is free."""
    first = chain_free(np.stack([experts(1, 2, 3)]), [-0.1])
    second = chain_free(np.stack([experts(4, 5, 6), experts(1, 2, 3)]), [-0.5, -2.0])
    spec = SpecConfig(budget=1, eps=0.25)
    assert select([first, second, second], spec) == [[0], [0], [0]]
    assert select([first, second, second], replace(spec, shared_buffer=True)) == [[0], [1], [1]]


def test_ties_go_to_the_lower_index_and_the_earlier_sequence() -> None:
    same = np.stack([experts(i, i, i) for i in range(NODES)])
    tied = Sequence(np.full(NODES, ROOT), np.zeros(NODES, np.float32), same, experts(39, 39, 39), same[0][:, :0])
    assert select([tied] * BATCH, SpecConfig(budget=4)) == [[0, 1, 2, 3]] * BATCH
    # Sequence 0 takes node 0, which makes node 0 free in all; so they all take it, then node 1.
    assert select([tied] * BATCH, SpecConfig(budget=2, shared_buffer=True)) == [[0, 1]] * BATCH
    # A chain of equal scores is taken from the top.
    chain = replace(tied, parents=np.arange(NODES) - 1, nodes=np.broadcast_to(experts(1, 2, 3), same.shape))
    assert select([chain] * BATCH, SpecConfig(budget=3, eps=1e-30)) == [[0, 1, 2]] * BATCH


@pytest.mark.parametrize("eps", [1e-300, 1e-38])
@pytest.mark.parametrize("shared", [False, True])
def test_tiny_eps_neither_overflows_nor_divides_by_zero(eps: float, shared: bool) -> None:
    """Of free nodes the likeliest is first, whatever eps; one whose probability is 0 in float32 is worth nothing."""
    free = chain_free(np.stack([experts(1, 2, 3)] * 4), [-200.0, -3.0, -2.0, -1.0], buffer=experts(1, 2, 3))
    for budget, expected in ((1, [3]), (4, [1, 2, 3, 4])):
        spec = SpecConfig(budget=budget, eps=eps, shared_buffer=shared)
        assert select([free] * BATCH, spec) == [expected] * BATCH == brute_force([free] * BATCH, spec)


def test_log_probabilities_that_are_no_numbers_keep_the_set_closed() -> None:
    """A broken drafter costs speed only: the set stays a valid one."""
    random = np.random.default_rng(0)
    for _ in range(20):
        batch = [draw_sequence(random, 6, EDGES[0], "root") for _ in range(BATCH)]
        odd = random.choice([0, np.nan, -np.inf, np.inf], (BATCH, NODES)).astype(np.float32)
        batch = [replace(s, log_probs=s.log_probs + row) for s, row in zip(batch, odd, strict=True)]
        for spec in (SPECS[0], SPECS[5]):
            for nodes, sequence in zip(select(batch, spec), batch, strict=True):
                assert len(nodes) == spec.budget
                assert all(sequence.parents[node] in (ROOT, *nodes) for node in nodes)


def test_budget_zero_chooses_nothing() -> None:
    batch = [draw_sequence(np.random.default_rng(1), 6, EDGES[0], "root")] * BATCH
    for shared in (False, True):
        assert select(batch, SpecConfig(budget=0, shared_buffer=shared)) == [[]] * BATCH


def test_device_experts_must_be_positive() -> None:
    with pytest.raises(UserError, match="^device_experts must be at least 1, not 0"):
        SpecConfig(device_experts=0)


@pytest.mark.parametrize("eps", [0, 0.0, -1.0, float("nan")])
def test_eps_must_be_positive(eps: float) -> None:
    with pytest.raises(UserError, match="^eps must be positive"):
        SpecConfig(eps=eps)


def test_unknown_buffer_is_refused() -> None:
    with pytest.raises(UserError, match="unknown expert buffer 'next'"):
        SpecConfig(buffer="next")  # pyright: ignore[reportArgumentType]


def test_needs_a_forecast() -> None:
    with pytest.raises(ValueError, match="needs an expert predictor"):
        cost_aware(tree_of([draw_sequence(np.random.default_rng(2), 6, EDGES[0], "root")]), None, SpecConfig())
