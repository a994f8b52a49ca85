"""The outermost layer: request ids, body limits, the access log and faults that nobody caught.

Logs method, path, status, time and whose it was; never a query, header or body. A client may name
its request itself (`x-request-id`). Knows nothing of routes.
"""

from __future__ import annotations

import logging
import re
import sys
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.config import ServerConfig
from mmserve.server.auth import ADMIN_PATH
from mmserve.server.errors import RequestTooLargeError, error_response, internal_error
from mmserve.server.server_metrics import ServerMetrics
from mmserve.server.wire import ClientGoneError, new_id

MULTIPART_OVERHEAD = 64 * 1024  # bytes around a file in a form
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # that a client may choose
PROBES = frozenset({"/health", "/health/live", "/metrics"})  # asked every second, by machines
CLIENT_CLOSED_REQUEST = 499  # for the log and the metrics only; nobody is there to read it

access_log = logging.getLogger("mmserve.access")
log = logging.getLogger("mmserve.server")


class Exchange:
    """One request's way through: counts what comes in, marks what goes out."""

    def __init__(self, receive: Receive, send: Send, limit: int, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._read = 0
        self.request_id = request_id
        self.status = 0  # until the answer has begun

    def too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"The request body is larger than {self._limit / 2**20:g} MiB.")

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            if self._read > self._limit:
                raise self.too_large()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.accept":
            self.status = 101
            named = (b"x-request-id", self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), named]}
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            headers["x-request-id"] = self.request_id
            if self.status == 413:
                headers["connection"] = "close"  # the rest of the body is not read
            message = {**message, "headers": headers.raw}
        await self._send(message)


class Envelope:
    """Wraps every HTTP request and every WebSocket."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics

    def _limit(self, path: str) -> int:
        if path == ADMIN_PATH:
            return sys.maxsize  # whoever may send it is asked before; the disk is the limit
        if path == "/v1/files":
            return self._config.max_file_bytes + MULTIPART_OVERHEAD
        return self._config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        began = time.monotonic()
        path, asked = scope["path"], Headers(scope=scope)
        limit = self._limit(path)
        name = asked.get("x-request-id", "")
        request_id = name if REQUEST_ID.fullmatch(name) else new_id("req")
        exchange = Exchange(receive, send, limit, request_id)
        length = asked.get("content-length", "")
        try:
            if length.isdigit() and int(length) > limit:
                await error_response(exchange.too_large())(scope, receive, exchange.send)
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except ClientGoneError:
            exchange.status = CLIENT_CLOSED_REQUEST
        except Exception:
            log.exception("%s failed", request_id, extra={"fields": {"request_id": request_id}})
            if scope["type"] == "websocket":
                raise  # the protocol says on the socket that it has failed
            if exchange.status == 0:
                await error_response(internal_error())(scope, receive, exchange.send)
        finally:
            self._log(scope, exchange, time.monotonic() - began)

    def _log(self, scope: Scope, exchange: Exchange, seconds: float) -> None:
        if scope["type"] == "http":
            endpoint = getattr(scope.get("endpoint"), "__name__", "none")
            self._metrics.request(endpoint, exchange.status)
        fields = {
            "method": scope.get("method", "WEBSOCKET"),
            "path": scope["path"].encode("unicode_escape").decode("ascii"),
            "status": exchange.status,
            "ms": round(seconds * 1e3, 1),
            "request_id": exchange.request_id,
            "owner": scope.get("mmserve.owner"),
        }
        line = "%(method)s %(path)s %(status)d %(ms).1f ms %(request_id)s"
        quiet = scope["path"] in PROBES and exchange.status == 200
        access_log.log(
            logging.DEBUG if quiet else logging.INFO, line, fields, extra={"fields": fields}
        )
