"""The router: an ASGI application before the replicas, which speaks as one of them.

Owns what is asked of whom, `/health` and `/metrics` of all together. Everything else is the
replicas': keys, limits, refusals and answers are passed on as they are. Keeps nothing that another
router would need. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging

import httpcore
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmserve.config import ServerConfig
from mmserve.deploy.asked import Asked, of_form, of_json, of_path
from mmserve.deploy.directory import Directory, Facts
from mmserve.deploy.figures import METRICS_TYPE, with_replicas
from mmserve.deploy.headers import passed_on
from mmserve.deploy.http_pass import (
    BROKEN,
    Body,
    ClientLeftError,
    Exchange,
    NoReplicaError,
    connections,
    target,
)
from mmserve.deploy.socket_pass import Relay
from mmserve.server.bodies import FORM
from mmserve.server.wire import JSONBody

log = logging.getLogger("mmserve.deploy")

LARGE = 1 << 18  # bytes of a body that is read beside the event loop
FIRST_FRAME_SAYS = "/v1/responses"  # Realtime's server speaks first
METRICS_S = 5.0
KEPT_S = 30.0  # a connection without a request; a replica would close it later


class Proxy:
    """`directory` is kept up to date by whoever knows the replicas."""

    def __init__(self, directory: Directory, config: ServerConfig | None = None) -> None:
        self.directory = directory
        self._config = config or ServerConfig()
        self._pool = connections(KEPT_S)
        self._exchange = Exchange(self._pool, self._failed)

    def _failed(self, replica: Facts) -> None:
        self.directory.failed(replica.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["type"] == "websocket":
            return await self._socket(scope, receive, send)
        if scope["path"] == "/health":
            return await self._health()(scope, receive, send)
        if scope["path"] == "/metrics":
            return await (await self._metrics(scope))(scope, receive, send)
        await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await self._pool.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    def _health(self) -> Response:
        count = len(self.directory.ready())
        if count:
            return JSONBody({"status": "ok", "replicas": count})
        return JSONBody({"status": "loading", "replicas": 0}, 503, headers={"retry-after": "5"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(receive, self._config.max_body_bytes)
        try:
            await body.read()
            named = of_path(scope["path"])
            asked = named if named.home else await self._asked(scope, body)
            candidates = self.directory.candidates(asked, reads=named.home is not None)
            if candidates:
                self.directory.remember(asked, candidates[0].name)
            replica = await self._exchange.run(scope, body, candidates, send)
            self.directory.remember(asked, replica.name)
        except ClientLeftError:
            return
        except NoReplicaError:
            await no_replica()(scope, receive, send)

    async def _asked(self, scope: Scope, body: Body) -> Asked:
        if not body.whole or not body.data:
            return Asked()
        headers = Headers(scope=scope)
        if headers.get("content-type", "").startswith(FORM):
            return await of_form(headers, body.data)
        if len(body.data) < LARGE:
            return of_json(body.data)
        return await asyncio.to_thread(of_json, body.data)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        directory = self.directory

        def better(frame: str | bytes) -> Facts | None:
            asked = of_json(frame)
            chosen = directory.candidates(asked)[:1]
            for each in chosen:
                directory.remember(asked, each.name)
            return chosen[0] if chosen else None

        speaks_first = scope["path"] == FIRST_FRAME_SAYS
        relay = Relay(scope, receive, send, directory.sockets)
        await relay.run(directory.calmest(), better if speaks_first else None, self._failed)

    async def _metrics(self, scope: Scope) -> Response:
        replicas = self.directory.reachable()
        answers = await asyncio.gather(*(self._ask(each, scope) for each in replicas))
        texts: dict[str, str] = {}
        for each, answer in zip(replicas, answers, strict=True):
            if answer is None:
                continue
            if answer.status != 200:  # a key is missing, which each of them says
                headers = Headers(raw=passed_on(answer.headers))
                return Response(answer.content, answer.status, headers)
            texts[each.name] = answer.content.decode()
        return Response(with_replicas(texts), media_type=METRICS_TYPE)

    async def _ask(self, replica: Facts, scope: Scope) -> httpcore.Response | None:
        limits = dict.fromkeys(("connect", "read", "write", "pool"), METRICS_S)
        headers = passed_on(scope["headers"])
        try:
            return await self._pool.request(
                "GET", target(replica, scope), headers=headers, extensions={"timeout": limits}
            )
        except (*BROKEN, httpcore.TimeoutException):
            return None


def no_replica() -> Response:
    """The refusal where none is there, which a client may try again."""
    error = {
        "message": "No replica takes requests now.",
        "type": "server_error",
        "param": None,
        "code": "no_replica",
    }
    return JSONBody({"error": error}, 503, headers={"retry-after": "5"})
