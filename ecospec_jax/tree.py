"""Candidate tree: how a drafter's proposals become nodes, and how chosen nodes become rows of one verification.

Pool order (docs/formats.md C.6): level 1 holds the root's k likeliest tokens; each further level expands the k best
nodes of the level before and records all k*k children. Parents precede children, so an ascending list of nodes is in
topological order.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import KVCache, Rows
from ecospec_jax.config import SpecConfig
from ecospec_jax.models.drafter import Drafter

ROOT = -1


@jax.tree_util.register_dataclass
@dataclass
class CandidateTree:
    """All nodes the drafter proposed, without the root.

    Attributes:
        tokens_BN: token ids of the target's vocabulary.
        parents_BN: pool index of the parent, `ROOT` on the first level.
        depths_N: 1 for the root's children.
        log_probs_BN: cumulative draft log-probability; never increases from parent to child.
        ancestors_BNN: `[b, i, j]` is True where node j is node i or an ancestor of it.
        states_BNH: the drafter's state that proposed each node; None where nothing was drafted.
    """

    tokens_BN: Int[Array, "batch nodes"]
    parents_BN: Int[Array, "batch nodes"]
    depths_N: Int[Array, " nodes"]
    log_probs_BN: Float[Array, "batch nodes"]
    ancestors_BNN: Bool[Array, "batch nodes nodes"]
    states_BNH: Float[Array, "batch nodes state"] | None = None


@jax.tree_util.register_dataclass
@dataclass
class Selection:
    """Nodes to verify: `nodes_BM` ascending pool indices, of which the first `count_B` are meant."""

    nodes_BM: Int[Array, "batch budget"]
    count_B: Int[Array, " batch"]


def build_tree(
    tokens_BN: Int[Array, "batch nodes"],
    parents_BN: Int[Array, "batch nodes"],
    depths_N: Int[Array, " nodes"],
    log_probs_BN: Float[Array, "batch nodes"],
) -> CandidateTree:
    """A tree from its nodes in pool order (parents first)."""
    batch, nodes = tokens_BN.shape
    own_BNN = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (batch, nodes, nodes))
    parent_BNN = parents_BN[:, :, None] == jnp.arange(nodes)
    # Transitive closure by doubling: each product doubles the distance covered.
    ancestors_BNN = own_BNN | parent_BNN
    reach = 1
    while reach < nodes:
        closure_BNN = ancestors_BNN.astype(jnp.float32)
        ancestors_BNN = jnp.einsum("bij,bjk->bik", closure_BNN, closure_BNN) > 0
        reach *= 2
    # A policy could not order NaN, and a child chosen without its parent would spoil the output.
    log_probs_BN = jnp.where(jnp.isnan(log_probs_BN), -jnp.inf, log_probs_BN)
    return CandidateTree(tokens_BN, parents_BN, depths_N, log_probs_BN, ancestors_BNN)


def empty_tree(batch: int) -> CandidateTree:
    """The tree without nodes: verification of the root alone is plain decoding."""
    none_BN = jnp.zeros((batch, 0), jnp.int32)
    return build_tree(none_BN, none_BN, none_BN[0], none_BN.astype(jnp.float32))


def expand_tree(
    drafter: Drafter,
    cache: KVCache,
    root_state_BH: Float[Array, "batch state"],
    length_B: Int[Array, " batch"],
    going_B: Bool[Array, " batch"],
    spec: SpecConfig,
) -> tuple[CandidateTree, KVCache]:
    """Expands `spec.depth` levels of `spec.branch` children.

    Args:
        drafter: proposes and extends.
        cache: the drafter's, caught up: `length_B` entries at positions `0 .. length-1`.
        root_state_BH: the drafter's state after its last committed entry, which predicts level 1.
        length_B: committed tokens in the target's cache (the root excluded).
        going_B: sequences that are not finished; the nodes of others read no experts.
        spec: depth and branch.

    Returns:
        The tree, and the cache with scratch entries behind `length_B` that the next catch-up overwrites.
    """
    batch, k = root_state_BH.shape[0], spec.branch
    window = (spec.depth - 1) * k
    tokens_Bk, scores_Bk = drafter.propose(root_state_BH, k)
    states_BkH = jnp.broadcast_to(root_state_BH[:, None], (batch, k, root_state_BH.shape[-1]))
    seen_BkW = jnp.zeros((batch, k, window), bool)
    pool_Bk = jnp.broadcast_to(jnp.arange(k), (batch, k))

    levels = [(tokens_Bk, jnp.full((batch, k), ROOT), jnp.ones(k, jnp.int32), scores_Bk, states_BkH)]
    for depth in range(1, spec.depth):
        offset, first = (depth - 1) * k, k + (depth - 1) * k * k
        seen_BkW = seen_BkW.at[:, :, offset : offset + k].set(jnp.eye(k, dtype=bool))
        rows = Rows(
            tokens_BR=tokens_Bk,
            positions_BR=jnp.broadcast_to(length_B[:, None] - 1 + depth, (batch, k)),
            live_BR=jnp.broadcast_to(going_B[:, None], (batch, k)),
            context_B=length_B,
            mask_BRW=seen_BkW,
            offset=offset,
        )
        states_BkH, cache = drafter.extend(rows, states_BkH, cache)
        child_tokens_Bkk, child_log_probs_Bkk = drafter.propose(states_BkH, k)
        child_scores_Bc = (scores_Bk[:, :, None] + child_log_probs_Bkk).reshape(batch, k * k)
        child_tokens_Bc = child_tokens_Bkk.reshape(batch, k * k)
        parents_Bc, parent_states_BcH = jnp.repeat(pool_Bk, k, axis=1), jnp.repeat(states_BkH, k, axis=1)
        depths_c = jnp.full(k * k, depth + 1, jnp.int32)
        levels.append((child_tokens_Bc, parents_Bc, depths_c, child_scores_Bc, parent_states_BcH))

        scores_Bk, chosen_Bk = lax.top_k(child_scores_Bc, k)
        tokens_Bk = jnp.take_along_axis(child_tokens_Bc, chosen_Bk, axis=1)
        pool_Bk = first + chosen_Bk
        states_BkH = jnp.take_along_axis(states_BkH, (chosen_Bk // k)[:, :, None], axis=1)
        seen_BkW = jnp.take_along_axis(seen_BkW, (chosen_Bk // k)[:, :, None], axis=1)

    tokens, parents, depths, scores, states = zip(*levels, strict=True)
    tree = build_tree(
        jnp.concatenate(tokens, 1), jnp.concatenate(parents, 1), jnp.concatenate(depths), jnp.concatenate(scores, 1)
    )
    return replace(tree, states_BNH=jnp.concatenate(states, 1)), cache


@jax.tree_util.register_dataclass
@dataclass
class VerifyTree:
    """The rows of one verification: row 0 is the root, then the selected nodes in pool order.

    Attributes:
        rows: what the target processes.
        parent_rows_BR: row of each row's parent; 0 for the root itself.
        pool_rows_BR: the row each row would have if the whole pool were laid out: 0 for the root, i + 1 for node i.
    """

    rows: Rows
    parent_rows_BR: Int[Array, "batch rows"]
    pool_rows_BR: Int[Array, "batch rows"]


def whole_pool(tree: CandidateTree) -> Selection:
    """The selection of every node."""
    batch, nodes = tree.tokens_BN.shape
    return Selection(jnp.broadcast_to(jnp.arange(nodes), (batch, nodes)), jnp.full(batch, nodes, jnp.int32))


def verify_tree(
    tree: CandidateTree,
    selection: Selection,
    root_B: Int[Array, " batch"],
    length_B: Int[Array, " batch"],
    finished_B: Bool[Array, " batch"],
) -> VerifyTree:
    """Lays the root and the selected nodes out as rows behind `length_B` committed tokens.

    A node that was selected without all of its ancestors is dead, so that no policy can spoil the output.
    """
    batch, budget = selection.nodes_BM.shape
    chosen_BM = jnp.arange(budget) < selection.count_B[:, None]
    if budget == 0:
        node_tokens_BM, depth_BM, parent_rows_BM = (jnp.zeros((batch, 0), jnp.int32),) * 3
        seen_BMM = jnp.zeros((batch, 0, 0), bool)
    else:
        nodes_BM = selection.nodes_BM
        node_tokens_BM = jnp.take_along_axis(tree.tokens_BN, nodes_BM, axis=1)
        depth_BM = tree.depths_N[nodes_BM]
        parents_BM = jnp.take_along_axis(tree.parents_BN, nodes_BM, axis=1)
        is_parent_BMM = (parents_BM[:, :, None] == nodes_BM[:, None, :]) & chosen_BM[:, None, :]
        parent_rows_BM = jnp.where(parents_BM == ROOT, 0, 1 + jnp.argmax(is_parent_BMM, axis=-1))
        seen_BMN = jnp.take_along_axis(tree.ancestors_BNN, nodes_BM[:, :, None], axis=1)
        seen_BMM = jnp.take_along_axis(
            seen_BMN, jnp.broadcast_to(nodes_BM[:, None, :], (batch, budget, budget)), axis=2
        )
        seen_BMM = seen_BMM & chosen_BM[:, None, :]
        chosen_BM = chosen_BM & (jnp.sum(seen_BMM, axis=-1) == depth_BM)
        seen_BMM = seen_BMM & chosen_BM[:, :, None]

    def root_column(value_BM: Array, root: Array) -> Array:
        return jnp.concatenate([root, value_BM], axis=1)

    zero_B1 = jnp.zeros((batch, 1), jnp.int32)
    mask_BRR = jnp.pad(seen_BMM, ((0, 0), (1, 0), (1, 0)))
    mask_BRR = (mask_BRR | jnp.eye(budget + 1, dtype=bool)).at[:, :, 0].set(True)
    return VerifyTree(
        rows=Rows(
            tokens_BR=root_column(node_tokens_BM, root_B[:, None]),
            positions_BR=length_B[:, None] + root_column(depth_BM, zero_B1),
            live_BR=root_column(chosen_BM, jnp.ones((batch, 1), bool)) & ~finished_B[:, None],
            context_B=length_B,
            mask_BRW=mask_BRR,
        ),
        parent_rows_BR=root_column(parent_rows_BM, zero_B1),
        pool_rows_BR=root_column(selection.nodes_BM + 1, zero_B1),
    )
