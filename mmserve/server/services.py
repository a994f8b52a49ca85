"""What every handler needs, made once and passed along: no global holds it.

Also who is asking: `owner_of` names the key behind a request without holding the key.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import HTTPConnection

from mmserve.config import ServerConfig
from mmserve.errors import EngineUnavailableError, ModelLoadingError, ShuttingDownError
from mmserve.server.access import Access
from mmserve.server.ahead import Ahead
from mmserve.server.blobs import BlobStore
from mmserve.server.engine_face import EngineFace, ModelInfo
from mmserve.server.journal import Journal
from mmserve.server.tenants import Tenants
from mmserve.server.tracing import Tracing
from mmserve.server.wire import StreamLimits

if TYPE_CHECKING:
    from mmserve.server.chat import Completion
    from mmserve.server.files import FileStore
    from mmserve.server.image_fetch import ImageFetcher
    from mmserve.server.image_keeper import ImageKeeper
    from mmserve.server.job import Job
    from mmserve.server.kv_feed import KVFeed
    from mmserve.server.memory_guard import MemoryGuard
    from mmserve.server.server_metrics import ServerMetrics
    from mmserve.server.shared import Siblings
    from mmserve.server.store import ResponseStore
    from mmserve.server.turn import Turn


log = logging.getLogger("mmserve.server")

STOP_S = 5.0  # for stopped generations to end
UNAVAILABLE = {
    "restarting": "The engine is being started anew.",
    "stalled": "The engine does not get on with its work.",
}


@dataclass
class Services:
    """The parts of one running server."""

    engine: EngineFace
    config: ServerConfig
    tenants: Tenants
    tracing: Tracing
    journal: Journal
    blobs: BlobStore
    files: FileStore
    responses: ResponseStore
    siblings: Siblings
    metrics: ServerMetrics
    images: ImageKeeper
    kv_feed: KVFeed
    fetcher: ImageFetcher
    memory: MemoryGuard
    draining: bool = False
    started: asyncio.Future[None] | None = None  # the engine's start, once the server runs
    jobs: set[Job] = field(default_factory=set)  # running
    chats: set[Completion] = field(default_factory=set)  # running
    background: set[asyncio.Task[None]] = field(default_factory=set)  # nobody waits for these
    sockets: dict[str, int] = field(default_factory=dict)  # open WebSockets by owner
    ahead: Ahead = field(default_factory=Ahead)

    @property
    def info(self) -> ModelInfo:
        """The served model; raises `ModelLoadingError` until it is known."""
        if self.engine.status == "loading":
            raise ModelLoadingError("The model is still loading.")
        return self.engine.info

    def spawn(self, work: Coroutine[Any, Any, None], instead_of: str | None = None) -> None:
        """Do it beside all else; it ends with the server at the latest, and its fault is logged.

        `instead_of`: a name; what was begun under it before is cancelled.
        """
        task = asyncio.get_running_loop().create_task(work, name=instead_of)
        for other in self.background if instead_of is not None else ():
            if other.get_name() == instead_of:
                other.cancel()
        self.background.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work in the background failed", exc_info=error)

    @property
    def stream_limits(self) -> StreamLimits:
        config, slow = self.config, self.metrics.slow_readers.labels("stream").inc
        return StreamLimits(config.heartbeat_s, config.slow_reader_s, slow)

    @property
    def num_running(self) -> int:
        """Generations, and responses that are not kept yet."""
        return max(self.engine.num_running, len(self.jobs))

    async def stop_jobs(self) -> None:
        """End what still runs, keeping what it has made, and wait for that a while."""
        for chat in list(self.chats):
            chat.close()
        for job in list(self.jobs):
            job.stop()
        if waits := [asyncio.ensure_future(job.wait()) for job in self.jobs]:
            await asyncio.wait(waits, timeout=STOP_S)

    def access(self, owner: str) -> Access:
        """The engine, on behalf of somebody."""
        return Access(self.engine, self.tenants.account(owner), self.tracing)

    def salt(self, owner: str) -> bytes:
        """Equal for those who may share what is held."""
        return self.tenants.account(owner).tenant.salt

    def status(self) -> str:
        """loading | ok | restarting | stalled | draining | dead."""
        return "draining" if self.draining else self.engine.status

    def check_ready(self) -> None:
        """Raise the 503 that tells why no generation can start now."""
        status = self.status()
        if status == "loading":
            raise ModelLoadingError("The model is still loading.")
        if status == "draining":
            raise ShuttingDownError("The server is shutting down.")
        if status != "ok":
            raise EngineUnavailableError(UNAVAILABLE.get(status, "The engine has stopped."))
        self.memory.check()

    def shrink(self) -> None:
        """Give back memory that is held only to save work."""
        self.responses.forget_logs()
        if self.engine.status == "ok":
            self.engine.shrink()
        gc.collect()


def services_of(connection: HTTPConnection) -> Services:
    return cast(Services, connection.app.state.services)


def owner_of(connection: HTTPConnection) -> str:
    """The name of the caller's key, or a digest of it; the same for all where there are no keys."""
    return cast(str, connection.scope["mmserve.owner"])


def access_of(connection: HTTPConnection) -> Access:
    """The engine, on behalf of the caller."""
    return services_of(connection).access(owner_of(connection))


async def turn_of(connection: HTTPConnection) -> Turn:
    """The caller's stored response that the path names. Raises NotFoundError."""
    services, id = services_of(connection), connection.path_params["id"]
    await services.siblings.turn(id)
    return services.responses.get(id, owner_of(connection))
