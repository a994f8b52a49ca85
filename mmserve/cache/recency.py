"""Things by when they were last used, the longest ago first.

Owns the order only. The time stands on the thing itself and may grow at any time for free; it is
read when the thing is about to leave.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Used(Protocol):
    last_used: int


T = TypeVar("T", bound=Used)


class Recency(Generic[T]):
    """A set of things."""

    def __init__(self) -> None:
        # Entries of things that have left stay until popped, or until they outnumber the others.
        self._heap: list[tuple[int, int, T]] = []
        self._members: dict[T, None] = {}  # in order, so that ties are settled alike
        self._serial = 0

    def __contains__(self, thing: T) -> bool:
        return thing in self._members

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def add(self, thing: T) -> None:
        if thing in self._members:
            return
        self._members[thing] = None
        self._serial += 1
        heapq.heappush(self._heap, (thing.last_used, self._serial, thing))
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(m.last_used, i, m) for i, m in enumerate(self._members)]
            self._serial = len(self._heap)
            heapq.heapify(self._heap)

    def discard(self, thing: T) -> None:
        self._members.pop(thing, None)

    def pop(self) -> T | None:
        """Takes out what was used the longest ago."""
        while self._heap:
            used, _, thing = heapq.heappop(self._heap)
            if thing not in self._members:
                continue
            del self._members[thing]
            if used == thing.last_used:
                return thing
            self.add(thing)
        return None

    def check_invariants(self) -> None:
        queued = {id(thing) for _, _, thing in self._heap}
        assert all(id(thing) in queued for thing in self._members), "a member cannot be found"
