"""Medians, means and ratios of sums with bootstrap intervals, and paired tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import permutation_test

RESAMPLES = 2000
Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Interval:
    """A middle value with its 95 % percentile-bootstrap interval."""

    middle: float
    low: float
    high: float

    def cell(self, sign: str = "") -> str:
        """For a table; `sign` "+" shows that of positive numbers too."""
        return f"{self.middle:{sign}.3f} [{self.low:{sign}.3f}, {self.high:{sign}.3f}]"


def error_bars(intervals: Sequence[Interval]) -> np.ndarray:
    """What reaches below and above each middle value, `[2, intervals]`, as Matplotlib takes it."""
    bars = [[one.middle - one.low for one in intervals], [one.high - one.middle for one in intervals]]
    return np.maximum(bars, 0)  # rounding may leave a middle value outside


def median_interval(values: Sequence[float]) -> Interval:
    """Median over the finite values; nan where there is none."""
    return _interval(values, np.median)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean over the finite values; nan where there is none."""
    return _interval(values, np.mean)


def ratio_interval(tops: Values, bottoms: Values) -> Interval:
    """Sum of `tops` over sum of `bottoms`; the pairs are resampled."""
    return difference_interval(tops, bottoms, None)


def difference_interval(tops: Values, bottoms: Values, other_bottoms: Values | None) -> Interval:
    """The ratio of sums less that with `other_bottoms` in place of `bottoms`; all three are resampled together."""
    if len(tops) == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    values = [np.asarray(one, np.float64) for one in (tops, bottoms)]
    others = [values[0], np.asarray(other_bottoms, np.float64)] if other_bottoms is not None else None

    def figure(places: np.ndarray) -> np.ndarray:
        top, bottom = (one[places].sum(axis=-1) for one in values)
        ratio = top / bottom
        return ratio if others is None else ratio - others[0][places].sum(axis=-1) / others[1][places].sum(axis=-1)

    draws = np.random.default_rng(0).integers(0, len(tops), (RESAMPLES, len(tops)))
    with np.errstate(invalid="ignore", divide="ignore"):
        low, high = np.percentile(figure(draws), [2.5, 97.5])
        return Interval(float(figure(np.arange(len(tops)))), float(low), float(high))


def paired_p(mine: Values, theirs: Values) -> float:
    """Two-sided p of no difference in the mean: signs of the pairs' differences are flipped, all ways or 9999 drawn.

    Pairs with an undefined value do not count; nan where none is left.
    """
    difference = np.asarray(mine, np.float64) - np.asarray(theirs, np.float64)
    difference = difference[np.isfinite(difference)]
    if difference.size == 0:
        return float("nan")
    if difference.size == 1:  # both signs are equally far from 0
        return 1.0
    found = permutation_test((difference,), np.mean, permutation_type="samples", rng=np.random.default_rng(0))
    return float(found.pvalue)


def _interval(values: Sequence[float], middle: Callable[..., np.ndarray]) -> Interval:
    """Resampling is seeded, so a rerun gives the same."""
    finite = np.array([value for value in values if np.isfinite(value)])
    if finite.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    draws = np.random.default_rng(0).integers(0, finite.size, (RESAMPLES, finite.size))
    low, high = np.percentile(middle(finite[draws], axis=1), [2.5, 97.5])
    return Interval(float(middle(finite)), float(low), float(high))
