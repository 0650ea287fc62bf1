"""Fitted acceptance models, kept with the drafter: `FOLDER/acceptance.json`, one fit a decoding temperature."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pydantic

from ecospec_jax.calibration import FEATURES, Calibration
from ecospec_jax.config import STRICT, read_json, write_json
from ecospec_jax.errors import UserError

FORMAT = 1
ACCEPTANCE = "acceptance.json"


@dataclass(frozen=True)
class AcceptanceFit:
    """A logistic model fitted at one temperature.

    Attributes:
        temperature: of the decoding it was fitted on.
        weights: one a feature, in the order of `calibration.FEATURES`.
        precision: inverse covariance of the weights.
        edges: observed edges it was fitted on.
        error_before, error_after: expected calibration error on held-out edges, of the drafter's own probabilities and
            of the model's.
    """

    temperature: float
    weights: tuple[float, ...]
    precision: tuple[tuple[float, ...], ...]
    edges: int
    error_before: float
    error_after: float
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def __post_init__(self) -> None:
        size = len(FEATURES)
        if len(self.weights) != size or [len(row) for row in self.precision] != [size] * size:
            raise UserError(f"an acceptance model has {size} weights and {size} x {size} precisions")
        if not (np.isfinite(self.weights).all() and np.isfinite(self.precision).all()):
            raise UserError("an acceptance model holds numbers that are not finite")
        if not (np.linalg.eigvalsh(self.precision) > 0).all():
            raise UserError("the precision of an acceptance model must be positive definite")
        if self.weights[FEATURES.index("logit")] < 0:
            raise UserError("an acceptance model must rise with the drafter's probability")


@dataclass(frozen=True)
class Acceptance:
    """All fits of one drafter.

    Attributes:
        format: version of this layout.
        drafter_hash: of the drafter they belong to (`Manifest.drafter_hash`).
        fits: one a temperature.
    """

    format: int
    drafter_hash: str
    fits: tuple[AcceptanceFit, ...]
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = STRICT

    def at(self, temperature: float) -> Calibration:
        """The model for a temperature; there being none is a `UserError`."""
        for fit in self.fits:
            if fit.temperature == temperature:
                return Calibration(jnp.float32(fit.weights), jnp.float32(fit.precision))
        fitted = ", ".join(f"{fit.temperature:g}" for fit in self.fits)
        raise UserError(
            f"acceptance was fitted at temperature {fitted}, not {temperature:g}: "
            "run python -m experiments.fit_acceptance at this temperature"
        )

    def with_fit(self, fit: AcceptanceFit) -> "Acceptance":
        """With `fit` in place of an earlier one of the same temperature."""
        others = [old for old in self.fits if old.temperature != fit.temperature]
        ordered = sorted([*others, fit], key=lambda one: one.temperature)
        return Acceptance(self.format, self.drafter_hash, tuple(ordered))


def write_acceptance(path: Path, acceptance: Acceptance) -> None:
    """Writes the file whole or not at all."""
    write_json(path, acceptance)


def read_acceptance(path: Path, drafter_hash: str) -> Acceptance:
    """Reads what `write_acceptance` wrote; a wrong file, or another drafter's, is a `UserError`."""
    acceptance = read_json(Acceptance, path)
    if acceptance.format != FORMAT:
        raise UserError(f"{path}: format {acceptance.format}, this version reads {FORMAT}")
    if acceptance.drafter_hash != drafter_hash:
        raise UserError(f"{path}: was fitted for another drafter")
    return acceptance
