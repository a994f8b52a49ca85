"""Lanes of one WebSocket: FIFO within a lane, lanes in parallel, all of it bounded.

Owns the queues and their workers. Knows nothing of what a work item is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from mmserve.errors import QueueFullError
from mmserve.server.errors import RateLimitError

T = TypeVar("T")


class Lanes(Generic[T]):
    """`run(item)` for each item pushed; a lane exists while it has work.

    `run` must not raise. Sizes are bytes of the waiting items.
    """

    def __init__(
        self,
        run: Callable[[T], Awaitable[None]],
        *,
        max_lanes: int,
        max_queue: int,
        max_bytes: int,
    ) -> None:
        self._run = run
        self._max_lanes = max_lanes
        self._max_queue = max_queue
        self._max_bytes = max_bytes
        self._queues: dict[str | None, deque[tuple[T, int]]] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def push(self, lane: str | None, item: T, size: int) -> None:
        """Queue an item. Raises when the lane, or the number of lanes, is at its bound."""
        queue = self._queues.get(lane)
        if queue is None:
            if len(self._queues) >= self._max_lanes:
                raise RateLimitError(f"This socket may have {self._max_lanes} busy lanes.")
        elif len(queue) >= self._max_queue:
            raise QueueFullError(f"This lane may have {self._max_queue} requests waiting.")
        if self._bytes and self._bytes + size > self._max_bytes:
            raise QueueFullError("Too many bytes are waiting on this socket.")
        self._bytes += size
        if queue is not None:
            queue.append((item, size))
            return
        self._queues[lane] = deque([(item, size)])
        worker = asyncio.get_running_loop().create_task(self._work(lane))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    async def _work(self, lane: str | None) -> None:
        queue = self._queues[lane]
        try:
            while queue:
                item, size = queue.popleft()
                self._bytes -= size
                await self._run(item)
        finally:
            del self._queues[lane]

    async def close(self) -> None:
        """Drop what waits and cancel what runs."""
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
