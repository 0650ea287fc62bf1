"""Medians and means with bootstrap intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A middle value with its 95 % percentile-bootstrap interval."""

    middle: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Median over the finite values; nan where there is none."""
    return _interval(values, np.median)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean over the finite values; nan where there is none."""
    return _interval(values, np.mean)


def _interval(values: Sequence[float], middle: Callable[..., np.ndarray]) -> Interval:
    """Resampling is seeded, so a rerun gives the same."""
    finite = np.array([value for value in values if np.isfinite(value)])
    if finite.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    draws = np.random.default_rng(0).integers(0, finite.size, (RESAMPLES, finite.size))
    low, high = np.percentile(middle(finite[draws], axis=1), [2.5, 97.5])
    return Interval(float(middle(finite)), float(low), float(high))
