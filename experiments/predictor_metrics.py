"""How well predicted experts agree with the target's on a recording; sums by prompt, so that prompts can be resampled.

A row is the root or a candidate node of one position; rows of all positions count alike. Sets are bit words.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32
from scipy.stats import rankdata

from ecospec_jax.selection import ExpertForecast, new_experts, path_sets
from ecospec_jax.tree import build_tree
from experiments.recording import Recording

Sets = UInt32[np.ndarray, "positions rows layers words"]


@dataclass(frozen=True)
class Agreement:
    """Sizes of sets by position, row and layer.

    Attributes:
        hits: experts that are predicted and true.
        predicted, true: experts.
    """

    hits: Int[np.ndarray, "positions rows layers"]
    predicted: Int[np.ndarray, "positions rows layers"]
    true: Int[np.ndarray, "positions rows layers"]


def size(bits: UInt32[np.ndarray, "... words"]) -> Int[np.ndarray, "..."]:
    """Size of each set."""
    return np.bitwise_count(bits).sum(axis=-1, dtype=np.int64)


def agreement(predicted: Sets, true: Sets) -> Agreement:
    """Compares row by row and layer by layer."""
    return Agreement(size(predicted & true), size(predicted), size(true))


def previous_sets(recording: Recording) -> UInt32[np.ndarray, "positions layers words"]:
    """What a step at each position takes as paid for: true experts of the token before its root."""
    before = np.roll(recording.experts[:, 0], 1, axis=0)
    before[recording.starts[:-1]] = recording.previous
    return before


def marginal_counts(recording: Recording, sets: Sets) -> Int[np.ndarray, "positions nodes"]:
    """(layer, expert) pairs of each node's path, by `sets`, that the token before the root did not use."""
    tree = build_tree(
        *map(jnp.asarray, (recording.tokens, recording.parents, recording.depths, recording.log_probs)),
    )
    paid_XLW = jnp.asarray(previous_sets(recording))
    forecast = ExpertForecast(jnp.asarray(sets[:, 0]), jnp.asarray(sets[:, 1:]), paid_XLW)
    return np.asarray(jax.vmap(new_experts)(path_sets(tree, forecast), paid_XLW))


def rank_correlation(
    scores: Float[np.ndarray, "positions nodes"], others: Float[np.ndarray, "positions nodes"]
) -> Float[np.ndarray, " positions"]:
    """Spearman's, of the nodes of each position; nan where all scores are alike."""
    ranks, other_ranks = rankdata(scores, axis=1), rankdata(others, axis=1)
    first, second = (r - r.mean(axis=1, keepdims=True) for r in (ranks, other_ranks))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (first * second).sum(axis=1) / np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))


def by_prompt(recording: Recording, values_X: Float[np.ndarray, " positions"]) -> Float[np.ndarray, " answers"]:
    """Sum over the positions of each answer that has any."""
    return np.add.reduceat(values_X, recording.starts[:-1][np.diff(recording.starts) > 0])
