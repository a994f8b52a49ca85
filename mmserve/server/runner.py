"""Running the application in a process: uvicorn, TLS, signals, how it ends, log levels.

Owns what a process owns. Knows nothing of routes.

The first SIGTERM or SIGINT drains: the server goes on listening, answers new work with 503, and
lets what runs come to its end; then sockets are closed with 1012. The second ends at once. So does
an engine that can never compute again, for a supervisor to start the process anew.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mmserve.config import ServerConfig
from mmserve.server import logs
from mmserve.server.app import create_app
from mmserve.server.auth import LOOPBACK
from mmserve.server.engine_face import EngineFace
from mmserve.server.services import Services
from mmserve.server.wire import DROP

log = logging.getLogger("mmserve.server")

# A connection without a request: longer than clients keep theirs (OpenAI's SDK 5 s), so that none
# is closed just when they ask again.
IDLE_S = 75
LAST_WORDS_S = 5  # for what has ended to be read to its end, once the server closes
TICK_S = 0.05  # between two looks whether all has ended
BACKLOG = 2048  # connections not yet accepted, as uvicorn has it


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, except that a peer which stopped reading is dropped once its session has ended.

    A plain close waits for the write buffer to empty, which then never happens.
    """

    async def run_asgi(self) -> None:
        await super().run_asgi()
        if not self.writable.is_set():
            self.transport.abort()


class HTTPProtocol(H11Protocol):
    """uvicorn's, except that a stream may cut its connection when nobody reads it: a plain close
    waits for the write buffer, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app = self.app

        async def with_drop(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, DROP: self.transport.abort}, receive, send)

        self.app = with_drop


class InsecureBindError(ValueError):
    """Without keys the server listens on loopback only."""


class CannotListenError(OSError):
    """The address is in use, or not ours to take."""


class EngineLostError(RuntimeError):
    """This process can never compute again; another may."""


class Server(uvicorn.Server):
    """Says when it is ready, and drains from the moment a signal comes.

    `failure` is why the engine could not start, or never will again; the server then exits.
    """

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self.failure: Exception | None = None
        self._services = services
        self._announcing: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        self._signals += 1
        self._services.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        if self._signals > 1:
            self.should_exit = self.force_exit = True
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        """Until nothing runs any more, or time is up: what still runs then is stopped."""
        services, loop = self._services, asyncio.get_running_loop()
        until = loop.time() + services.config.drain_s
        while services.num_running and loop.time() < until:
            await asyncio.sleep(TICK_S)
        await services.stop_jobs()
        self.should_exit = True

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
            return
        print(f"mmserve is ready: {self.url()}", flush=True)
        why = await self._services.engine.lost()
        self._services.draining = True
        self.failure, self.should_exit = EngineLostError(f"the engine is lost: {why}"), True


def make_server(config: ServerConfig, engine: EngineFace) -> Server:
    """A server that has not started. Raises `InsecureBindError`."""
    needs_keys = config.api_keys or config.api_key_file is not None
    if not needs_keys and config.host not in LOOPBACK:
        raise InsecureBindError(f"Listening on {config.host} needs an API key.")
    app = create_app(engine, config)
    return Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            http=HTTPProtocol,
            ws=SocketProtocol,
            loop="asyncio",  # the same whatever else is installed
            ws_max_size=config.max_frame_bytes,
            ws_per_message_deflate=False,  # images do not shrink, and text is short
            access_log=False,  # ours never shows a query
            log_config=None,  # nor does ours quote what failed
            server_header=False,
            log_level="warning",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
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


def allow_many_files() -> None:
    """A connection is a file, and most systems allow a process a thousand unless it asks."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(config: ServerConfig, engine: EngineFace) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises `CannotListenError`, whatever kept the engine from starting, or `EngineLostError`.
    """
    logs.install(config.log_format)
    allow_many_files()
    server = make_server(config, engine)
    with listen(config) as sock:
        server.run(sockets=[sock])
    if server.failure is not None:
        raise server.failure
