"""Selection that maximises the rate of tokens: which nodes to verify, and how many (docs/design.md section 8).

Over prefix-closed sets S of candidate nodes, the empty one included, maximise

    sum of C(t) for t in S  -  rate * (per_expert * new experts of S + per_row * |S|)

where C(t) is the calibrated probability that t is accepted and `rate` the tokens per unit of cost that decoding makes
anyway. At the fixed point (Dinkelbach) the set so chosen maximises tokens per unit of cost.
"""

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from ecospec_jax import expert_bits
from ecospec_jax.config import SpecConfig
from ecospec_jax.errors import UserError
from ecospec_jax.selection import Economy, ExpertForecast, new_experts, path_sets, selection_of
from ecospec_jax.tree import ROOT, CandidateTree, Selection

MOST_EXHAUSTIVE_NODES = 10  # whose subsets are 1024


def rate(tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None) -> Selection:
    """The set that is worth most at the present rate; `spec.budget` is only a cap.

    Exhaustive for one sequence and a pool of at most `MOST_EXHAUSTIVE_NODES`, else greedy. Sequences of a batch share
    the union of their experts.
    """
    if forecast is None or economy is None:
        raise ValueError("selection by rate needs an expert predictor and a cost model")
    if spec.device_experts is not None:
        raise UserError("selection by rate counts the experts of all devices; it takes no device_experts")
    batch, nodes = tree.tokens_BN.shape
    exhaustive = batch == 1 and nodes <= MOST_EXHAUSTIVE_NODES
    chosen_BN = (best_set if exhaustive else greedy_set)(tree, forecast, spec, economy)
    return selection_of(chosen_BN, spec.budget)


def best_set(
    tree: CandidateTree, forecast: ExpertForecast, spec: SpecConfig, economy: Economy
) -> Bool[Array, "batch nodes"]:
    """The optimum over all prefix-closed sets of one sequence; of equals the smaller."""
    nodes = tree.tokens_BN.shape[1]
    sets_SN = _sets(nodes, spec.budget)
    parents_N = tree.parents_BN[0]
    behind_SN = (parents_N == ROOT) | sets_SN[:, jnp.maximum(parents_N, 0)]
    closed_S = jnp.all(~sets_SN | behind_SN, axis=1)
    union_SLW = expert_bits.union(jnp.where(sets_SN[:, :, None, None], forecast.nodes_BNLW[0], jnp.uint32(0)), axis=1)
    new_S = jnp.sum(expert_bits.count(union_SLW & ~forecast.root_BLW[0]), axis=-1)
    gain_S = jnp.sum(jnp.where(sets_SN, jnp.exp(tree.log_probs_BN[0]), 0.0), axis=1)
    worth_S = gain_S - economy.price(new_S, jnp.sum(sets_SN, axis=1))
    return sets_SN[jnp.argmax(jnp.where(closed_S, worth_S, -jnp.inf))][None]


def _sets(nodes: int, budget: int) -> Bool[Array, "sets nodes"]:
    """Every set of at most `budget` nodes, smaller ones first."""
    members = [chosen for size in range(budget + 1) for chosen in itertools.combinations(range(nodes), size)]
    sets_SN = np.zeros((len(members), nodes), bool)
    for row, chosen in zip(sets_SN, members, strict=True):
        row[list(chosen)] = True
    return jnp.asarray(sets_SN)


def greedy_set(
    tree: CandidateTree, forecast: ExpertForecast, spec: SpecConfig, economy: Economy
) -> Bool[Array, "batch nodes"]:
    """Again and again the node that, with its missing ancestors, is worth most; until none is worth anything."""
    batch, nodes = tree.tokens_BN.shape
    path_BNLW = path_sets(tree, forecast)
    accepted_BN = jnp.exp(tree.log_probs_BN)
    paid_LW = expert_bits.union(forecast.root_BLW, axis=0)

    def worth_BN(chosen_BN: Array, paid_LW: Array) -> Float[Array, "batch nodes"]:
        missing_BNN = tree.ancestors_BNN & ~chosen_BN[:, None, :]
        gain_BN = jnp.sum(jnp.where(missing_BNN, accepted_BN[:, None, :], 0.0), axis=-1)
        more_BN = jnp.sum(missing_BNN, axis=-1)
        room_BN = jnp.sum(chosen_BN, axis=1, keepdims=True) + more_BN <= spec.budget
        worth = gain_BN - economy.price(new_experts(path_BNLW, paid_LW), more_BN)
        return jnp.where(room_BN & ~chosen_BN, worth, -jnp.inf)

    def going(carry: tuple[Array, Array]) -> Array:
        return jnp.any(worth_BN(*carry) > 0)

    def pick(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        chosen_BN, paid_LW = carry
        best = jnp.argmax(worth_BN(chosen_BN, paid_LW))
        picked_BN = (jnp.arange(batch * nodes) == best).reshape(batch, nodes)
        added_LW = expert_bits.union(jnp.where(picked_BN[..., None, None], path_BNLW, jnp.uint32(0)), axis=(0, 1))
        joined_BN = jnp.any(picked_BN[:, :, None] & tree.ancestors_BNN, axis=1)
        return chosen_BN | joined_BN, paid_LW | added_LW

    return lax.while_loop(going, pick, (jnp.zeros((batch, nodes), bool), paid_LW))[0]
