"""Whether loading beats computing, by the speeds that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.tiers.cost import Costs


def test_what_was_never_measured_is_loaded() -> None:
    assert Costs().worth({"disk": 1 << 40}, 1, 0)
    assert Costs(token_s=1e-3).worth({"disk": 1 << 40}, 1, 0)
    assert Costs({"disk": 1.0}, token_s=1e-3).worth({"disk": 1 << 40}, 1, 1)


def test_the_faster_way_is_taken() -> None:
    costs = Costs({"host": 1e-10, "disk": 1e-9}, token_s=1e-4)
    size = 100_000_000
    assert costs.worth({"disk": size}, 1001, 0) and not costs.worth({"disk": size}, 999, 0)
    assert costs.worth({"host": size}, 101, 0)
    assert costs.load_s({"host": size, "disk": size}) == pytest.approx(0.11)


def test_an_image_costs_what_its_steps_take_beside_their_text() -> None:
    costs = Costs()
    costs.computed(100, 0, 0.1)
    costs.computed(100, 50, 0.6)
    assert costs.compute_s(0, 50) == pytest.approx(0.5)
    assert costs.compute_s(200, 100) == pytest.approx(1.2)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1))
def test_an_estimate_stays_between_what_was_measured(seconds: list[float]) -> None:
    costs = Costs()
    for each in seconds:
        costs.loaded("disk", 1, each)
    assert min(seconds) * 0.999 <= costs.byte_s["disk"] <= max(seconds) * 1.001
    costs.loaded("disk", 0, 5.0)  # nothing came, so nothing was measured
    assert costs.byte_s["disk"] <= max(seconds) * 1.001
