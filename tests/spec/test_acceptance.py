"""Rates by depth, and what is taken for granted before anything is known."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.acceptance import HOPE, LEAST, Acceptance


def test_hope_comes_first() -> None:
    assert Acceptance(3, 10).rates == pytest.approx([HOPE] * 3)


def test_what_was_not_reached_tells_nothing_of_itself() -> None:
    known = Acceptance(8, 100)
    for _ in range(1000):
        known.add(8, 2)
    assert min(known.rates[:2]) > 0.9 and known.rates[2] < 0.1
    prior = Acceptance(8, 10)
    own = Acceptance(8, 10, prior)
    for _ in range(100):
        own.add(2, 2)  # two were asked for: of the third nothing is known
    assert own.rates[2:] == pytest.approx(prior.rates[2:])


def test_a_sequence_starts_with_what_the_others_know() -> None:
    prior = Acceptance(4, 100)
    for _ in range(200):
        prior.add(4, 0)
    assert Acceptance(4, 10, prior).rates[0] < 0.1


def test_what_was_long_ago_is_forgotten() -> None:
    known = Acceptance(1, 10)
    for accepted in [1] * 1000 + [0] * 100:
        known.add(1, accepted)
    assert known.rates[0] < 0.3


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8))))
def test_survival_is_the_product_of_the_rates_as_far_as_it_matters(
    drafts: list[tuple[int, int]],
) -> None:
    known = Acceptance(8, 10)
    for a, b in drafts:
        known.add(max(a, b), min(a, b))
    assert all(0 <= rate <= 1 for rate in known.rates)
    products = [product for product in accumulate(known.rates, mul) if product >= LEAST]
    assert known.survival == pytest.approx(products)
