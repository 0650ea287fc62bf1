"""Selection by rate against sets in plain Python: the optimum of one sequence, the greedy choice of a batch."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_jax import expert_bits
from ecospec_jax.config import SpecConfig
from ecospec_jax.cost import CostModel
from ecospec_jax.errors import UserError
from ecospec_jax.rate import MOST_EXHAUSTIVE_NODES, best_set, greedy_set, rate
from ecospec_jax.selection import Economy, ExpertForecast
from ecospec_jax.tree import ROOT, CandidateTree, build_tree
from tests.tiny import quick_compilation

__all__ = ["quick_compilation"]
LAYERS, EXPERTS, K = 2, 40, 3
Pairs = frozenset[tuple[int, int]]
FREE_ROWS = CostModel(fixed=50.0, per_expert=2.0, moe_layers=LAYERS)
COSTS = {"free rows": FREE_ROWS, "rows cost": replace(FREE_ROWS, per_row=3.0)}
RATES = [0.0, 1e-3, 0.01, 0.03, 0.1, 0.3, 1e6]


@dataclass
class Sequence:
    """One sequence's candidates, and the (layer, expert) pairs that are predicted for them."""

    parents: list[int]
    log_probs: list[float]
    nodes: list[Pairs]
    root: Pairs

    def path(self, node: int) -> frozenset[int]:
        return frozenset() if node == ROOT else self.path(self.parents[node]) | {node}


def depths(spec: SpecConfig) -> list[int]:
    return [1] * spec.branch + [level for level in range(2, spec.depth + 1) for _ in range(spec.branch**2)]


def draw(random: np.random.Generator, spec: SpecConfig, universe: int) -> Sequence:
    """As a drafter expands: `branch` nodes of each level have `branch` children each."""
    parents = [ROOT] * spec.branch
    level = list(range(spec.branch))
    for _ in range(spec.depth - 1):
        grown = np.sort(random.choice(level, spec.branch, replace=False)).tolist()
        level = list(range(len(parents), len(parents) + spec.branch**2))
        parents += [parent for parent in grown for _ in range(spec.branch)]
    log_probs: list[float] = []
    for parent in parents:
        log_probs.append(float(-random.exponential(0.7)) + (0.0 if parent == ROOT else log_probs[parent]))
    experts = random.choice(EXPERTS, universe, replace=False)

    def routing() -> Pairs:
        return frozenset((layer, int(e)) for layer in range(LAYERS) for e in random.choice(experts, K, replace=False))

    return Sequence(parents, log_probs, [routing() for _ in parents], routing())


def tree_of(sequences: list[Sequence], spec: SpecConfig) -> CandidateTree:
    parents = jnp.array([s.parents for s in sequences], jnp.int32)
    log_probs = jnp.array([s.log_probs for s in sequences], jnp.float32)
    return build_tree(jnp.zeros_like(parents), parents, jnp.array(depths(spec), jnp.int32), log_probs)


def words(pairs: Pairs) -> np.ndarray:
    bits = np.zeros((LAYERS, 32 * expert_bits.words(EXPERTS)), np.uint8)
    for pair in pairs:
        bits[pair] = 1
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)


def forecast_of(sequences: list[Sequence]) -> ExpertForecast:
    root = jnp.asarray(np.stack([words(s.root) for s in sequences]))
    nodes = jnp.asarray(np.stack([[words(node) for node in s.nodes] for s in sequences]))
    return ExpertForecast(root, nodes, jnp.zeros_like(root))


@cache
def compiled(choose: Callable, spec: SpecConfig, cost: CostModel) -> Callable:
    return jax.jit(lambda tree, forecast, value: choose(tree, forecast, spec, Economy(cost, value)))


def chosen_by(choose: Callable, sequences: list[Sequence], spec: SpecConfig, cost: CostModel, value: float) -> list:
    """The chosen nodes of each sequence, checked for form: prefix-closed and within the budget."""
    chosen_BN = compiled(choose, spec, cost)(tree_of(sequences, spec), forecast_of(sequences), jnp.float32(value))
    chosen = [frozenset(np.flatnonzero(row).tolist()) for row in np.asarray(chosen_BN)]
    for nodes, sequence in zip(chosen, sequences, strict=True):
        assert len(nodes) <= spec.budget
        assert all(sequence.parents[node] in (ROOT, *nodes) for node in nodes)
    return chosen


def worth(sequences: list[Sequence], chosen: list[frozenset[int]], cost: CostModel, value: float) -> float:
    """What sets of nodes are worth; experts of the roots and of other chosen nodes are shared."""
    paid = frozenset().union(*(s.root for s in sequences))
    used = frozenset().union(*(s.nodes[node] for s, nodes in zip(sequences, chosen, strict=True) for node in nodes))
    gain = sum(np.exp(s.log_probs[node]) for s, nodes in zip(sequences, chosen, strict=True) for node in nodes)
    rows = sum(len(nodes) for nodes in chosen)
    return float(gain - value * (cost.per_expert * len(used - paid) + cost.per_row * rows))


def closed_sets(sequence: Sequence, budget: int) -> list[frozenset[int]]:
    nodes = range(len(sequence.parents))
    return [
        frozenset(chosen)
        for size in range(budget + 1)
        for chosen in itertools.combinations(nodes, size)
        if all(sequence.parents[node] in (ROOT, *chosen) for node in chosen)
    ]


SPECS = [
    SpecConfig(depth=3, branch=2, budget=0),
    SpecConfig(depth=3, branch=2, budget=1),
    SpecConfig(depth=3, branch=2, budget=4),
    SpecConfig(depth=3, branch=2, budget=10),
    SpecConfig(depth=2, branch=2, budget=6),
    SpecConfig(depth=1, branch=4, budget=2),
    SpecConfig(depth=5, branch=1, budget=3),
]


def name_of(value: object) -> str:
    return f"{value.depth} {value.branch} {value.budget}" if isinstance(value, SpecConfig) else str(value)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), universe=st.sampled_from([4, 7, 40]), value=st.sampled_from(RATES))
def test_best_set_is_the_optimum(spec: SpecConfig, cost: CostModel, seed: int, universe: int, value: float) -> None:
    """Of all prefix-closed sets; the greedy choice is worth no more."""
    sequence = draw(np.random.default_rng(seed), spec, universe)
    (best,) = chosen_by(best_set, [sequence], spec, cost, value)
    (greedy,) = chosen_by(greedy_set, [sequence], spec, cost, value)
    values = {chosen: worth([sequence], [chosen], cost, value) for chosen in closed_sets(sequence, spec.budget)}
    most = max(values.values())
    margin = 1e-5 * max(1.0, abs(min(values.values())) if value < 1 else 1.0)
    assert values[best] >= most - margin
    assert values[greedy] <= most + margin
    if value == 0:  # nothing costs anything: as many as fit, and the likeliest of them
        assert len(best) == len(greedy) == min(spec.budget, spec.pool_size)
    if value == 1e6 and cost.per_row:
        assert best == greedy == frozenset()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), universe=st.sampled_from([4, 7, 40]), value=st.sampled_from(RATES))
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("finished", [None, 1])
def test_greedy_batch_is_that_of_sets(
    cost: CostModel, finished: int | None, seed: int, universe: int, value: float
) -> None:
    """Step by step the node that adds most with its missing ancestors, experts shared by all sequences.

    A finished sequence predicts nothing and its tree means nothing; the live ones choose as if it were not there.
    """
    spec = SpecConfig(depth=3, branch=2, budget=4)
    random = np.random.default_rng(seed)
    sequences = [draw(random, spec, universe) for _ in range(3)]
    live = [b for b in range(3) if b != finished]
    if finished is not None:
        garbage = random.choice([np.nan, -np.inf, 0.0, -1.0], spec.pool_size).tolist()
        sequences[finished] = replace(
            sequences[finished], log_probs=garbage, nodes=[frozenset()] * spec.pool_size, root=frozenset()
        )
    chosen = chosen_by(greedy_set, sequences, spec, cost, value)
    assert [chosen[b] for b in live] == greedy_reference([sequences[b] for b in live], spec, cost, value)


def greedy_reference(sequences: list[Sequence], spec: SpecConfig, cost: CostModel, value: float) -> list:
    chosen: list[frozenset[int]] = [frozenset()] * len(sequences)
    while True:
        present, steps = worth(sequences, chosen, cost, value), []
        for b, sequence in enumerate(sequences):
            for node in range(len(sequence.parents)):
                joined = chosen[b] | sequence.path(node)
                if node not in chosen[b] and len(joined) <= spec.budget:
                    after = [*chosen[:b], joined, *chosen[b + 1 :]]
                    steps.append((worth(sequences, after, cost, value) - present, -b, -node, after))
        best = max(steps, default=None)
        if best is None or best[0] <= 1e-7:
            return chosen
        chosen = best[3]


def flat(spec: SpecConfig, nodes: list[Pairs], log_probs: list[float], root: Pairs = frozenset()) -> Sequence:
    return Sequence([ROOT] * spec.branch, log_probs, nodes, root)


def pairs(*experts: int) -> Pairs:
    return frozenset((layer, e) for layer in range(LAYERS) for e in experts)


FLAT = SpecConfig(depth=1, branch=4, budget=4)


def test_of_equal_sets_the_smaller_is_taken() -> None:
    """A node that is worth exactly what it costs is left out; a free one is taken, whatever the rate."""
    certain = flat(FLAT, [pairs(1), pairs(2), pairs(3), pairs(1)], [0.0, 0.0, -200.0, -200.0])
    # A node's two new pairs cost 4; at 1/4 token each they are worth exactly the token that the node brings.
    for value, expected in ((0.25, set()), (0.2499, {0, 1}), (0.2501, set())):
        assert chosen_by(best_set, [certain], FLAT, FREE_ROWS, value) == [expected], value
        assert chosen_by(greedy_set, [certain], FLAT, FREE_ROWS, value) == [expected], value
    free = flat(FLAT, [pairs(1), pairs(2), pairs(5), pairs(1)], [-3.0, -1.0, -2.0, -1.0], pairs(1, 5))
    for choose in (best_set, greedy_set):
        assert chosen_by(choose, [free], FLAT, FREE_ROWS, 1e3) == [{0, 2, 3}]
        assert chosen_by(choose, [free], FLAT, COSTS["rows cost"], 1e3) == [set()]


def test_an_unlikely_parent_is_paid_for_by_its_children() -> None:
    """Greedy takes a node together with its missing ancestors; alone the parent would not be worth its experts."""
    spec = SpecConfig(depth=2, branch=1, budget=2)
    chain = Sequence([ROOT, 0], [-0.1, -0.1], [pairs(1), pairs(1)], frozenset())
    value = 0.3  # the parent: 0.90 against 4 * 0.3; both: 1.81 against 1.2
    for choose in (best_set, greedy_set):
        assert chosen_by(choose, [chain], spec, FREE_ROWS, value) == [{0, 1}]
        assert chosen_by(choose, [chain], replace(spec, budget=1), FREE_ROWS, value) == [set()]


def test_sequences_of_a_batch_pay_once_for_an_expert() -> None:
    """Sequence 1's node is not worth its expert; once sequence 0 has paid, it is free. So are others' roots."""
    rest = [pairs(20), pairs(21), pairs(22)]
    first = flat(FLAT, [pairs(1), *rest], [-0.1, -50.0, -50.0, -50.0])
    second = flat(FLAT, [pairs(1), *rest], [-1.5, -50.0, -50.0, -50.0])
    assert chosen_by(greedy_set, [second, second], FLAT, FREE_ROWS, 0.2) == [set(), set()]
    assert chosen_by(greedy_set, [second, first], FLAT, FREE_ROWS, 0.2) == [{0}, {0}]
    idle = replace(second, root=pairs(1), log_probs=[-90.0] * 4)
    assert chosen_by(greedy_set, [second, idle], FLAT, FREE_ROWS, 0.2)[0] == {0}


def test_one_sequence_with_a_small_pool_is_searched_exhaustively() -> None:
    """Where greedy is fooled, `rate` is not; batches and larger pools take the greedy choice."""
    # Node 0 alone is worth most; nodes 1 and 2 share their experts and together are worth more than 0 allows.
    nodes = [pairs(1), pairs(2), pairs(2), pairs(3)]
    fooled = flat(FLAT, nodes, np.log([0.9, 0.75, 0.75, 1e-9]).tolist())
    spec, value = replace(FLAT, budget=2), 0.15
    assert chosen_by(best_set, [fooled], spec, FREE_ROWS, value) == [{1, 2}]
    assert chosen_by(greedy_set, [fooled], spec, FREE_ROWS, value) == [{0, 1}]

    def policy(sequences: list[Sequence], spec: SpecConfig) -> list[list[int]]:
        chosen = rate(tree_of(sequences, spec), forecast_of(sequences), spec, Economy(FREE_ROWS, jnp.float32(value)))
        assert chosen.nodes_BM.shape == (len(sequences), spec.budget)
        return [row[:n].tolist() for row, n in zip(chosen.nodes_BM, chosen.count_B, strict=True)]

    assert policy([fooled], spec) == [[1, 2]]
    lone = flat(FLAT, [pairs(30 + i) for i in range(4)], [-90.0] * 4)
    assert policy([fooled, lone], spec) == [[0, 1], []]
    large = SpecConfig(depth=1, branch=MOST_EXHAUSTIVE_NODES + 1, budget=2)
    more = [pairs(10 + i) for i in range(large.branch - 4)]
    assert policy([flat(large, nodes + more, fooled.log_probs + [-90.0] * len(more))], large) == [[0, 1]]


def test_needs_a_forecast_and_a_cost_model() -> None:
    sequence = draw(np.random.default_rng(0), FLAT, 7)
    tree, forecast, economy = tree_of([sequence], FLAT), forecast_of([sequence]), Economy(FREE_ROWS, jnp.float32(1))
    for arguments in ((tree, None, FLAT, economy), (tree, forecast, FLAT, None)):
        with pytest.raises(ValueError, match="needs an expert predictor and a cost model"):
            rate(*arguments)


def test_device_experts_are_refused() -> None:
    spec, sequence = replace(FLAT, device_experts=4), draw(np.random.default_rng(0), FLAT, 7)
    with pytest.raises(UserError, match="it takes no device_experts"):
        rate(tree_of([sequence], FLAT), forecast_of([sequence]), spec, Economy(FREE_ROWS, jnp.float32(1)))
