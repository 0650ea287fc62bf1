"""Policies: which candidate nodes are verified. Arrays in, indices and counts out; knows nothing of models.

A policy must return a prefix-closed set of at most `budget` nodes and must not depend on the randomness of
verification; then any policy leaves the output distribution unchanged (DESIGN.md section 3).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from ecospec_jax.tree import CandidateTree, Selection

Policy = Callable[[CandidateTree, int], Selection]


def likelihood(tree: CandidateTree, budget: int) -> Selection:
    """The `budget` likeliest nodes: the drafter's own rerank, the EAGLE and MTP baseline.

    Cumulative probability never increases along a path and ties go to the lower index, so the set is prefix-closed.
    """
    _, nodes_BM = lax.top_k(tree.log_probs_BN, budget)
    batch = tree.tokens_BN.shape[0]
    return Selection(nodes_BM=jnp.sort(nodes_BM, axis=1), count_B=jnp.full(batch, budget, jnp.int32))
