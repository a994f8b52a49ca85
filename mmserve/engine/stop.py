"""Stop strings in a stream of text.

Owns the text that is held back because a stop string may have begun in it. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    text: str  # safe to send
    stop: str | None = None  # the stop string that was met; nothing follows


class StopChecker:
    """Cuts a stream at the first stop string to be completed, which itself is never sent.

    When several are completed by the same character, the longest counts. So the result does not
    depend on how the stream was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Takes more text; returns what can be sent, and the stop string if one was met.

        Only the longest end that may begin a stop string is held back.
        """
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return StopResult(text[:start], stop)
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep])

    def flush(self) -> str:
        """The held text, when the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
