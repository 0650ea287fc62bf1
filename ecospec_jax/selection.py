"""Policies: which candidate nodes are verified. Arrays in, indices and counts out; knows nothing of models.

A policy must return a prefix-closed set of at most `budget` nodes and must not depend on the randomness of
verification; then any policy leaves the output distribution unchanged (docs/design.md section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from ecospec_jax import expert_bits
from ecospec_jax.config import SpecConfig
from ecospec_jax.cost import CostModel
from ecospec_jax.tree import ROOT, CandidateTree, Selection


@jax.tree_util.register_dataclass
@dataclass
class ExpertForecast:
    """Predicted experts of one step as bit words; zero for finished sequences.

    Attributes:
        root_BLW: of the root, which is verified anyway.
        nodes_BNLW: of each candidate node by itself.
        buffer_BLW: experts that count as paid for before any node is chosen.
    """

    root_BLW: UInt32[Array, "batch layers words"]
    nodes_BNLW: UInt32[Array, "batch nodes layers words"]
    buffer_BLW: UInt32[Array, "batch layers words"]


@jax.tree_util.register_dataclass
@dataclass
class Economy:
    """What nodes cost, and what cost is worth.

    Attributes:
        cost: the cost model.
        rate: tokens per unit of cost that decoding makes at present.
    """

    cost: CostModel = field(metadata={"static": True})
    rate: Float[Array, ""]

    def price(self, pairs: Int[Array, "..."], rows: Int[Array, "..."]) -> Float[Array, "..."]:
        """Tokens that must be gained to pay for further (layer, expert) pairs and rows."""
        return self.rate * (self.cost.per_expert * pairs + self.cost.per_row * rows)


Policy = Callable[[CandidateTree, ExpertForecast | None, SpecConfig, Economy | None], Selection]


def likelihood(
    tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None = None
) -> Selection:
    """The `budget` likeliest nodes: the drafter's own rerank, the EAGLE and MTP baseline.

    Cumulative probability never increases along a path and ties go to the lower index, so the set is prefix-closed.
    """
    _, nodes_BM = lax.top_k(tree.log_probs_BN, spec.budget)
    batch = tree.tokens_BN.shape[0]
    return Selection(nodes_BM=jnp.sort(nodes_BM, axis=1), count_B=jnp.full(batch, spec.budget, jnp.int32))


def path_sets(tree: CandidateTree, forecast: ExpertForecast) -> UInt32[Array, "batch nodes layers words"]:
    """Experts of each node and its ancestors, the root left out."""
    on_path_BNN = tree.ancestors_BNN[..., None, None]
    return expert_bits.union(jnp.where(on_path_BNN, forecast.nodes_BNLW[:, None], jnp.uint32(0)), axis=2)


def new_experts(
    path_BNLW: UInt32[Array, "batch nodes layers words"],
    buffer_LW: UInt32[Array, "layers words"],
    device_experts: int | None = None,
) -> Int[Array, "batch nodes"]:
    """dC: (layer, expert) pairs of each path that the buffer does not hold.

    With `device_experts` it is what the path adds, layer by layer, to the experts of the busiest device, which the
    others wait for: device d has the experts `d * device_experts ..`.
    """
    if device_experts is None:
        return jnp.sum(expert_bits.count(path_BNLW & ~buffer_LW), axis=-1)
    experts = buffer_LW.shape[-1] * expert_bits.WORD
    ids_GK = jnp.arange(-(-experts // device_experts) * device_experts).reshape(-1, device_experts)
    devices_GW = expert_bits.from_ids(ids_GK, experts)

    def busiest(sets: UInt32[Array, "... layers words"]) -> Int[Array, "... layers"]:
        return jnp.max(expert_bits.count(sets[..., None, :] & devices_GW), axis=-1)

    return jnp.sum(busiest(path_BNLW | buffer_LW) - busiest(buffer_LW), axis=-1)


def cost_aware(
    tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None = None
) -> Selection:
    """EcoSpec's greedy choice: again and again the node with the best P / (new experts + eps) (arXiv 2607.12696).

    P is the cumulative draft probability; the new experts are those of the node's path that the buffer lacks, and join
    it once the node is chosen. The score never increases from parent to child and ties go to the lower index, so the
    set is prefix-closed; a node is admitted only behind its parent, which keeps it so whatever rounding does.

    With `spec.shared_buffer` all sequences fill one buffer, and the best node of any sequence comes first. With
    `spec.device_experts` new experts are those of the busiest device.
    """
    if forecast is None:
        raise ValueError("cost-aware selection needs an expert predictor")
    chosen_BN = cost_aware_nodes(
        tree,
        forecast,
        spec.budget,
        spec.eps,
        shared_buffer=spec.shared_buffer,
        device_experts=spec.device_experts,
    )
    return selection_of(chosen_BN, spec.budget)


def cost_aware_nodes(
    tree: CandidateTree,
    forecast: ExpertForecast,
    budget: int | Int[Array, ""],
    eps: float | Float[Array, ""],
    *,
    shared_buffer: bool,
    device_experts: int | None = None,
) -> Bool[Array, "batch nodes"]:
    """The nodes that `cost_aware` chooses; budget and eps may be traced."""
    path_BNLW = path_sets(tree, forecast)
    if shared_buffer:
        shared_LW = expert_bits.union(forecast.buffer_BLW, axis=0)
        return _greedy(tree.parents_BN, tree.log_probs_BN, path_BNLW, shared_LW, budget, eps, device_experts)

    def alone(parents_N: Array, log_probs_N: Array, path_NLW: Array, buffer_LW: Array) -> Array:
        one = parents_N[None], log_probs_N[None], path_NLW[None]
        return _greedy(*one, buffer_LW, budget, eps, device_experts)[0]

    return jax.vmap(alone)(tree.parents_BN, tree.log_probs_BN, path_BNLW, forecast.buffer_BLW)


def _greedy(
    parents_BN: Int[Array, "batch nodes"],
    log_probs_BN: Float[Array, "batch nodes"],
    path_BNLW: UInt32[Array, "batch nodes layers words"],
    buffer_LW: UInt32[Array, "layers words"],
    budget: int | Int[Array, ""],
    eps: float | Float[Array, ""],
    device_experts: int | None,
) -> Bool[Array, "batch nodes"]:
    """Chooses one node a round for sequences that share one buffer, at most `budget` for each of them."""
    batch, nodes = parents_BN.shape
    probability_BN = jnp.exp(log_probs_BN)
    eps = jnp.maximum(eps, jnp.finfo(jnp.float32).tiny)  # a smaller one would be 0 in float32

    def pick(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        chosen_BN, buffer_LW = carry
        behind_BN = (parents_BN == ROOT) | jnp.take_along_axis(chosen_BN, jnp.maximum(parents_BN, 0), axis=1)
        open_BN = behind_BN & ~chosen_BN & (jnp.sum(chosen_BN, axis=1, keepdims=True) < budget)
        score_BN = probability_BN / (new_experts(path_BNLW, buffer_LW, device_experts) + eps)
        best = jnp.argmax(jnp.where(open_BN, score_BN, -1.0))
        picked_BN = (jnp.arange(batch * nodes) == best).reshape(batch, nodes) & open_BN
        added_LW = expert_bits.union(jnp.where(picked_BN[..., None, None], path_BNLW, jnp.uint32(0)), axis=(0, 1))
        return chosen_BN | picked_BN, buffer_LW | added_LW

    nothing_BN = jnp.zeros((batch, nodes), bool)
    return lax.fori_loop(0, budget * batch, pick, (nothing_BN, buffer_LW))[0]


def selection_of(chosen_BN: Bool[Array, "batch nodes"], budget: int) -> Selection:
    """Chosen nodes as ascending indices."""
    nodes = chosen_BN.shape[1]
    index_BN = jnp.where(chosen_BN, jnp.arange(nodes), nodes)
    first_BM = jnp.sort(index_BN, axis=1)[:, :budget]
    return Selection(nodes_BM=jnp.minimum(first_BM, nodes - 1), count_B=jnp.sum(chosen_BN, axis=1, dtype=jnp.int32))
