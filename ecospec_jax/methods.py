"""Decoding methods by name: a method is a drafter, a predictor and a policy.

A policy of your own makes a method of your own; `Decoder.generate(method=Method(...))` takes it:

    def first_level(tree, forecast, spec, economy):           # arrays in, a Selection out, inside jit
        nodes = jnp.broadcast_to(jnp.arange(spec.budget), (tree.tokens_BN.shape[0], spec.budget))
        return Selection(nodes, jnp.full(nodes.shape[0], min(spec.budget, spec.branch)))

    decoder.generate(prompts, method=Method("first-level", policy=first_level))
"""

from dataclasses import dataclass, replace

from ecospec_jax.errors import UserError
from ecospec_jax.rate import rate
from ecospec_jax.selection import Policy, cost_aware, likelihood


@dataclass(frozen=True)
class Method:
    """How tokens are proposed and selected; the output distribution is the same for all.

    Attributes:
        name: what users call it.
        policy: selects the nodes to verify.
        drafts: whether the drafter runs; without it nothing is speculated.
        predictor: name of the expert predictor that informs the policy, if any.
        calibrated: whether the policy sees learned acceptance probabilities in place of the drafter's.
        adaptive: whether each step decides if it drafts and how many rows it verifies.
    """

    name: str
    policy: Policy
    drafts: bool = True
    predictor: str | None = None
    calibrated: bool = False
    adaptive: bool = False

    @property
    def learns(self) -> bool:
        """Whether decoding changes what later decoding does (its speed, never its tokens)."""
        return self.calibrated or self.adaptive


METHODS = {
    method.name: method
    for method in (
        Method("ar", likelihood, drafts=False),
        Method("likelihood", likelihood),
        Method("ecospec", cost_aware, predictor="backbone"),
        Method("ecospec-table", cost_aware, predictor="token_table"),
        Method("ecospec-frequency", cost_aware, predictor="frequency"),
        Method("ecospec-previous", cost_aware, predictor="previous"),
        Method("ecospec-calibrated", cost_aware, predictor="backbone", calibrated=True),
        Method("rate", rate, predictor="backbone", calibrated=True, adaptive=True),
        Method("rate-table", rate, predictor="token_table", calibrated=True, adaptive=True),
        Method("rate-oracle", rate, predictor="oracle", calibrated=True, adaptive=True),
        Method("oracle", cost_aware, predictor="oracle"),
    )
}


def get_method(method: str | Method) -> Method:
    """Looks a method up by name, `NAME` or `NAME@PREDICTOR` with another predictor; unknown ones are a `UserError`."""
    if isinstance(method, Method):
        return method
    name, separator, predictor = method.partition("@")
    if name not in METHODS:
        raise UserError(f"unknown method '{name}'; known: {', '.join(METHODS)}")
    found = METHODS[name]
    if not separator:
        return found
    if found.predictor is None or not predictor:
        raise UserError(
            f"method '{method}': {name} takes no predictor" if predictor else f"'{method}' names no predictor"
        )
    return replace(found, name=method, predictor=predictor)
