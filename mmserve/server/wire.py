"""Bytes on the wire: ids, JSON, server-sent events, and noticing that a client has left.

Knows nothing of any surface's meaning.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

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


class EventStream(Response):
    """Server-sent events: ends with its source, closes the source when the client leaves.

    `frames` yields whole encoded events; comments fill silences of `heartbeat_s` seconds.
    `on_close` is called once however this ends, even before the first frame was asked for.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        heartbeat_s: float,
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
        self._heartbeat_s = heartbeat_s
        self._on_close = on_close
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(receive, send)
        finally:
            self._on_close()

    async def _serve(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pump = asyncio.ensure_future(self._pump(send))
        heart = asyncio.ensure_future(self._beat(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(heart, gone)
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
                await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _beat(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        while True:
            quiet = loop.time() - self._last
            if quiet >= self._heartbeat_s:
                self._last = loop.time()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            else:
                await asyncio.sleep(self._heartbeat_s - quiet)
