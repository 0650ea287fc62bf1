"""Feeds drafters committed rows, then a full tree of drafted nodes level by level, as decoding does."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ecospec_jax.cache import KVCache, Rows
from tests.parity.compare import Tree, causal_rows

CONTEXT, CAPACITY, BRANCH, DEPTH = [4, 7], 24, 2, 3


@dataclass
class DraftCase:
    """Committed rows of two sequences, and tokens for the nodes of a full binary tree of three levels behind each."""

    features: list[np.ndarray]
    tokens: list[np.ndarray]
    nodes_BN: np.ndarray

    @staticmethod
    def random(vocab_size: int, width: int, seed: int) -> "DraftCase":
        random = np.random.default_rng(seed)
        return DraftCase(
            features=[2 * random.normal(size=(length, width)).astype(np.float32) for length in CONTEXT],
            tokens=[random.integers(0, vocab_size, length) for length in CONTEXT],
            nodes_BN=random.integers(0, vocab_size, (len(CONTEXT), len(FULL_TREE.parents))),
        )


def _level(depth: int) -> slice:
    """Nodes of the full tree `depth` levels below the root's children."""
    return slice(BRANCH ** (depth + 1) - BRANCH, BRANCH ** (depth + 2) - BRANCH)


FULL_TREE = Tree([-1, -1, *(node // BRANCH - 1 for node in range(BRANCH, _level(DEPTH - 1).stop))])
catch_up = nnx.jit(lambda drafter, rows, features, cache: drafter.catch_up(rows, features, cache))
extend = nnx.jit(lambda drafter, rows, states, cache: drafter.extend(rows, states, cache))


def caught_up(drafter: Any, case: DraftCase) -> tuple[np.ndarray, KVCache]:
    """The states of the committed rows, garbage behind the shorter sequence's."""
    features_BRF, tokens_BR = (
        np.stack([np.resize(rows, (max(CONTEXT), *rows.shape[1:])) for rows in each])
        for each in (case.features, case.tokens)
    )
    rows = causal_rows(tokens_BR, np.array(CONTEXT))
    return catch_up(drafter, rows, jnp.asarray(features_BRF), drafter.empty_cache(len(CONTEXT), CAPACITY))


def states_of(drafter: Any, case: DraftCase) -> np.ndarray:
    """States of the root and of all nodes, level by level."""
    batch, length_B = len(CONTEXT), np.array(CONTEXT)
    states, cache = caught_up(drafter, case)
    levels = [states[jnp.arange(batch), length_B - 1][:, None]]
    for depth in range(DEPTH):
        level = _level(depth)
        tokens_BR, mask_RW = case.nodes_BN[:, level], FULL_TREE.ancestors_RR[level]
        rows = Rows(
            tokens_BR=jnp.asarray(tokens_BR),
            positions_BR=jnp.asarray(np.broadcast_to(length_B[:, None] + depth, tokens_BR.shape)),
            live_BR=jnp.ones(tokens_BR.shape, bool),
            context_B=jnp.asarray(length_B),
            mask_BRW=jnp.asarray(np.broadcast_to(mask_RW, (batch, *mask_RW.shape))),
            offset=level.start,
        )
        states, cache = extend(drafter, rows, jnp.repeat(levels[-1], BRANCH, axis=1), cache)
        levels.append(states)
    return np.concatenate(levels, axis=1)
