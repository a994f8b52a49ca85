"""Computing ahead: a layout that has changed is prefilled while nobody waits for it.

Owns that one such prefill runs at a time, of the newest layout. Knows nothing of what a layout is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from mmserve.errors import RequestError
from mmserve.server.engine_face import Generation
from mmserve.server.wire import cancel

log = logging.getLogger("mmserve.server")


class Ahead:
    """`begin` submits a prefill of the layout as it is then; None: there is nothing to compute."""

    def __init__(self, begin: Callable[[], Awaitable[Generation | None]]) -> None:
        self._begin = begin
        self._running: Generation | None = None
        self._task: asyncio.Task[None] | None = None
        self._stale = False

    def compute(self) -> None:
        """The layout has changed: compute it, and no more what it was before."""
        self._stale = True
        if self._running is not None:
            self._running.abort()
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())

    async def stop(self) -> None:
        """Nothing of this runs once it returns."""
        if self._task is not None:
            await cancel(self._task)
            self._task = None

    async def _work(self) -> None:
        try:
            while self._stale:
                self._stale = False
                await self._once()
        except RequestError as error:
            log.debug("nothing was computed ahead: %s", error.message)  # the next request says it
        finally:
            self._task = None

    async def _once(self) -> None:
        generation = self._running = await self._begin()
        if generation is None:
            return
        try:
            async for _ in generation:
                pass
        finally:
            generation.abort()
            self._running = None
