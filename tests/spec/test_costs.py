"""Seconds by size, from measurements with outliers in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.costs import ENOUGH, STALE, Curve


def measured(seconds: dict[int, float], times: int = ENOUGH) -> Curve:
    curve = Curve()
    for size, each in seconds.items():
        for step in range(times):
            curve.add(size, each, step)
    return curve


def test_nothing_is_known_of_an_empty_curve() -> None:
    assert Curve().at(1) is None and Curve().largest == 0 and not Curve().sure(1, 0)


@given(st.floats(0.1, 10), st.floats(0, 1), st.integers(1, 500))
def test_a_straight_line_is_found(base: float, slope: float, size: int) -> None:
    curve = measured({n: base + slope * n for n in (1, 8, 64)})
    assert curve.at(size) == pytest.approx(base + slope * size)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=9), st.floats(1e3, 1e9))
def test_an_outlier_is_not_believed(seconds: list[float], outlier: float) -> None:
    curve = Curve()
    for each in [outlier, *seconds]:
        curve.add(4, each, 0)
    assert min(seconds) <= (curve.at(4) or 0.0) <= max(seconds)


def test_more_rows_never_cost_less_than_the_largest_that_was_measured() -> None:
    curve = measured({1: 2.0, 8: 1.0})
    assert curve.at(100) == 1.0


def test_a_size_is_sure_by_its_own_measurements_for_a_while() -> None:
    curve = measured({64: 1.0}, ENOUGH - 1)
    assert not curve.sure(64, ENOUGH)
    curve.add(60, 1.0, ENOUGH)
    assert curve.sure(64, ENOUGH) and not curve.sure(32, ENOUGH)
    assert curve.sure(64, ENOUGH + STALE) and not curve.sure(64, ENOUGH + STALE + 1)


def test_old_measurements_make_way_for_the_first_new_one() -> None:
    curve = measured({4: 1.0})
    curve.add(4, 3.0, 2 * STALE)
    assert curve.at(4) == 3.0 and not curve.sure(4, 2 * STALE)
