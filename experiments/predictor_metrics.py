"""How well predicted experts agree with the target's on a recording; sums by prompt, so that prompts can be resampled.

A row is the root or a candidate node of one position; rows of all positions count alike. Sets are bit words.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32
from scipy.stats import rankdata

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


def ancestors(parents_XN: Int[np.ndarray, "positions nodes"]) -> Bool[np.ndarray, "positions nodes nodes"]:
    """`[x, i, j]` is True where node j is node i or an ancestor of it."""
    positions, nodes = parents_XN.shape
    found = np.tile(np.eye(nodes, dtype=bool), (positions, 1, 1))
    for node in range(nodes):  # parents come first
        parent_X = parents_XN[:, node]
        inner_X = np.flatnonzero(parent_X >= 0)
        found[inner_X, node] |= found[inner_X, parent_X[inner_X]]
    return found


def previous_sets(recording: Recording) -> UInt32[np.ndarray, "positions layers words"]:
    """What a step at each position takes as paid for: true experts of the token before its root."""
    before = np.roll(recording.experts[:, 0], 1, axis=0)
    before[recording.starts[:-1]] = recording.previous
    return before


def marginal_counts(
    recording: Recording, sets: Sets, on_path_XNN: Bool[np.ndarray, "positions nodes nodes"]
) -> Int[np.ndarray, "positions nodes"]:
    """(layer, expert) pairs of each node's path, by `sets`, that the token before the root did not use."""
    paid_XLW = previous_sets(recording)
    counts = []
    for node in range(recording.tokens.shape[1]):
        on_path_XN11 = on_path_XNN[:, node, :, None, None]
        path_XLW = np.bitwise_or.reduce(np.where(on_path_XN11, sets[:, 1:], np.uint32(0)), axis=1)
        counts.append(size(path_XLW & ~paid_XLW).sum(axis=-1))
    return np.stack(counts, axis=1)


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
