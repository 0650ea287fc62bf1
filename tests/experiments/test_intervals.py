import math

import numpy as np

from experiments.intervals import mean_interval, median_interval


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


def test_one_value_has_no_width_and_no_value_is_nan() -> None:
    assert (median_interval([4.0]).low, median_interval([4.0]).high) == (4.0, 4.0)
    assert math.isnan(median_interval([float("nan")]).middle)
