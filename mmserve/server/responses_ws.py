"""Responses over WebSocket (surface C): lanes, prefill, cancel, back-pressure.

Owns one socket's session. Generations are jobs: losing the socket only detaches their reader. Knows
nothing of prompts or lineage beyond the turns that are local to its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from contextlib import aclosing
from typing import Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from mmserve.config import MIB
from mmserve.errors import RequestError
from mmserve.server.auth import chosen_subprotocol
from mmserve.server.errors import (
    InvalidJSONError,
    RateLimitError,
    ResponseNotActiveError,
    error_object,
    error_response,
    internal_error,
)
from mmserve.server.event_log import Event, LogEvictedError
from mmserve.server.fields import Fields, parse_body
from mmserve.server.lanes import Lanes
from mmserve.server.responder import Responder
from mmserve.server.responses_request import parse_response_request
from mmserve.server.services import Services, owner_of, services_of
from mmserve.server.store import Turn
from mmserve.server.wire import dumps

SOCKETS_PER_OWNER = 64
MAX_LANE_NAME = 256  # characters
BAD_FRAMES = 10  # malformed ones in a row before the socket is closed
SEND_TIMEOUT_S = 10.0  # a reader that takes nothing for so long is let go
CLOSE_TIMEOUT_S = 1.0
LOCAL_TURNS, LOCAL_BYTES = 256, 64 * MIB  # `store: false` turns a connection may continue

log = logging.getLogger("mmserve.server")


class SlowReaderError(Exception):
    """The peer does not read what it asked for."""


class LocalTurns(MutableMapping[str, Turn]):
    """The turns that live with one connection, bounded in number and image bytes."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        self._bytes = 0

    @staticmethod
    def _size(turn: Turn) -> int:
        return sum(image.blob.size for item in turn.items for image in item.images)

    def __getitem__(self, id: str) -> Turn:
        self._turns.move_to_end(id)
        return self._turns[id]

    def __setitem__(self, id: str, turn: Turn) -> None:
        self._turns[id] = turn
        self._bytes += self._size(turn)
        while len(self._turns) > 1 and (
            len(self._turns) > LOCAL_TURNS or self._bytes > LOCAL_BYTES
        ):
            del self[next(iter(self._turns))]

    def __delitem__(self, id: str) -> None:
        self._bytes -= self._size(self._turns.pop(id))

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    def __len__(self) -> int:
        return len(self._turns)


class Session:
    """One socket: frames in, events out."""

    def __init__(self, socket: WebSocket, services: Services) -> None:
        self._socket = socket
        self._services = services
        self._local = LocalTurns()
        self._responder = Responder(services, owner_of(socket), self._local)
        self._sending = asyncio.Lock()
        self._close_code: int | None = None
        self._closing = asyncio.Event()
        self._bad_frames = 0
        config = services.config
        self._lanes: Lanes[tuple[str | None, dict[str, Any]]] = Lanes(
            self._create,
            max_lanes=config.lanes_per_socket,
            max_queue=config.queue_per_lane,
            max_bytes=config.max_body_bytes,
        )

    async def run(self) -> None:
        """Until either side closes."""
        receiver = asyncio.ensure_future(self._receive())
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((receiver, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            receiver.cancel()
            closing.cancel()
            await asyncio.gather(receiver, closing, return_exceptions=True)
            await self._lanes.close()
        if self._close_code is not None:
            # A peer that does not read cannot be told; the protocol then drops the connection.
            with contextlib.suppress(asyncio.TimeoutError, WebSocketDisconnect, RuntimeError):
                await asyncio.wait_for(self._socket.close(self._close_code), CLOSE_TIMEOUT_S)

    def _close(self, code: int) -> None:
        if self._close_code is None:
            self._close_code = code
        self._closing.set()

    # In

    async def _receive(self) -> None:
        try:
            while not self._closing.is_set():
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text")
                if text is None:
                    return self._close(1003)
                await self._take(text)
        except WebSocketDisconnect:
            return
        except Exception:
            log.exception("a socket failed")
            self._close(1011)

    async def _take(self, text: str) -> None:
        lane: str | None = None
        try:
            body = parse_body(text)
            self._bad_frames = 0
            fields = Fields(body)
            lane = fields.text("stream_id")
            if lane is not None and len(lane) > MAX_LANE_NAME:
                lane = None
                raise RequestError("'stream_id' is too long.", param="stream_id")
            await self._dispatch(fields, lane, len(text))
        except InvalidJSONError as error:
            self._bad_frames += 1
            await self._send_error(error, lane)
            if self._bad_frames >= BAD_FRAMES:
                self._close(1008)
        except RequestError as error:
            await self._send_error(error, lane)

    async def _dispatch(self, fields: Fields, lane: str | None, size: int) -> None:
        kind = fields.required("type")
        if kind == "response.create":
            self._lanes.push(lane, (lane, fields.values), size)
        elif kind == "response.cancel":
            self._cancel(fields)
        elif kind == "response.steer":
            await self._refuse_steer(fields, lane)
        else:
            raise RequestError(f"Unknown event type '{str(kind)[:100]}'.", param="type")

    def _cancel(self, fields: Fields) -> None:
        fields.required("response_id")
        turn = self._responder.find(fields.text("response_id") or "")
        if turn is None or turn.job is None or not turn.active:
            raise ResponseNotActiveError(
                "There is no running response with this id.", param="response_id"
            )
        turn.job.cancel()

    async def _refuse_steer(self, fields: Fields, lane: str | None) -> None:
        steer = {name: fields.get(name) for name in ("input", "previous_response_id", "id")}
        if isinstance(fields.get("steer"), dict):
            steer |= fields.get("steer")
        turn = self._responder.find(str(steer["previous_response_id"]))
        number = turn.job.log.next_number - 1 if turn and turn.job else 0
        event = {
            "type": "response.steer.failed",
            "sequence_number": number,  # no event of the response: a resume must not skip one
            "error": {
                "type": "invalid_request_error",
                "code": "steering_not_supported",
                "message": "This server cannot steer a running response.",
            },
            "steer": {name: value for name, value in steer.items() if value is not None},
        }
        await self._send(event if lane is None else {"stream_id": lane, **event})

    # Out

    async def _create(self, work: tuple[str | None, dict[str, Any]]) -> None:
        lane, body = work
        try:
            await self._respond(lane, body)
        except RequestError as error:
            await self._report(error, lane)
        except SlowReaderError:
            self._close(1013)
        except (WebSocketDisconnect, RuntimeError):
            self._closing.set()  # the socket is gone; the receiver learns it too
        except Exception:
            log.exception("a response failed to start")
            await self._report(internal_error(), lane)

    async def _respond(self, lane: str | None, body: dict[str, Any]) -> None:
        self._services.check_ready()
        body.pop("background", None)
        request = parse_response_request(body, self._services.info)
        grace_s = self._services.config.grace_s if request.store else 0.0
        turn = await self._responder.start(request, grace_s=grace_s)
        assert turn.job is not None
        tail = turn.job.attach()
        try:
            async with aclosing(tail.events()) as events:
                async for event in events:
                    await self._send_text(with_lane(event, lane))
        except LogEvictedError:
            raise SlowReaderError from None
        finally:
            tail.close()
        parent = request.previous_response_id
        if parent in self._local and turn.current()["status"] == "failed":
            assert parent is not None
            del self._local[parent]

    async def _report(self, error: RequestError, lane: str | None) -> None:
        try:
            await self._send_error(error, lane)
        except SlowReaderError:
            self._close(1013)
        except (WebSocketDisconnect, RuntimeError):
            self._closing.set()

    async def _send_error(self, error: RequestError, lane: str | None) -> None:
        event: dict[str, Any] = {"type": "error", "status": error.status}
        if lane is not None:
            event["stream_id"] = lane
        await self._send({**event, "error": error_object(error)})

    async def _send(self, event: dict[str, Any]) -> None:
        await self._send_text(dumps(event))

    async def _send_text(self, text: str) -> None:
        try:
            async with self._sending:
                await asyncio.wait_for(self._socket.send_text(text), SEND_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise SlowReaderError from None


def with_lane(event: Event, lane: str | None) -> str:
    """The event's JSON, naming its lane."""
    if lane is None:
        return event.data
    return f'{{"stream_id":{dumps(lane)},{event.data[1:]}'


async def responses_socket(socket: WebSocket) -> None:
    """WebSocket /v1/responses."""
    services, owner = services_of(socket), owner_of(socket)
    if services.sockets.get(owner, 0) >= SOCKETS_PER_OWNER:
        error = RateLimitError(f"A key may have {SOCKETS_PER_OWNER} open sockets.")
        await socket.receive()
        return await socket.send_denial_response(error_response(error))
    services.sockets[owner] = services.sockets.get(owner, 0) + 1
    services.metrics.sockets.inc()
    try:
        await socket.accept(subprotocol=chosen_subprotocol(socket.scope))
        await Session(socket, services).run()
    finally:
        services.metrics.sockets.dec()
        services.sockets[owner] -= 1
        if not services.sockets[owner]:
            del services.sockets[owner]


ROUTES = [WebSocketRoute("/v1/responses", responses_socket)]
