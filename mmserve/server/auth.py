"""Who may ask: API keys, and the Origin and Host checks of a server without keys.

Owns `Guard`, the middleware before every route, and the rule for keys in WebSocket sub-protocols.
It hands on the owner (a digest), never the key. Knows nothing of what is asked.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from mmserve.config import ServerConfig
from mmserve.errors import RequestError
from mmserve.server.errors import (
    AdminOnlyError,
    InvalidAPIKeyError,
    OriginNotAllowedError,
    error_object,
    error_response,
)
from mmserve.server.wire import dumps

ANONYMOUS = "anonymous"
SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/health", "/health/live"})
ADMIN_PATH = "/v1/kv"  # reads and plants what belongs to everybody
VIEW_PATH = f"{ADMIN_PATH}/view"  # tells of it in counts and ids, and forgets
FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
CLOSED_ROOTS = frozenset({"v1", "metrics", "version"})  # the rest is the page, which holds no data


class Keys:
    """The accepted API keys, held as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: str | None) -> str | None:
        """The owner's name of a right key, None for a wrong one. Constant time over all keys."""
        if key is None:
            return None
        digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:16] if any(matches) else None


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
    """Answers what may not pass; sets `scope["mmserve.owner"]` on what may."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys, self._admins = Keys(config.api_keys), Keys(config.admin_keys)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.allow_origins)
        self._hosts = LOOPBACK | {config.host.lower()}
        self._hosts |= {host_of(urlsplit(origin).netloc) for origin in self._origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        connection = HTTPConnection(scope)
        scope["mmserve.owner"] = ANONYMOUS
        try:
            if needs_admin(scope["path"]):
                if self._keys or self._admins or not _under(scope["path"], VIEW_PATH):
                    scope["mmserve.owner"] = self._owner(connection, self._admins)
                else:
                    self._check_near(connection)
                    self._check_site(connection)
            elif self._keys:
                if needs_key(scope["path"]):
                    scope["mmserve.owner"] = self._owner(connection, self._keys)
            elif scope["path"] not in OPEN_PATHS:
                self._check_site(connection)
            if scope["type"] == "websocket":
                self._check_subprotocols(scope)
        except RequestError as error:
            return await self._refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    def _owner(self, connection: HTTPConnection, keys: Keys) -> str:
        if not keys:
            raise AdminOnlyError("This needs an admin key, and the server has none (--admin-key).")
        key = bearer(connection.headers)
        for element in connection.scope.get("subprotocols", ()):
            if key is None and element.startswith(KEY_SUBPROTOCOL):
                key = element[len(KEY_SUBPROTOCOL) :]
        owner = keys.owner(key)
        if owner is None:
            raise InvalidAPIKeyError(
                "No API key was given." if key is None else "The API key is not valid."
            )
        return owner

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
