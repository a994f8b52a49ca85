"""The picture of the KV pools that all watchers share, and how often it is taken.

Owns the rhythm: whoever waits for news takes the next picture for all, so without watchers nothing
is done. Between two pictures there is at least `INTERVAL_S`, and so much more that engine thread
and coding together spend no more than `SHARE` of the time on them. Knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool

from mmserve.kv_snapshot import Snapshot
from mmserve.server.engine_face import EngineFace
from mmserve.server.kv_delta import NOTHING, Picture, message, picture
from mmserve.server.store import ResponseStore
from mmserve.server.wire import dumps

INTERVAL_S = 0.25
FIGURES_S = 1.0  # so often figures are taken
SHARE = 0.02


def pause(seconds: float) -> float:
    """From one picture to the next, where the last one took so long."""
    return max(INTERVAL_S, seconds / SHARE)


class KVFeed:
    """`now`, then `after` what it said, and so on."""

    def __init__(self, engine: EngineFace, responses: ResponseStore) -> None:
        self._engine, self._responses = engine, responses
        self._looking = asyncio.Lock()
        self._version = 0
        self._picture, self._page_size = NOTHING, 0
        self._change = ""  # from the version before to this one
        self._whole: tuple[int, str] = (0, "")  # with its version
        self._due = self._figures_due = 0.0  # of the loop's time
        self._figures: Mapping[str, float] = {}
        self._sessions: dict[str, str] = {}  # by request, of those that own something

    async def now(self) -> tuple[int, str]:
        """The whole picture as a message, with its version. Raises what the engine raises."""
        async with self._looking:
            await self._look()
        return await self._tell_all()

    async def after(self, version: int) -> tuple[int, str]:
        """The next message for somebody who knows this version. Raises what the engine raises."""
        while self._version <= version:
            async with self._looking:
                if self._version <= version:
                    await self._look()
        if version == self._version - 1:
            return self._version, self._change
        return await self._tell_all()

    async def _tell_all(self) -> tuple[int, str]:
        version, now, size = self._version, self._picture, self._page_size
        if self._whole[0] != version:
            text = await run_in_threadpool(_text, version, NOTHING, now, size)
            assert text is not None, "a whole picture is always told"
            self._whole = version, text
        return self._whole

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(self._due - loop.time(), 0.0))
        snapshot = await self._engine.kv_snapshot()
        self._name(snapshot)
        fresh = loop.time() >= self._figures_due
        if fresh:
            self._figures_due = loop.time() + FIGURES_S
        text, after, seconds = await run_in_threadpool(self._compare, snapshot, fresh)
        self._due = loop.time() + pause(snapshot.seconds + seconds)
        if text is not None:
            self._change, self._picture, self._page_size = text, after, snapshot.page_size
            self._version += 1

    def _compare(self, snapshot: Snapshot, fresh: bool) -> tuple[str | None, Picture, float]:
        """On another thread; also its seconds."""
        started = time.thread_time()
        if fresh:
            self._figures = self._engine.metrics.values()
        after = picture(snapshot, self._session, self._figures)
        text = _text(self._version + 1, self._picture, after, snapshot.page_size)
        return text, after, time.thread_time() - started

    def _session(self, request: str | None) -> str | None:
        return None if request is None else self._sessions.get(request)

    def _name(self, snapshot: Snapshot) -> None:
        """Find the sessions of requests that are new here; nobody else is remembered."""
        before, self._sessions = self._sessions, {}
        for owner in snapshot.owners:
            request = owner.request
            if request is None or request in self._sessions:
                continue
            session = before.get(request) or self._responses.conversation(request)
            if session is not None:
                self._sessions[request] = session


def _text(version: int, before: Picture, after: Picture, page_size: int) -> str | None:
    body: dict[str, Any] | None = message(version, before, after, page_size)
    return None if body is None else dumps(body)
