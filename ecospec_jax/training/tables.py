"""Predictors that are counted, not trained: experts per token id, and per layer."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

from ecospec_jax.config import RoutingShape
from ecospec_jax.training.traces import Trace

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


def layer_prior(counts_VLE: Float[np.ndarray, "vocab layers experts"]) -> Float[np.ndarray, "layers experts"]:
    """Share of all choices that fall on each expert of each layer; rows sum to 1."""
    total_LE = counts_VLE.sum(axis=0)
    return total_LE / np.maximum(total_LE.sum(axis=1, keepdims=True), 1)


def token_scores(counts_VLE: Float[np.ndarray, "vocab layers experts"]) -> Float[np.ndarray, "vocab layers experts"]:
    """Counts plus the layer prior, so that rare and unseen ids fall back to the layer's favourites."""
    return counts_VLE + PRIOR_WEIGHT * layer_prior(counts_VLE)


def best_experts(scores: Float[np.ndarray, "... experts"], k: int) -> Int[np.ndarray, "... k"]:
    """Ids of the k best-scored experts, best first, ties to the lower id."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k].astype(np.int32)
