"""Estimates with intervals: as columns, as text, as error bars."""

import numpy as np
import pandas as pd

from nope_probe.figures.intervals import (
    bound_columns,
    error_bars,
    interval_of,
    interval_text,
    percent,
)


def test_bounds_have_the_name_of_their_estimate() -> None:
    row = {"share": 0.5, "share_low": 0.4, "share_high": 0.6, "rms": 3, "rms_low": 2, "rms_high": 4}
    assert interval_of(row, "share") == (0.5, 0.4, 0.6)
    assert interval_of(pd.Series(row), "rms") == (3.0, 2.0, 4.0)
    assert bound_columns("lost") == ("lost_low", "lost_high")


def test_a_missing_estimate_is_no_pattern() -> None:
    nan = float("nan")
    assert interval_text((nan, nan, nan), "+.2f", "%") == "no pattern"


def test_text_has_the_unit_behind_the_estimate_and_no_negative_zero() -> None:
    assert interval_text((-0.0001, -0.2, 0.3)) == "0.000 [-0.200, 0.300]"
    assert interval_text(percent((0.25, -0.125, 0.5)), "z.1f", "%") == "25.0% [-12.5, 50.0]"


def test_error_bars_reach_from_the_lower_to_the_upper_bound() -> None:
    values, lows, highs = np.array([1.0, 2.0]), np.array([0.5, 1.75]), np.array([4.0, 2.25])
    bars = error_bars(values, lows, highs)
    np.testing.assert_array_equal(bars["array"], [3.0, 0.25])
    np.testing.assert_array_equal(bars["arrayminus"], [0.5, 0.25])
