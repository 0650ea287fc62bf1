"""A recording without models: random trees and routing, a predictor that is right about half of the rows."""

import itertools

import numpy as np

from ecospec_jax.config import RoutingShape
from ecospec_jax.predictor_config import FrequencyConfig, TokenTableConfig
from experiments.recording import FORMAT, Header, Recording
from tests import tiny
from tests.tiny_predictors import TARGET, random_ids

ROUTING = RoutingShape.of(TARGET)  # 37 experts: two words, the second almost empty
DEPTH, BRANCH, STARTS = 3, 2, (0, 4, 4, 9)  # three prompts, one of them with an empty answer
NODES = BRANCH + (DEPTH - 1) * BRANCH**2


def words(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random sets of k experts as bit words."""
    bits = np.zeros((*shape, ROUTING.layers, 2), np.uint32)
    ids = random_ids((*shape, ROUTING.layers), ROUTING, seed)
    for place in np.ndindex(ids.shape):
        bits[(*place[:-1], ids[place] // 32)] |= np.uint32(1) << np.uint32(ids[place] % 32)
    return bits


def made_up(seed: int = 0) -> Recording:
    """Random trees and routing; `guess` is right about half of the rows, `nothing` names no expert."""
    random, positions = np.random.default_rng(seed), STARTS[-1]
    first = np.arange(BRANCH).tolist()
    parents = np.full((positions, NODES), -1)
    for position, level in itertools.product(range(positions), range(1, DEPTH)):
        begin = BRANCH + (level - 1) * BRANCH**2
        above = first if level == 1 else range(begin - BRANCH**2, begin)
        parents[position, begin : begin + BRANCH**2] = np.repeat(random.permutation(list(above))[:BRANCH], BRANCH)
    experts, other = words((positions, NODES + 1), seed + 1), words((positions, NODES + 1), seed + 2)
    right = random.random((positions, NODES + 1, 1, 1)) < 0.5
    header = Header(
        format=FORMAT,
        target_hash="t" * 64,
        drafter_hash="d" * 64,
        target=TARGET,
        drafter=tiny.DRAFTER,
        predictors={"guess": TokenTableConfig(TARGET.vocab_size, ROUTING), "nothing": FrequencyConfig(ROUTING)},
        bytes_per_weight=4,
        temperature=0.0,
        depth=DEPTH,
        branch=BRANCH,
        max_new_tokens=9,
        seed=0,
        eos_ids=(),
        prompts=("a", "b", "c"),
        versions={},
    )
    return Recording(
        header=header,
        starts=np.array(STARTS),
        previous=words((3,), seed + 3),
        roots=random.integers(0, 29, positions),
        tokens=random.integers(0, 29, (positions, NODES)),
        parents=parents,
        log_probs=-np.sort(random.random((positions, NODES)) * 4, axis=1),
        drawn=random.integers(0, 29, (positions, NODES + 1)),
        experts=experts,
        forecasts={"guess": np.where(right, experts, other), "nothing": np.zeros_like(experts)},
    )
