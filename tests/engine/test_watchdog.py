"""The watchdog's judgement, on a clock of numbers."""

from __future__ import annotations

import pytest

from mmserve.engine.thread import Pulse
from mmserve.engine.watchdog import PATIENCE, Verdict, Watchdog

LIMIT = 10.0


def verdicts(pulses: list[Pulse], every: float = 1.0) -> list[Verdict]:
    """Of looks `every` so many seconds apart."""
    watchdog = Watchdog(LIMIT)
    return [watchdog.look(pulse, 100 + number * every) for number, pulse in enumerate(pulses)]


def test_an_engine_that_gets_on_is_well_however_long_it_takes() -> None:
    assert set(verdicts([Pulse(n, n // 8, True) for n in range(100)])) == {Verdict.WELL}


def test_an_engine_without_work_is_well_though_it_does_nothing() -> None:
    assert set(verdicts([Pulse(3, 3, False)] * 100)) == {Verdict.WELL}


def test_steps_that_bring_nothing_are_told_once_a_limit() -> None:
    found = verdicts([Pulse(n, 5, True) for n in range(36)])
    assert [n for n, v in enumerate(found) if v is Verdict.IDLING] == [11, 22, 33]
    assert set(found) == {Verdict.WELL, Verdict.IDLING}


def test_a_step_that_does_not_end_is_stuck_and_then_gone() -> None:
    found = verdicts([Pulse(5, 5, True)] * 60)
    assert found[10] is Verdict.WELL and found[11] is Verdict.STUCK
    assert found.index(Verdict.GONE) == PATIENCE * LIMIT + 1


@pytest.mark.parametrize("turns", [6, 7])
def test_a_step_that_ends_after_all_is_forgiven(turns: int) -> None:
    stuck = [Pulse(5, 5, True)] * 20
    found = verdicts([*stuck, *(Pulse(turns + n, 6 + n, True) for n in range(20))])
    assert found[19] is Verdict.STUCK and set(found[20:]) == {Verdict.WELL}


def test_waiting_for_the_first_work_does_not_count() -> None:
    found = verdicts([*[Pulse(0, 0, False)] * 50, *[Pulse(0, 0, True)] * 10])
    assert set(found) == {Verdict.WELL}
