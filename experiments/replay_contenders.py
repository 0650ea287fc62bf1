"""The methods and settings that a replay compares."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ecospec_jax.config import RoutingShape, SpecConfig
from ecospec_jax.methods import Method
from ecospec_jax.rate import rate
from ecospec_jax.selection import Economy, ExpertForecast, cost_aware, cost_aware_nodes, likelihood, selection_of
from ecospec_jax.tree import CandidateTree, Selection

SHARES = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0)  # of a token's experts that a node is taken to add


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """Settings that are data, so that all values of a family share one compilation.

    Attributes:
        budget: nodes of a fixed tree.
        eps: of the cost-aware score.
        pairs: (layer, expert) pairs that a node is taken to add.
    """

    budget: int = 0
    eps: float = 1.0
    pairs: float = 0.0


NO_KNOBS = Knobs()
Tunable = Callable[[Knobs, CandidateTree, ExpertForecast | None, SpecConfig, Economy | None], Selection]


def likeliest(
    knobs: Knobs, tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None
) -> Selection:
    """What `likelihood` selects with this budget, as a part of `spec.budget` slots."""
    return selection_of(_rank_BN(tree) < knobs.budget, spec.budget)


def cheapest(
    knobs: Knobs, tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None
) -> Selection:
    """What `cost_aware` selects with this budget and eps, as a part of `spec.budget` slots."""
    assert forecast is not None
    chosen_BN = cost_aware_nodes(
        tree,
        forecast,
        knobs.budget,
        knobs.eps,
        shared_buffer=spec.shared_buffer,
        device_experts=spec.device_experts,
    )
    return selection_of(chosen_BN, spec.budget)


def worthwhile(
    knobs: Knobs, tree: CandidateTree, forecast: ExpertForecast | None, spec: SpecConfig, economy: Economy | None
) -> Selection:
    """Selection by rate without a predictor: every node is taken to add the same number of experts.

    Calibrated probabilities never increase along a path, so the nodes that are worth it are prefix-closed.
    """
    assert economy is not None
    worth_BN = jnp.exp(tree.log_probs_BN) > economy.price(jnp.asarray(knobs.pairs), jnp.int32(1))
    return selection_of(worth_BN & (_rank_BN(tree) < spec.budget), spec.budget)


def _rank_BN(tree: CandidateTree) -> Int[Array, "batch nodes"]:
    """Place of each node among the likeliest; of equals the earlier is first, so a parent is before its children."""
    return jnp.argsort(jnp.argsort(-tree.log_probs_BN, axis=1, stable=True), axis=1)


@dataclass(frozen=True)
class Contender:
    """One setting of one method.

    Attributes:
        family: methods of a family differ in their settings alone; the best setting is chosen on training prompts.
        method: a library method, or one like it.
        spec: sizes and settings.
        setting: what tells it from others of the family.
        tunable, knobs: in place of the method's policy, one that takes its settings as data.
        clairvoyant: it sees the outcomes.
    """

    family: str
    method: Method
    spec: SpecConfig
    setting: str
    tunable: Tunable | None = None
    knobs: Knobs = NO_KNOBS
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
    found, largest = [], replace(spec, budget=max(budgets))
    for budget in budgets:
        fixed = replace(spec, budget=budget)  # refuses what cannot be
        method, knobs = Method("likelihood", likelihood), Knobs(budget=fixed.budget)
        found.append(Contender("likelihood", method, largest, f"budget {budget}", likeliest, knobs))
        if budget == 0:
            continue
        for one_eps, calibrated in itertools.product(eps, (False, True)):
            family = "ecospec-calibrated" if calibrated else "ecospec"
            method = Method(family, cost_aware, predictor=paper_predictor, calibrated=calibrated)
            setting, knobs = f"budget {budget}, eps {one_eps:g}", Knobs(budget, replace(fixed, eps=one_eps).eps)
            found.append(Contender(family, method, largest, setting, cheapest, knobs))
    for share in SHARES:
        method = Method("size", rate, calibrated=True, adaptive=True)
        knobs = Knobs(pairs=share * routing.layers * routing.k)
        found.append(Contender("size by C", method, largest, f"{share:g} of a token's experts", worthwhile, knobs))
    for name in (*predictors, "oracle"):
        method = Method("rate", rate, predictor=name, calibrated=True, adaptive=True)
        found.append(Contender(f"rate {name}", method, largest, ""))
    knowing = Method("clairvoyant", rate, predictor="oracle", adaptive=True)
    found.append(Contender("clairvoyant", knowing, largest, "", clairvoyant=True))
    return found
