import itertools
import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from experiments.intervals import Interval, error_bars, mean_interval, median_interval, paired_p


def test_middle_values_are_those_of_the_finite_values() -> None:
    values = [3.0, float("nan"), 1.0, 2.0, 10.0]
    assert median_interval(values).middle == 2.5
    assert mean_interval(values).middle == 4.0


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        interval = mean_interval(random.normal(5.0, 1.0, 40).tolist())
        covered += interval.low <= 5.0 <= interval.high
    assert 175 <= covered <= 199


def test_error_bars_reach_from_the_middle_to_the_ends() -> None:
    bars = error_bars([Interval(2.0, 1.5, 4.0), Interval(3.0, 3.5, 3.5)])  # the second lies beside its interval
    assert bars.tolist() == [[0.5, 0.0], [2.0, 0.5]]


def test_one_value_has_no_width_and_no_value_is_nan() -> None:
    assert (median_interval([4.0]).low, median_interval([4.0]).high) == (4.0, 4.0)
    assert math.isnan(median_interval([float("nan")]).middle)


def test_a_paired_test_counts_the_sign_flips_that_are_as_far_from_zero() -> None:
    mine, theirs = [1.0, 2.0, 3.5, 2.2, 9.0, 1.1, 4.0], [0.5, 2.4, 3.0, 2.0, 3.0, 1.0, math.nan]
    differences = [a - b for a, b in zip(mine, theirs, strict=True) if math.isfinite(a - b)]
    flipped = [
        abs(sum(sign * one for sign, one in zip(signs, differences, strict=True)))
        for signs in itertools.product([1, -1], repeat=len(differences))
    ]
    expected = sum(one >= abs(sum(differences)) - 1e-9 for one in flipped) / len(flipped)
    assert paired_p(mine, theirs) == pytest.approx(expected) == paired_p(theirs, mine)
    assert 0.05 < expected < 0.5


def test_a_paired_test_of_many_values_agrees_with_student() -> None:
    random = np.random.default_rng(2)
    theirs = random.normal(size=80)
    for shift in (0.0, 0.15, 0.3):
        mine = theirs + shift + 0.7 * random.normal(size=80)
        assert paired_p(mine, theirs) == pytest.approx(ttest_rel(mine, theirs).pvalue, abs=0.02)


def test_a_paired_test_of_few_values() -> None:
    assert paired_p([2.0], [1.0]) == 1 and paired_p([1.0, 2.0], [1.0, 2.0]) == 1
    assert math.isnan(paired_p([], [])) and math.isnan(paired_p([math.nan], [1.0]))
