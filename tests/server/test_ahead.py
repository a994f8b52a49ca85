"""What is computed ahead does not pile up."""

from __future__ import annotations

from typing import Any

from mmserve.server.ahead import Ahead


class Waits:
    """A generation that never comes to its turn."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_the_oldest_makes_room_and_what_has_ended_takes_none() -> None:
    ahead, every = Ahead(most=2), [Waits() for _ in range(5)]
    held: list[Any] = [ahead.counted(each) for each in every]  # type: ignore[arg-type]
    for number in (0, 1, 2):
        held[number].__enter__()
    assert [each.aborted for each in every] == [True, False, False, False, False]
    held[0].__exit__(None, None, None)
    held[1].__exit__(None, None, None)
    held[3].__enter__()
    assert not every[2].aborted, "one that has ended made room"
    held[4].__enter__()
    assert [each.aborted for each in every] == [True, False, True, False, False]
