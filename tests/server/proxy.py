"""A TCP proxy that can lose its connections, which a browser's `set_offline` does not do to them.

Owns bytes in both directions; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from urllib.parse import urlsplit

from tests.server.conftest import PATIENCE_S


class CuttingProxy:
    """Forwards to `target` from a thread of its own, as a context.

    `refusing`: new connections are dropped. `num_accepted` and `num_refused` count connections.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.refusing = False
        self.num_accepted = 0
        self.num_refused = 0
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(PATIENCE_S)

    def cut(self) -> None:
        """Abort every connection: a WebSocket sees its end as 1006."""
        asyncio.run_coroutine_threadsafe(self._abort(), self._loop).result(PATIENCE_S)

    async def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        server.close()
        # A relay that is cancelled instead of ended is reported as an error by asyncio's streams.
        while self._relays:
            await self._abort()
            await asyncio.wait(self._relays, timeout=0.1)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            self.num_refused += 1
            return writer.transport.abort()
        self.num_accepted += 1
        self._writers.add(writer)
        relay = self._loop.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(self.target)
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(target.hostname, target.port)
            self._writers.add(far_writer)
            if writer.is_closing():  # cut while the other side was being opened
                far_writer.transport.abort()
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
            self._writers.discard(far_writer)
        self._writers.discard(writer)
        writer.transport.abort()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of either side."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
