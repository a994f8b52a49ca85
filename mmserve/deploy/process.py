"""One replica's server as a process: started, watched, asked how it is, and told to end.

Owns the process and its `/health` and `/metrics`. Knows nothing of Ray or of other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence

import httpcore

from mmserve.deploy.figures import Figures, figures

READY = "mmserve is ready: "
ASK_S = 5.0
LAST_S = 5.0  # beyond the time in which it drains
# Ray tells its workers to use as many threads as they have reserved cores; a replica reserves none.
RAYS_OWN = "OMP_NUM_THREADS"


class ServerEndedError(RuntimeError):
    """The server of a replica is no longer there."""


class ServerProcess:
    """`flags`: of `mmserve serve`. `admin`: a key for its figures, where it asks for keys."""

    def __init__(self, flags: Sequence[str], admin: str | None) -> None:
        self._flags, self._admin = tuple(flags), admin
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pool = httpcore.AsyncConnectionPool()
        self._before = (Figures(), time.monotonic())
        self.url = ""
        self.queue_s = 0.0
        self.now = Figures()
        self.ready = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns once it takes requests; raises `ServerEndedError` where it never will."""
        environment = {name: value for name, value in os.environ.items() if name != RAYS_OWN}
        if self._admin is not None:
            keys = environment.get("MMSERVE_ADMIN_KEY", "")
            environment["MMSERVE_ADMIN_KEY"] = f"{keys} {self._admin}".strip()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "mmserve.deploy.supervised", "serve", *self._flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if (text := line.decode()).startswith(READY):
                self.url = text.removeprefix(READY).strip()
                self._reading = asyncio.ensure_future(self._read(self._process.stdout))
                await self.look()
                return
        raise ServerEndedError(f"the server ended with {await self._process.wait()}")

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            print(line.decode(), end="", flush=True)

    async def look(self) -> None:
        """Ask how it is: `ready`, `now` and `queue_s` are as of then."""
        self.ready = self.alive and await self._get("/health") is not None
        text = await self._get("/metrics") if self.ready else None
        if text is not None:
            at, (before, since) = time.monotonic(), self._before
            self.now = figures(text)
            self.queue_s = self.now.queue_s(before, at - since)
            if at - since > 10 * ASK_S:  # a rate is of some time
                self._before = self.now, at

    async def _get(self, path: str) -> str | None:
        headers: dict[bytes | str, bytes | str] = {"host": "localhost"}
        if self._admin is not None:
            headers["authorization"] = f"Bearer {self._admin}"
        limits = dict.fromkeys(("connect", "read", "write", "pool"), ASK_S)
        try:
            answer = await self._pool.request(
                "GET", self.url + path, headers=headers, extensions={"timeout": limits}
            )
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.RemoteProtocolError):
            return None
        return answer.content.decode() if answer.status == 200 else None

    async def stop(self, drain_s: float) -> None:
        """Let it drain, and end it at the latest then."""
        self.ready = False
        if self._process is not None and self.alive:
            self._process.terminate()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), drain_s + LAST_S)
            if self.alive:
                self._process.kill()
        await self._pool.aclose()
