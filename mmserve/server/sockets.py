"""One WebSocket's life, whatever is spoken on it: frames in, events out, and why it ends.

Owns admission (so many sockets a key), the receive loop, malformed frames, slow readers and close
codes. Knows nothing of what an event means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from mmserve.errors import RequestError
from mmserve.server.auth import chosen_subprotocol
from mmserve.server.errors import InvalidJSONError, RateLimitError, error_response
from mmserve.server.fields import parse_body
from mmserve.server.services import Services, owner_of, services_of
from mmserve.server.wire import SlowReaderError, dumps, encode

BAD_FRAMES = 10  # malformed ones in a row before the socket is closed
TOO_SLOW = "the reader is too slow"
CLOSE_TIMEOUT_S = 1.0

log = logging.getLogger("mmserve.server")


class SocketGoneError(Exception):
    """The peer has left, or the socket is closed: there is nobody to tell."""


class SocketSession:
    """Until either side closes. A surface says what a frame means (`take`), how a refusal looks
    (`error_event`) and what ends with the socket (`leave`)."""

    def __init__(self, socket: WebSocket, services: Services) -> None:
        self.services = services
        self._socket = socket
        self._sending = asyncio.Lock()
        self._close_code: int | None = None
        self._close_reason = ""
        self._closing = asyncio.Event()
        self._bad_frames = 0

    async def take(self, body: dict[str, Any], size: int) -> None:
        """One frame, a JSON object of `size` characters. May raise `RequestError`."""
        raise NotImplementedError

    def error_event(self, error: RequestError, body: dict[str, Any] | None) -> dict[str, Any]:
        """What tells of a refused frame; `body` is None where it was no JSON object."""
        raise NotImplementedError

    async def leave(self) -> None:
        """The socket has ended: stop what runs for it."""
        raise NotImplementedError

    async def run(self) -> None:
        receiver = asyncio.ensure_future(self._receive())
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((receiver, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            receiver.cancel()
            closing.cancel()
            await asyncio.gather(receiver, closing, return_exceptions=True)
            await self.leave()
        if self._close_code is not None:
            # A peer that does not read cannot be told; the protocol then drops the connection.
            with contextlib.suppress(asyncio.TimeoutError, WebSocketDisconnect, RuntimeError):
                closing_frame = self._socket.close(self._close_code, self._close_reason)
                await asyncio.wait_for(closing_frame, CLOSE_TIMEOUT_S)

    def close(self, code: int | None, reason: str = "") -> None:
        """End the session; None: the socket is gone already. The first code counts."""
        if self._close_code is None:
            self._close_code, self._close_reason = code, reason
        self._closing.set()

    async def _receive(self) -> None:
        try:
            while not self._closing.is_set():
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text")
                if text is None:
                    return self.close(1003)
                await self._take(text)
        except (SocketGoneError, WebSocketDisconnect):
            return
        except SlowReaderError:
            self._give_up()
        except Exception:
            log.exception("a socket failed")
            self.close(1011)

    def _give_up(self) -> None:
        if self._close_code is None:
            self.services.metrics.slow_readers.labels("socket").inc()
        self.close(1013, TOO_SLOW)

    async def _take(self, text: str) -> None:
        body: dict[str, Any] | None = None
        try:
            body = parse_body(text)
            self._bad_frames = 0
            await self.take(body, len(text))
        except RequestError as error:
            self._bad_frames += isinstance(error, InvalidJSONError)
            await self.send(self.error_event(error, body))
            if self._bad_frames >= BAD_FRAMES:
                self.close(1008)

    async def send(self, event: dict[str, Any]) -> None:
        await self.send_text(dumps(event))

    async def send_text(self, text: str) -> None:
        """Raises `SlowReaderError` and `SocketGoneError`."""
        if not text.isascii():
            text = encode(text).decode()  # half a surrogate pair, sent back in an error
        try:
            async with self._sending:
                await asyncio.wait_for(self._put(text), self.services.config.slow_reader_s)
        except asyncio.TimeoutError:
            raise SlowReaderError from None

    async def _put(self, text: str) -> None:
        try:
            await self._socket.send_text(text)
        except (WebSocketDisconnect, RuntimeError) as error:  # the second: sent after a close
            raise SocketGoneError from error

    async def guarded(self, work: Awaitable[None]) -> None:
        """Do work that sends, of a task of its own: a socket that fails it ends the session."""
        try:
            await work
        except SlowReaderError:
            self._give_up()
        except SocketGoneError:
            self.close(None)  # the socket is gone; the receiver learns it too
        except Exception:
            log.exception("a socket failed")
            self.close(1011)


async def run_admitted(
    socket: WebSocket, session: Callable[[WebSocket, Services], SocketSession]
) -> None:
    """Accept and run a socket, unless its key has too many."""
    services, owner = services_of(socket), owner_of(socket)
    limit = services.config.sockets_per_key
    if services.sockets.get(owner, 0) >= limit:
        return await deny(socket, RateLimitError(f"A key may have {limit} sockets."))
    services.sockets[owner] = services.sockets.get(owner, 0) + 1
    services.metrics.sockets.inc()
    try:
        await socket.accept(subprotocol=chosen_subprotocol(socket.scope))
        await session(socket, services).run()
    finally:
        services.metrics.sockets.dec()
        services.sockets[owner] -= 1
        if not services.sockets[owner]:
            del services.sockets[owner]


async def deny(socket: WebSocket, error: RequestError) -> None:
    """Refuse a handshake with an HTTP answer."""
    await socket.receive()
    await socket.send_denial_response(error_response(error))
