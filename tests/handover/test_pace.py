"""What a worker is expected to take: what it says, behind what it has to do, as it turned out."""

from __future__ import annotations

import pytest

from mmserve.handover.pace import FORGETS_S, LONGEST_STRETCH, Pace
from mmserve.handover.wire import Rates

MIB = 1 << 20


def pace() -> Pace:
    made = Pace(Rates(token_s=1e-3, image_token_s=2e-3))
    made.moved(MIB, 1e-3)
    return made


def test_nobody_knows_before_a_speed_was_measured() -> None:
    assert Pace(Rates(1e-3, 1e-3)).estimate(0.0, 10, 0, 10) is None
    assert Pace(Rates(None, 1e-3), byte_s=1e-9).estimate(0.0, 10, 0, 10) is None
    assert Pace(Rates(1e-3, None), byte_s=1e-9).estimate(0.0, 10, 0, 10) is not None


def test_computing_and_sending_go_on_at_once() -> None:
    assert pace().estimate(0.0, 100, 50, MIB) == pytest.approx(0.2)
    assert pace().estimate(0.0, 100, 50, 400 * MIB) == pytest.approx(0.4)


def test_a_job_waits_for_those_before_it() -> None:
    made = pace()
    made.began(1, 0.5)
    assert made.estimate(0.0, 100, 0, 0) == pytest.approx(0.6)
    made.began(2, 0.6)
    assert made.estimate(0.0, 100, 0, 0) == pytest.approx(0.7)
    made.ended(1, 0.0, 0.5, 0.5)
    made.dropped(2)
    assert made.estimate(0.0, 100, 0, 0) == pytest.approx(0.1)


def test_what_takes_longer_than_expected_is_expected_to_and_that_fades() -> None:
    made = pace()
    for job in range(50):
        expected = made.estimate(0.0, 100, 0, 0)
        assert expected is not None
        made.began(job, expected)
        made.ended(job, 0.0, expected, 0.3)
    assert made.estimate(0.0, 100, 0, 0) == pytest.approx(0.3, rel=0.01)
    assert made.estimate(FORGETS_S, 100, 0, 0) == pytest.approx(0.2, rel=0.01)
    assert made.estimate(100 * FORGETS_S, 100, 0, 0) == pytest.approx(0.1, rel=0.01)


def test_an_estimate_is_bounded_and_never_better_than_what_the_worker_says() -> None:
    made = pace()
    for job in range(100):
        made.ended(job, 0.0, 0.1, 1000.0)
    assert made.estimate(0.0, 100, 0, 0) == pytest.approx(0.1 * LONGEST_STRETCH)
    for job in range(1000):
        made.ended(job, 0.0, 0.1, 0.0)
    assert made.estimate(0.0, 100, 0, 0) == pytest.approx(0.1)
