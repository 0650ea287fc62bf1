"""The methods and settings that a replay compares."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from ecospec_jax.config import RoutingShape, SpecConfig
from ecospec_jax.methods import Method
from ecospec_jax.rate import rate
from ecospec_jax.selection import Economy, ExpertForecast, cost_aware, likelihood, selection_of
from ecospec_jax.tree import CandidateTree, Selection

SHARES = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0)  # of a token's experts that a node is taken to add


@dataclass(frozen=True)
class ConstantNew:
    """Selection by rate without a predictor: every node is taken to add the same number of experts.

    Calibrated probabilities never increase along a path, so the nodes that are worth it are prefix-closed.

    Attributes:
        pairs: (layer, expert) pairs that a node adds.
    """

    pairs: float

    def __call__(
        self, tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None
    ) -> Selection:
        """The likeliest nodes that are worth their price, at most `spec.budget`."""
        assert economy is not None
        best = likelihood(tree, None, spec)
        nodes = tree.tokens_BN.shape[1]
        likely_BN = jnp.any(best.nodes_BM[:, :, None] == jnp.arange(nodes), axis=1)
        price = economy.price(jnp.float32(self.pairs), jnp.float32(1))
        return selection_of(likely_BN & (jnp.exp(tree.log_probs_BN) > price), spec.budget)


@dataclass(frozen=True)
class Contender:
    """One setting of one method.

    Attributes:
        family: methods of a family differ in their settings alone; the best setting is chosen on training prompts.
        method: a library method, or one with a policy of this file.
        spec: sizes and settings.
        setting: what tells it from others of the family.
        clairvoyant: it sees the outcomes.
    """

    family: str
    method: Method
    spec: SpecConfig
    setting: str
    clairvoyant: bool = False

    @property
    def bits(self) -> str | None:
        """Where its expert bits come from."""
        return self.method.predictor


def contenders(
    spec: SpecConfig,
    routing: RoutingShape,
    predictors: Sequence[str],
    *,
    budgets: Sequence[int],
    eps: Sequence[float],
    paper_predictor: str,
) -> list[Contender]:
    """Everything that is compared.

    Args:
        spec: size of the candidate tree.
        routing: of the recorded target.
        predictors: names of those recorded; `oracle` always joins them.
        budgets: sizes of fixed trees; the largest caps the others.
        eps: of the cost-aware score.
        paper_predictor: informs `cost_aware`.
    """
    found = []
    for budget in budgets:
        fixed = replace(spec, budget=budget)
        found.append(Contender("likelihood", Method("likelihood", likelihood), fixed, f"budget {budget}"))
        if budget == 0:
            continue
        for one_eps, calibrated in itertools.product(eps, (False, True)):
            family = "ecospec-calibrated" if calibrated else "ecospec"
            method = Method(family, cost_aware, predictor=paper_predictor, calibrated=calibrated)
            weighed = replace(fixed, eps=one_eps)
            found.append(Contender(family, method, weighed, f"budget {budget}, eps {one_eps:g}"))
    largest = replace(spec, budget=max(budgets))
    for share in SHARES:
        policy = ConstantNew(share * routing.layers * routing.k)
        method = Method("size", policy, calibrated=True, adaptive=True)
        found.append(Contender("size by C", method, largest, f"{share:g} of a token's experts"))
    for name in (*predictors, "oracle"):
        method = Method("rate", rate, predictor=name, calibrated=True, adaptive=True)
        found.append(Contender(f"rate {name}", method, largest, ""))
    knowing = Method("clairvoyant", rate, predictor="oracle", adaptive=True)
    found.append(Contender("clairvoyant", knowing, largest, "", clairvoyant=True))
    return found
