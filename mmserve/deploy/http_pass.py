"""An HTTP request passed on to a replica, and its answer back, byte for byte as it comes.

Owns one exchange: the body read once so that another replica may be asked where the first cannot be
reached, dies before it has answered, or takes no new work; never once anything has been answered.
The client's leaving ends the replica's work. Knows nothing of who is chosen.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import httpcore
from starlette.types import Message, Receive, Scope, Send

from mmserve.deploy.directory import Facts
from mmserve.deploy.headers import passed_on

log = logging.getLogger("mmserve.deploy")

CONNECT_S = 5.0
# A machine that is gone says nothing: half a minute of silence to TCP's own questions is an end.
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
UNREACHED = (httpcore.ConnectError, httpcore.ConnectTimeout)
BROKEN = (httpcore.NetworkError, httpcore.RemoteProtocolError)
BUSY = 503


def connections(kept_s: float) -> httpcore.AsyncConnectionPool:
    """To replicas; one without a request is kept for so long."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in KEEPALIVE:
        if hasattr(socket, name):  # not everywhere
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return httpcore.AsyncConnectionPool(
        max_connections=None, keepalive_expiry=kept_s, socket_options=options
    )


class NoReplicaError(Exception):
    """None that was asked has answered."""


class CutError(Exception):
    """A replica ended in the middle of its answer; what came of it has been passed on."""


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


class Body:
    """A request's body, held up to `most` bytes; `whole` where that was all of it."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self.data = b""
        self.whole = False

    async def read(self) -> None:
        parts, size = [], 0
        while not self.whole and size <= self._most:
            part, self.whole = await self._next()
            parts.append(part)
            size += len(part)
        self.data = b"".join(parts)

    async def _next(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientLeftError
        return message.get("body", b""), not message.get("more_body", False)

    async def stream(self) -> AsyncIterator[bytes]:
        """All of what is not held whole; once."""
        yield self.data
        while not self.whole:
            part, self.whole = await self._next()
            yield part

    async def left(self) -> None:
        """Returns once the client has gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Exchange:
    """`failed`: told of whom could not be reached."""

    def __init__(self, pool: httpcore.AsyncConnectionPool, failed: Callable[[Facts], None]) -> None:
        self._pool, self._failed = pool, failed

    async def run(self, scope: Scope, body: Body, candidates: list[Facts], send: Send) -> Facts:
        """Who answered. Raises `NoReplicaError`, `ClientLeftError` and `CutError`."""
        passing = asyncio.ensure_future(self._pass(scope, body, candidates, send))
        leaving = asyncio.ensure_future(body.left()) if body.whole else None
        try:
            waits = {passing} if leaving is None else {passing, leaving}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                raise ClientLeftError
            return passing.result()
        finally:
            for task in (passing, leaving):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*filter(None, (passing, leaving)), return_exceptions=True)

    async def _pass(self, scope: Scope, body: Body, candidates: list[Facts], send: Send) -> Facts:
        for number, replica in enumerate(candidates, 1):
            last = number == len(candidates) or not body.whole
            try:
                if await self._ask(scope, body, replica, send, last=last):
                    return replica
            except UNREACHED:
                self._failed(replica)
                if not body.whole:
                    break
            except BROKEN as error:
                self._failed(replica)
                log.warning("%s broke off before it answered: %s", replica.name, error)
                if last:
                    break
        raise NoReplicaError

    async def _ask(
        self, scope: Scope, body: Body, replica: Facts, send: Send, *, last: bool
    ) -> bool:
        """Whether it was answered: a replica that takes no new work may not be the last to ask."""
        request = httpcore.Request(
            scope["method"],
            target(replica, scope),
            headers=passed_on(scope["headers"]),
            content=body.data if body.whole else body.stream(),
            extensions={"timeout": {"connect": CONNECT_S}},
        )
        response = await self._pool.handle_async_request(request)
        try:
            if response.status == BUSY and not last:
                return False
            start = {"type": "http.response.start", "status": response.status}
            await send({**start, "headers": passed_on(response.headers)})
            await self._parts(response, replica, send)
        finally:
            await response.aclose()
        return True

    async def _parts(self, response: httpcore.Response, replica: Facts, send: Send) -> None:
        more: Message = {"type": "http.response.body", "more_body": True}
        try:
            async with aclosing(response.aiter_stream()) as parts:  # type: ignore[type-var]
                async for part in parts:
                    await send({**more, "body": part})
        except BROKEN as error:
            self._failed(replica)
            raise CutError(replica.name) from error
        await send({**more, "body": b"", "more_body": False})


def target(replica: Facts, scope: Scope) -> httpcore.URL:
    base = httpcore.URL(replica.url)
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope.get("query_string", b"")
    whole = path.partition(b"?")[0] + (b"?" + query if query else b"")
    return httpcore.URL(scheme=base.scheme, host=base.host, port=base.port, target=whole)
