"""Decoding methods by name: which drafter runs and which policy selects."""

from dataclasses import dataclass

from ecospec_jax.errors import UserError
from ecospec_jax.selection import Policy, likelihood


@dataclass(frozen=True)
class Method:
    """How tokens are proposed and selected; the output distribution is the same for all.

    Attributes:
        name: what users call it.
        drafts: whether the drafter runs; without it nothing is speculated.
        policy: selects the nodes to verify.
    """

    name: str
    drafts: bool
    policy: Policy


METHODS = {
    method.name: method
    for method in (
        Method("ar", drafts=False, policy=likelihood),
        Method("likelihood", drafts=True, policy=likelihood),
    )
}


def get_method(name: str) -> Method:
    """Looks a method up; an unknown name is a `UserError`."""
    if name not in METHODS:
        raise UserError(f"unknown method '{name}'; known: {', '.join(METHODS)}")
    return METHODS[name]
