"""Whether an engine gets on with its work, judged by its pulse.

Owns the judgement and its bounds. No thread, no clock: whoever looks says what time it is.
"""

from __future__ import annotations

import enum

from mmserve.engine.thread import Pulse

PATIENCE = 4  # times the limit, until one step that does not end is given up


class Verdict(enum.Enum):
    WELL = "well"
    IDLING = "idling"  # steps come and go, and nothing comes of them though there is work
    STUCK = "stuck"  # one step takes longer than the limit
    GONE = "gone"  # it will not end any more


class Watchdog:
    def __init__(self, limit_s: float) -> None:
        self._limit = limit_s
        self._last = Pulse(-1, -1, False)
        self._turned = self._moved = 0.0  # when that was last seen

    def look(self, pulse: Pulse, now: float) -> Verdict:
        """`now`: seconds of any clock."""
        last, self._last = self._last, pulse
        if pulse.turns != last.turns or not pulse.busy:
            self._turned = now
        if pulse.moves != last.moves or not pulse.busy:
            self._moved = now
        if now - self._turned > PATIENCE * self._limit:
            return Verdict.GONE
        if now - self._turned > self._limit:
            return Verdict.STUCK
        if now - self._moved > self._limit:
            self._moved = now  # what is done about it takes its time
            return Verdict.IDLING
        return Verdict.WELL
