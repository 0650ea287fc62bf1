"""How likely the target accepts a drafted node: a logistic model of each edge of the candidate tree (design section 8).

The drafter's own probability is no such thing: under greedy decoding a first child with P = 0.3 is accepted about half
the time. Labels are free: wherever the accepted path passes, the token that the target draws tells the outcome of all
candidate children there, verified or not.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ecospec_jax.tree import ROOT, CandidateTree
from ecospec_jax.verification import AcceptedPath

FEATURES = ("bias", "logit", "depth", "rank", "sibling")
_LOGIT = FEATURES.index("logit")
_BOUND = 12.0  # of logits, so that probabilities stay inside (0, 1) in float32
_PRIOR_STRENGTH = 4.0  # pseudo-observations behind a model that was not fitted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Calibration:
    """The logistic model, and how certain it is.

    Attributes:
        weights_F: one weight a feature; that of the edge's own logit is not negative, so that the calibrated
            probability rises with the drafter's.
        precision_FF: inverse covariance of the weights: what further observations are weighed against.
    """

    weights_F: Float[Array, " features"]
    precision_FF: Float[Array, "features features"]

    @staticmethod
    def trusting() -> "Calibration":
        """Takes the drafter at its word until observations say otherwise."""
        weights_F = jnp.zeros(len(FEATURES), jnp.float32).at[_LOGIT].set(1.0)
        return Calibration(weights_F, _PRIOR_STRENGTH * jnp.eye(len(FEATURES), dtype=jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcomes:
    """Edges of a candidate tree whose outcome one verification revealed.

    Attributes:
        known_BN: the node's parent is on the accepted path, or the root.
        accepted_BN: the target drew this node's token behind its parent; false where unknown.
    """

    known_BN: Bool[Array, "batch nodes"]
    accepted_BN: Bool[Array, "batch nodes"]


def edge_features(tree: CandidateTree) -> Float[Array, "batch nodes features"]:
    """Of each node: 1, logit of its edge's draft probability, depth - 1, rank and best log-probability of siblings."""
    batch, nodes = tree.tokens_BN.shape
    parents_BN = tree.parents_BN
    above_BN = jnp.take_along_axis(tree.log_probs_BN, jnp.maximum(parents_BN, 0), axis=1)
    edge_BN = tree.log_probs_BN - jnp.where(parents_BN == ROOT, 0.0, above_BN)
    edge_BN = jnp.clip(jnp.nan_to_num(edge_BN, nan=-_BOUND, neginf=-_BOUND), -_BOUND, -1e-6)
    logit_BN = jnp.clip(edge_BN - jnp.log(-jnp.expm1(edge_BN)), -_BOUND, _BOUND)
    others_BNN = (parents_BN[:, :, None] == parents_BN[:, None, :]) & ~jnp.eye(nodes, dtype=bool)
    earlier_BNN = others_BNN & (jnp.arange(nodes)[None, :] < jnp.arange(nodes)[:, None])
    sibling_BN = jnp.max(jnp.where(others_BNN, edge_BN[:, None, :], -_BOUND), axis=-1, initial=-_BOUND)
    columns = (
        jnp.ones((batch, nodes), jnp.float32),
        logit_BN,
        jnp.broadcast_to(tree.depths_N - 1, (batch, nodes)),
        jnp.sum(earlier_BNN, axis=-1),
        sibling_BN,
    )
    return jnp.stack([column.astype(jnp.float32) for column in columns], axis=-1)


def edge_log_probs(
    features_BNF: Float[Array, "batch nodes features"], weights_F: Float[Array, " features"]
) -> Float[Array, "batch nodes"]:
    """Log of the calibrated probability that an edge is accepted once its parent is; strictly between -inf and 0."""
    return jax.nn.log_sigmoid(jnp.clip(features_BNF @ weights_F, -_BOUND, _BOUND))


def calibrate(tree: CandidateTree, calibration: Calibration) -> CandidateTree:
    """The tree with C, the calibrated probability that a node is accepted, in place of the drafter's P."""
    edges_BN = edge_log_probs(edge_features(tree), calibration.weights_F)
    # A matrix product in float32 would do, but TPUs round its operands.
    log_probs_BN = jnp.sum(jnp.where(tree.ancestors_BNN, edges_BN[:, None, :], 0.0), axis=-1)
    return replace(tree, log_probs_BN=log_probs_BN)


def outcomes(
    tree: CandidateTree,
    path: AcceptedPath,
    pool_rows_BR: Array,
    live_B: Bool[Array, " batch"],
) -> Outcomes:
    """What a verification revealed; `pool_rows_BR` are the rows that the verify tree's rows have in the whole pool."""
    batch, nodes = tree.tokens_BN.shape
    place_P = jnp.arange(path.rows_BP.shape[1])
    # 0 is the root; places beyond the path name no row.
    pool_BP = jnp.take_along_axis(pool_rows_BR, path.rows_BP, axis=1)
    pool_BP = jnp.where(place_P < path.count_B[:, None], pool_BP, -1)
    parent_BNP = (tree.parents_BN[:, :, None] + 1) == pool_BP[:, None, :]
    known_BN = jnp.any(parent_BNP, axis=-1) & live_B[:, None]
    drawn_BN = jnp.sum(jnp.where(parent_BNP, path.tokens_BP[:, None, :], 0), axis=-1)
    return Outcomes(known_BN, known_BN & (drawn_BN == tree.tokens_BN))


def learn(calibration: Calibration, features_BNF: Float[Array, "batch nodes features"], seen: Outcomes) -> Calibration:
    """One step of online Newton on the logistic loss of the edges whose outcome is known."""
    rows_XF = features_BNF.reshape(-1, features_BNF.shape[-1])
    known_X = seen.known_BN.reshape(-1).astype(jnp.float32)
    probability_X = jnp.exp(edge_log_probs(rows_XF[None], calibration.weights_F)[0])
    surprise_X = (seen.accepted_BN.reshape(-1) - probability_X) * known_X
    spread_X = probability_X * (1 - probability_X) * known_X
    precision_FF = calibration.precision_FF + jnp.einsum("xf,x,xg->fg", rows_XF, spread_X, rows_XF)
    step_F = jnp.linalg.solve(precision_FF, jnp.einsum("xf,x->f", rows_XF, surprise_X))
    weights_F = calibration.weights_F + jnp.clip(step_F, -1.0, 1.0)
    return Calibration(weights_F.at[_LOGIT].set(jnp.maximum(weights_F[_LOGIT], 0.0)), precision_FF)
