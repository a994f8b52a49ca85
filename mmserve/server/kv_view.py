"""What the KV view asks for: the pools' pages live over a socket, and one image to be dropped.

Owns the two routes. Both belong to the holder of an admin key (`auth.Guard` says who else).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from mmserve.errors import RequestError
from mmserve.server.auth import VIEW_PATH
from mmserve.server.errors import NotFoundError, error_object
from mmserve.server.services import Services, services_of
from mmserve.server.sockets import SocketSession, deny, run_admitted
from mmserve.server.wire import JSONBody, cancel

KEY = re.compile(r"[0-9a-f]{64}")


class Watcher(SocketSession):
    """Is told of every change of the pools; says nothing."""

    def __init__(self, socket: WebSocket, services: Services) -> None:
        super().__init__(socket, services)
        self._telling = asyncio.ensure_future(self.guarded(self._tell()))

    async def _tell(self) -> None:
        feed = self.services.kv_feed
        version, text = await feed.now()
        while True:
            await self.send_text(text)
            version, text = await feed.after(version)

    async def take(self, body: dict[str, Any], size: int) -> None:
        raise RequestError("This socket takes no frames; it only tells.")

    def error_event(self, error: RequestError, body: dict[str, Any] | None) -> dict[str, Any]:
        return {"type": "error", "error": error_object(error)}

    async def leave(self) -> None:
        await cancel(self._telling)


async def watch(socket: WebSocket) -> None:
    """WebSocket /v1/kv/view."""
    try:
        services_of(socket).check_ready()
    except RequestError as error:
        return await deny(socket, error)
    await run_admitted(socket, Watcher)


async def show(request: Request) -> Response:
    """GET /v1/kv/view: what the socket says first."""
    services = services_of(request)
    services.check_ready()
    _, text = await services.kv_feed.now()
    return Response(text, media_type="application/json")


async def drop_image(request: Request) -> Response:
    """DELETE /v1/kv/view/images/{key}: forget an image's KV, of the pools alone. Whoever shows the
    picture again has it brought from a tier, or computed."""
    services, key = services_of(request), request.path_params["key"]
    services.check_ready()
    if not KEY.fullmatch(key):
        raise RequestError("An image's key is 64 hexadecimal digits.", param="key")
    if not await services.engine.drop_image(bytes.fromhex(key)):
        raise NotFoundError(
            "The pool does not hold this image, or an answer reads it just now.",
            param="key",
            code="image_not_found",
        )
    return JSONBody({"object": "kv.image", "key": key, "dropped": True})


ROUTES = [
    WebSocketRoute(VIEW_PATH, watch),
    Route(VIEW_PATH, show, methods=["GET"]),
    Route(VIEW_PATH + "/images/{key}", drop_image, methods=["DELETE"]),
]
