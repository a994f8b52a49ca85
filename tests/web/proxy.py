"""A TCP proxy that can lose its connections, which `set_offline` does not do to a loopback socket.

Owns bytes in both directions; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from urllib.parse import urlsplit


class CuttingProxy:
    """Forwards to `target` from a thread of its own. `refusing`: new connections are dropped."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.refusing = False
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def cut(self) -> None:
        """Abort every connection: the page sees its socket closed with 1006."""
        asyncio.run_coroutine_threadsafe(self._abort(), self._loop).result(10)

    async def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", 0)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            return writer.transport.abort()
        target = urlsplit(self.target)
        far_reader, far_writer = await asyncio.open_connection(target.hostname, target.port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= {writer, far_writer}

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()
