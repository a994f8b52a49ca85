"""Responses over WebSocket (surface C): lanes, prefill, cancel, back-pressure.

Owns one socket's session. Generations are jobs: losing the socket only detaches their reader. Knows
nothing of prompts or lineage beyond the turns that are local to its connection.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from contextlib import aclosing
from typing import Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from mmserve.config import MIB
from mmserve.errors import RequestError
from mmserve.server.deadline import Deadline
from mmserve.server.errors import ResponseNotActiveError, error_object, internal_error
from mmserve.server.event_log import Event, LogEvictedError
from mmserve.server.fields import Fields
from mmserve.server.lanes import Lanes
from mmserve.server.responder import Responder
from mmserve.server.responses_request import parse_response_request
from mmserve.server.services import Services, owner_of
from mmserve.server.sockets import SocketGoneError, SocketSession, run_admitted
from mmserve.server.turn import Turn
from mmserve.server.wire import SlowReaderError, dumps

MAX_LANE_NAME = 256  # characters
LOCAL_TURNS, LOCAL_BYTES = 256, 64 * MIB  # `store: false` turns a connection may continue

log = logging.getLogger("mmserve.server")


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


class Session(SocketSession):
    """One socket: frames in, events out."""

    def __init__(self, socket: WebSocket, services: Services) -> None:
        super().__init__(socket, services)
        self._local = LocalTurns()
        self._responder = Responder(services, owner_of(socket), self._local)
        config = services.config
        self._lanes: Lanes[tuple[str | None, dict[str, Any]]] = Lanes(
            self._create,
            max_lanes=config.lanes_per_socket,
            max_queue=config.queue_per_lane,
            max_bytes=config.max_body_bytes,
        )

    async def leave(self) -> None:
        await self._lanes.close()

    # In

    async def take(self, body: dict[str, Any], size: int) -> None:
        fields = Fields(body)
        lane = fields.text("stream_id")
        if lane is not None and len(lane) > MAX_LANE_NAME:
            raise RequestError("'stream_id' is too long.", param="stream_id")
        await self._dispatch(fields, lane, size)

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
        await self.send(event if lane is None else {"stream_id": lane, **event})

    # Out

    async def _create(self, work: tuple[str | None, dict[str, Any]]) -> None:
        await self.guarded(self._answer(*work))

    async def _answer(self, lane: str | None, body: dict[str, Any]) -> None:
        try:
            await self._respond(lane, body)
        except RequestError as error:
            await self.send(self.error_event(error, {"stream_id": lane}))
        except (SlowReaderError, SocketGoneError):
            raise
        except Exception:
            log.exception("a response failed to start")
            await self.send(self.error_event(internal_error(), {"stream_id": lane}))

    async def _respond(self, lane: str | None, body: dict[str, Any]) -> None:
        self.services.check_ready()
        body.pop("background", None)
        request = parse_response_request(body, self.services.info)
        grace_s = self.services.config.grace_s if request.store else 0.0
        deadline = Deadline.of(body, self.services.config.max_request_s)
        turn = await self._responder.start(request, deadline, grace_s=grace_s)
        assert turn.job is not None
        tail = turn.job.attach()
        try:
            async with aclosing(tail.events()) as events:
                async for event in events:
                    await self.send_text(with_lane(event, lane))
        except LogEvictedError:
            raise SlowReaderError from None
        finally:
            tail.close()
        parent = request.previous_response_id
        if parent in self._local and turn.current()["status"] == "failed":
            assert parent is not None
            del self._local[parent]

    def error_event(self, error: RequestError, body: dict[str, Any] | None) -> dict[str, Any]:
        event: dict[str, Any] = {"type": "error", "status": error.status}
        lane = (body or {}).get("stream_id")
        if isinstance(lane, str) and len(lane) <= MAX_LANE_NAME:
            event["stream_id"] = lane
        return {**event, "error": error_object(error)}


def with_lane(event: Event, lane: str | None) -> str:
    """The event's JSON, naming its lane."""
    if lane is None:
        return event.data
    return f'{{"stream_id":{dumps(lane)},{event.data[1:]}'


async def responses_socket(socket: WebSocket) -> None:
    """WebSocket /v1/responses."""
    await run_admitted(socket, Session)


ROUTES = [WebSocketRoute("/v1/responses", responses_socket)]
