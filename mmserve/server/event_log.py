"""The numbered events of one response: written once, read by any number of tails.

Owns order, sequence numbers, replay and its bounds. Knows nothing of what events mean, except that
text deltas of one part may be merged for a reader that has fallen behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from mmserve.errors import RequestError
from mmserve.server.wire import dumps, loads

DELTA = "response.output_text.delta"
EVENT_OVERHEAD = 160  # bytes of the objects around an event's JSON
MERGED_BYTES = 64 * 1024  # of JSON in one merged delta, about
MERGE_ABOVE = 256  # events a reader may lag before its deltas are merged


@dataclass(frozen=True)
class Event:
    """One event as it goes out; `data` is its JSON."""

    sequence_number: int
    type: str
    data: str


class LogEvictedError(RequestError):
    """The wanted events are no longer held; the finished response still can be retrieved."""


def merge(events: list[Event]) -> Event:
    """Deltas of one part as a single delta that carries the last one's number."""
    if len(events) == 1:
        return events[0]
    parts = [loads(event.data) for event in events]
    last: dict[str, Any] = parts[-1]
    last["delta"] = "".join(part["delta"] for part in parts)
    last["logprobs"] = [entry for part in parts for entry in part["logprobs"]]
    return Event(events[-1].sequence_number, DELTA, dumps(last))


class EventLog:
    """Append-only, from number 0 without gaps; the oldest go when a bound is passed.

    `closed` after the terminal event, which is always kept.
    """

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._events: list[Event] = []
        self._first = 0  # the sequence number of _events[0]
        self._changed = asyncio.Event()
        self.num_bytes = 0
        self.closed = False

    @property
    def next_number(self) -> int:
        return self._first + len(self._events)

    def append(self, type: str, body: dict[str, Any]) -> None:
        """Number and keep an event; wakes every reader."""
        assert not self.closed
        number = self.next_number
        data = dumps({"type": type, "sequence_number": number, **body})
        self._events.append(Event(number, type, data))
        self.num_bytes += len(data) + EVENT_OVERHEAD
        if self.num_bytes > self._max_bytes or len(self._events) > self._max_events:
            self._evict()
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _evict(self) -> None:
        # A quarter at once: removal from the front of a list costs its length.
        count = min(max(len(self._events) // 4, 1), len(self._events) - 1)
        for event in self._events[:count]:
            self.num_bytes -= len(event.data) + EVENT_OVERHEAD
        del self._events[:count]
        self._first += count

    def check_held(self, after: int) -> None:
        """Raise `LogEvictedError` where events after that number are gone already."""
        if after + 1 < self._first:
            raise LogEvictedError(
                f"Events before {self._first} are no longer held; retrieve the response instead.",
                param="starting_after",
            )

    async def read(self, after: int = -1) -> AsyncGenerator[Event, None]:
        """Events numbered above `after`, live until the end; at least the terminal one.

        Raises `LogEvictedError` when the reader is too slow for the bounds.
        """
        position = after + 1
        while True:
            if position < self.next_number:
                self.check_held(position - 1)
                event = self._next(position)
                position = event.sequence_number + 1
                yield event
            elif self.closed:
                if after >= self.next_number - 1:
                    yield self._events[-1]
                return
            else:
                await self._changed.wait()

    def _next(self, position: int) -> Event:
        index = position - self._first
        if len(self._events) - index <= MERGE_ABOVE or self._events[index].type != DELTA:
            return self._events[index]
        end = index
        size = 0
        while end < len(self._events) and self._events[end].type == DELTA and size < MERGED_BYTES:
            size += len(self._events[end].data)
            end += 1
        return merge(self._events[index:end])
