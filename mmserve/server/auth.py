"""Who may ask: API keys, and the Origin and Host checks of a server without keys.

Owns `Guard`, the middleware before every route, and the rule for keys in WebSocket sub-protocols.
It hands on the owner (a name or a digest), never the key. Knows nothing of what is asked.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from mmserve.config import ServerConfig
from mmserve.errors import RequestError
from mmserve.server.errors import (
    AdminOnlyError,
    InvalidAPIKeyError,
    OriginNotAllowedError,
    error_object,
    error_response,
)
from mmserve.server.key_file import Entry
from mmserve.server.tenants import Tenants
from mmserve.server.wire import dumps

ANONYMOUS = "anonymous"
SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/health", "/health/live"})
OPERATOR_PATHS = frozenset({"/metrics"})  # where there are keys: hit rates tell of everybody
ADMIN_PATH = "/v1/kv"  # reads and plants what belongs to everybody
VIEW_PATH = f"{ADMIN_PATH}/view"  # tells of it in counts and ids, and forgets
FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
# The rest is the page, which holds no data.
CLOSED_ROOTS = frozenset({"v1", "metrics", "version", "openapi.json"})


def bearer(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def host_of(netloc: str) -> str:
    """The host without port and brackets, lower case; empty where it cannot be read."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def needs_key(path: str) -> bool:
    return path not in OPEN_PATHS and path.lstrip("/").split("/", 1)[0] in CLOSED_ROOTS


def _under(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def needs_admin(path: str) -> bool:
    return _under(path, ADMIN_PATH)


class Guard:
    """Answers what may not pass; sets `scope["mmserve.owner"]` on what may, and tells a tenant with
    limits on each answer what is left of them."""

    def __init__(self, app: ASGIApp, config: ServerConfig, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.allow_origins)
        self._hosts = LOOPBACK | {config.host.lower()}
        self._hosts |= {host_of(urlsplit(origin).netloc) for origin in self._origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        scope["mmserve.owner"] = ANONYMOUS
        try:
            entry = self._admit(HTTPConnection(scope))
            if scope["type"] == "websocket":
                self._check_subprotocols(scope)
        except RequestError as error:
            return await self._refuse(error, scope, receive, send)
        if entry is None:
            return await self._app(scope, receive, send)
        scope["mmserve.owner"] = entry.owner
        if scope["type"] == "websocket":
            held = HeldSocket(self._tenants, entry, receive, send)
            return await self._app(scope, held.receive, held.send)
        await self._app(scope, receive, self._telling(entry, send))

    def _admit(self, connection: HTTPConnection) -> Entry | None:
        """The key that something is asked with; None: it needs none. Raises `RequestError`."""
        path, tenants = connection.scope["path"], self._tenants
        if needs_admin(path):
            if tenants.needs_keys or tenants.has_admins or not _under(path, VIEW_PATH):
                return self._entry(connection, admin=True)
            self._check_near(connection)
            self._check_site(connection)
        elif tenants.needs_keys:
            if needs_key(path):
                return self._entry(connection, admin=path in OPERATOR_PATHS)
        elif path not in OPEN_PATHS:
            self._check_site(connection)
        return None

    def _entry(self, connection: HTTPConnection, *, admin: bool) -> Entry:
        if admin and not self._tenants.has_admins:
            raise AdminOnlyError("This needs an admin key, and the server has none (--admin-key).")
        key = bearer(connection.headers)
        for element in connection.scope.get("subprotocols", ()):
            if key is None and element.startswith(KEY_SUBPROTOCOL):
                key = element[len(KEY_SUBPROTOCOL) :]
        if key is None:
            raise InvalidAPIKeyError("No API key was given.")
        entry = self._tenants.find(key, admin=admin)
        if entry is None:
            raise InvalidAPIKeyError("The API key is not valid.")
        return entry

    def _telling(self, entry: Entry, send: Send) -> Send:
        meter = self._tenants.account(entry.owner).meter

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and (left := meter.headers()):
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers.update(left)
                message = {**message, "headers": headers.raw}
            await send(message)

        return tell

    def _check_near(self, connection: HTTPConnection) -> None:
        """Without any key, only a browser on this machine, and not through somebody's proxy."""
        client = connection.client
        relayed = any(name in connection.headers for name in FORWARDED)
        if relayed or client is None or client.host not in LOOPBACK:
            raise AdminOnlyError(
                "Without an admin key (--admin-key) this is shown on the server's own machine only."
            )

    def _check_site(self, connection: HTTPConnection) -> None:
        """Without keys a foreign page must not reach us, neither directly nor by DNS rebinding."""
        host = connection.headers.get("host", "")
        if host_of(host) not in self._hosts:
            raise OriginNotAllowedError("The Host header names another server.")
        origin = connection.headers.get("origin")
        safe = connection.scope["type"] == "http" and connection.scope["method"] in ("GET", "HEAD")
        if origin is None or safe:
            return
        origin = origin.rstrip("/").lower()
        if origin not in self._origins and urlsplit(origin).netloc != host.lower():
            raise OriginNotAllowedError("This origin may not use the server.")

    @staticmethod
    def _check_subprotocols(scope: Scope) -> None:
        offered = scope["subprotocols"]
        if offered and SUBPROTOCOL not in offered:
            raise RequestError(f"Offer the sub-protocol '{SUBPROTOCOL}', or none.")

    async def _refuse(
        self, error: RequestError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = error_response(error)
        if scope["type"] == "http":
            return await response(scope, receive, send)
        socket = WebSocket(scope, receive, send)
        await socket.receive()  # websocket.connect
        if error.status == 401 and SUBPROTOCOL in scope["subprotocols"]:
            # A browser cannot read the status of a refused handshake: tell it on the socket.
            await socket.accept(subprotocol=SUBPROTOCOL)
            event = {"type": "error", "status": error.status, "error": error_object(error)}
            await socket.send_text(dumps(event))
            return await socket.close(1008, "invalid_api_key")
        await socket.send_denial_response(response)


def chosen_subprotocol(scope: Scope) -> str | None:
    """What to answer a handshake with: never the element that carries a key."""
    return SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None


class HeldSocket:
    """A WebSocket that lives as long as its key does: what is said once that is withdrawn, by
    either side, closes it."""

    def __init__(self, tenants: Tenants, entry: Entry, receive: Receive, send: Send) -> None:
        self._tenants, self._entry = tenants, entry
        self._receive, self._send = receive, send

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "websocket.receive" or self._tenants.holds(self._entry):
            return message
        await self._close()
        return {"type": "websocket.disconnect", "code": 1008}

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.send" and not self._tenants.holds(self._entry):
            await self._close()
            raise WebSocketDisconnect(1008)
        await self._send(message)

    async def _close(self) -> None:
        await self._send({"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"})
