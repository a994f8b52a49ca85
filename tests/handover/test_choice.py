"""When work is sent away: never from an idle engine, and only where all together wait less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.handover.choice import MARGIN, Here, cost_away, cost_here, pays

SECONDS = st.floats(0, 100)
HERE = st.builds(Here, SECONDS, SECONDS, st.integers(0, 100))


@given(SECONDS, SECONDS, SECONDS)
def test_an_engine_with_nothing_else_to_do_sends_nothing_away(
    seconds: float, away: float, rest: float
) -> None:
    assert not pays(Here(seconds, 0.0, 0), away, rest)


@given(HERE, SECONDS, SECONDS)
def test_what_pays_costs_less_by_the_margin(here: Here, away: float, rest: float) -> None:
    if pays(here, away, rest):
        assert cost_away(here, away, rest) * MARGIN < cost_here(here)


@given(HERE, SECONDS, SECONDS)
def test_what_pays_still_pays_with_one_more_beside_it(here: Here, away: float, rest: float) -> None:
    if rest * MARGIN <= here.seconds and pays(here, away, rest):
        assert pays(here._replace(others=here.others + 1), away, rest)


def test_a_prompt_beside_streams_pays_and_a_slow_worker_does_not() -> None:
    here = Here(seconds=0.2, queue=0.0, others=8)
    assert pays(here, away=0.4, rest=0.01)
    assert not pays(here, away=2.0, rest=0.01)
