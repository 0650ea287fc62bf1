"""Predictors that are counted, not trained: experts per token id, and per layer."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

from ecospec_jax.config import RoutingShape
from ecospec_jax.training.traces import Trace

PAIR_PRIOR_WEIGHT = 2.0  # pseudo-tokens of the token's own distribution that every pair starts with
PRIOR_WEIGHT = 1.0  # pseudo-tokens of the layer's own distribution that every token id starts with


def expert_counts(
    traces: Iterable[Trace], vocab_size: int, routing: RoutingShape
) -> Float[np.ndarray, "vocab layers experts"]:
    """How often each expert was chosen for each token id, float32 `[V, L, E]`."""
    counts = np.zeros((vocab_size, routing.layers, routing.experts), np.float32)
    layers = np.arange(routing.layers)[None, :, None]
    for trace in traces:
        np.add.at(counts, (trace.tokens_T[:, None, None], layers, trace.experts_TLK.astype(np.int64)), 1.0)
    return counts


def frequent_pairs(traces: Iterable[Trace], most: int) -> Int[np.ndarray, "pairs 2"]:
    """The `most` commonest pairs (token, the one before it), ascending."""
    counts: Counter[tuple[int, int]] = Counter()
    for trace in traces:
        tokens = trace.tokens_T.tolist()
        counts.update(zip(tokens[1:], tokens[:-1], strict=True))
    common = sorted(pair for pair, _ in counts.most_common(most))
    return np.array(common, np.int32).reshape(-1, 2)


def pair_counts(
    traces: Iterable[Trace], pairs_P2: Int[np.ndarray, "pairs 2"], vocab_size: int, routing: RoutingShape
) -> Float[np.ndarray, "pairs layers experts"]:
    """How often each expert was chosen for the first token of each pair behind the second, float32."""
    counts = np.zeros((len(pairs_P2), routing.layers, routing.experts), np.float32)
    keys_P = pairs_P2[:, 0].astype(np.int64) * vocab_size + pairs_P2[:, 1]
    layers = np.arange(routing.layers)[None, :, None]
    for trace in traces:
        keys_T = trace.tokens_T[1:].astype(np.int64) * vocab_size + trace.tokens_T[:-1]
        places_T = np.minimum(np.searchsorted(keys_P, keys_T), len(keys_P) - 1)
        known_T = keys_P[places_T] == keys_T
        experts_TLK = trace.experts_TLK[1:][known_T].astype(np.int64)
        np.add.at(counts, (places_T[known_T][:, None, None], layers, experts_TLK), 1.0)
    return counts


def layer_prior(counts_VLE: Float[np.ndarray, "vocab layers experts"]) -> Float[np.ndarray, "layers experts"]:
    """Share of all choices that fall on each expert of each layer; rows sum to 1."""
    total_LE = counts_VLE.sum(axis=0)
    return total_LE / np.maximum(total_LE.sum(axis=1, keepdims=True), 1)


def token_scores(counts_VLE: Float[np.ndarray, "vocab layers experts"]) -> Float[np.ndarray, "vocab layers experts"]:
    """Counts plus the layer prior, so that rare and unseen ids fall back to the layer's favourites."""
    return counts_VLE + PRIOR_WEIGHT * layer_prior(counts_VLE)


def pair_scores(
    counts_PLE: Float[np.ndarray, "pairs layers experts"], alone_PLE: Float[np.ndarray, "pairs layers experts"]
) -> Float[np.ndarray, "pairs layers experts"]:
    """Counts of pairs plus the shares that the token's own scores give each expert."""
    return counts_PLE + PAIR_PRIOR_WEIGHT * alone_PLE / alone_PLE.sum(axis=-1, keepdims=True)


def best_experts(scores: Float[np.ndarray, "... experts"], k: int) -> Int[np.ndarray, "... k"]:
    """Ids of the k best-scored experts, best first, ties to the lower id."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k].astype(np.int32)
