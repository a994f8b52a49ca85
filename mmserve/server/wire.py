"""Bytes on the wire: ids, JSON, server-sent events, and noticing that a client has left.

Knows nothing of any surface's meaning.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def new_id(prefix: str) -> str:
    """`prefix_` and 32 random URL-safe characters."""
    return f"{prefix}_{secrets.token_hex(16)}"


def dumps(value: Any) -> str:
    """JSON, unescaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encode(text: str) -> bytes:
    """UTF-8; a lone surrogate (which has no encoding) becomes a question mark."""
    return text.encode("utf-8", "replace")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def loads(data: bytes | str) -> Any:
    """Strict JSON. Raises ValueError for anything else, NaN and absurd nesting included."""
    try:
        return json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def sse(data: str, event: str | None = None) -> bytes:
    """One server-sent event. `data` is one line of JSON."""
    head = f"event: {event}\n" if event else ""
    return encode(f"{head}data: {data}\n\n")


class JSONBody(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(dumps(content))


class ClientGoneError(Exception):
    """The client closed the connection before the answer."""


class SlowReaderError(Exception):
    """The peer does not read what it asked for."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; when the client leaves first, cancel it and raise `ClientGoneError`.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await cancel(task, gone)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel, and wait until each has really ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class StreamLimits(NamedTuple):
    """Seconds of silence before a comment fills it, and of a reader that takes nothing before it is
    let go; `on_slow` is told then."""

    heartbeat_s: float
    slow_s: float
    on_slow: Callable[[], None]


DROP = "mmserve.drop"  # in a scope: cuts the connection, whatever has not been sent yet


class EventStream(Response):
    """Server-sent events: ends with its source, closes the source when the client leaves.

    `frames` yields whole encoded events. One is asked for when the one before has been taken, so
    that what waits for a slow reader is bounded by its source.
    `on_close` is called once however this ends, even before the first frame was asked for.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        limits: StreamLimits,
        on_close: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._frames = frames
        self._limits = limits
        self._on_close = on_close
        self._last = 0.0
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(receive, send)
        except SlowReaderError:
            self._limits.on_slow()
            self._on_close()
            scope.get(DROP, lambda: None)()
            await _gone(receive)
            raise ClientGoneError from None
        finally:
            self._on_close()

    async def _serve(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pump = asyncio.ensure_future(self._pump(send))
        heart = asyncio.ensure_future(self._beat(send))
        gone = asyncio.ensure_future(_gone(receive))
        slow = asyncio.ensure_future(self._until_slow())
        try:
            await asyncio.wait((pump, gone, slow), return_when=asyncio.FIRST_COMPLETED)
            if slow.done():
                raise SlowReaderError
        finally:
            await cancel(heart, gone, slow)
            if not pump.done():
                await cancel(pump)
        if not pump.cancelled():
            pump.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        async with aclosing(self._frames):
            async for frame in self._frames:
                self._last = loop.time()
                self._sending_since = self._last
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                self._sending_since = None

    async def _until_slow(self) -> None:
        """Ends when one frame has waited for too long."""
        loop, slow_s = asyncio.get_running_loop(), self._limits.slow_s
        while self._sending_since is None or loop.time() - self._sending_since < slow_s:
            await asyncio.sleep(slow_s / 2)

    async def _beat(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        while True:
            quiet = loop.time() - self._last
            if quiet >= self._limits.heartbeat_s:
                self._last = loop.time()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            else:
                await asyncio.sleep(self._limits.heartbeat_s - quiet)
