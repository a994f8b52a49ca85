"""Running the application in a process: uvicorn, TLS, signals, log levels.

Owns what a process owns. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from types import FrameType

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mmserve.config import ServerConfig
from mmserve.server.app import create_app
from mmserve.server.auth import LOOPBACK
from mmserve.server.engine_face import EngineFace
from mmserve.server.services import Services

log = logging.getLogger("mmserve.server")

GRACEFUL_S = 10  # seconds that running answers get after SIGTERM
BACKLOG = 2048  # connections not yet accepted, as uvicorn has it


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, except that a peer which stopped reading is dropped once its session has ended.

    A plain close waits for the write buffer to empty, which then never happens.
    """

    async def run_asgi(self) -> None:
        await super().run_asgi()
        if not self.writable.is_set():
            self.transport.abort()


class InsecureBindError(ValueError):
    """Without keys the server listens on loopback only."""


class CannotListenError(OSError):
    """The address is in use, or not ours to take."""


class Server(uvicorn.Server):
    """Says when it is ready, and drains from the moment a signal comes.

    `failure` is why the engine could not start; the server then exits.
    """

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self.failure: Exception | None = None
        self._services = services
        self._announcing: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.draining = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announcing = asyncio.ensure_future(self._announce())

    def url(self) -> str:
        """Where it listens; after `started`."""
        scheme = "https" if self.config.is_ssl else "http"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{scheme}://{host}:{self.servers[0].sockets[0].getsockname()[1]}"

    async def _announce(self) -> None:
        assert self._services.started is not None
        print(f"mmserve loads its model and will answer at {self.url()}", file=sys.stderr)
        try:
            await self._services.started
        except Exception as error:
            self.failure, self.should_exit = error, True
        else:
            print(f"mmserve is ready: {self.url()}", flush=True)


def make_server(config: ServerConfig, engine: EngineFace) -> Server:
    """A server that has not started. Raises `InsecureBindError`."""
    if not config.api_keys and config.host not in LOOPBACK:
        raise InsecureBindError(f"Listening on {config.host} needs an API key.")
    app = create_app(engine, config)
    return Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ws=SocketProtocol,
            ws_max_size=config.max_frame_bytes,
            ws_per_message_deflate=False,  # images do not shrink, and text is short
            access_log=False,  # ours never shows a query
            server_header=False,
            log_level="warning",
            timeout_graceful_shutdown=GRACEFUL_S,
        ),
        app.state.services,
    )


def listen(config: ServerConfig) -> socket.socket:
    """The listening socket: bound before a model is loaded. Raises `CannotListenError`."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListenError(f"cannot listen: {error.strerror}") from error


def serve(config: ServerConfig, engine: EngineFace) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises `CannotListenError`, and whatever kept the engine from starting.
    """
    logging.getLogger("mmserve.access").setLevel(logging.INFO)
    server = make_server(config, engine)
    with listen(config) as sock:
        server.run(sockets=[sock])
    if server.failure is not None:
        raise server.failure
