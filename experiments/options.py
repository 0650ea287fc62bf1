"""Checks of options that several jobs share."""

from typing import Any

from ecospec_jax import UserError


def require_positive(settings: Any, *names: str) -> None:
    """Each of these options must be at least 1, or not given."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
