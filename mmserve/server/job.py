"""A generation detached from whoever reads it.

Owns the task that turns token events into logged response events, its readers, and the rule of when
a generation without readers is aborted. Knows nothing of HTTP or sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from mmserve.server.engine_face import Generation
from mmserve.server.event_log import Event, EventLog
from mmserve.server.transcript import Transcript

log = logging.getLogger("mmserve.server")


class Tail:
    """One reader of a job. Attached from construction until `close`."""

    def __init__(self, job: Job, after: int = -1) -> None:
        self._job = job
        self._after = after
        self._open = True
        job.reader_came()

    async def events(self) -> AsyncGenerator[Event, None]:
        async for event in self._job.log.read(self._after):
            yield event

    def close(self) -> None:
        """Detach; harmless when done before."""
        if self._open:
            self._open = False
            self._job.reader_left()


class Job:
    """Runs one generation to its terminal event.

    `grace_s`: how long it runs on without a reader before it is aborted; None: to its end.
    `settle` is awaited before the terminal event, which is a promise that the response is kept.
    `on_done` is called once, after the log is closed.
    """

    def __init__(
        self,
        transcript: Transcript,
        generation: Generation,
        log: EventLog,
        *,
        grace_s: float | None,
        on_done: Callable[[], None],
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.transcript = transcript
        self.log = log
        # Dropped at the end: it holds the prompt, and with it every image's bytes.
        self._generation: Generation | None = generation
        self._grace_s = grace_s
        self._num_readers = 0
        self._timer: asyncio.TimerHandle | None = None
        transcript.begin(log)
        self._task = asyncio.get_running_loop().create_task(self._run(on_done, settle))

    @property
    def active(self) -> bool:
        return not self.log.closed

    async def wait(self) -> None:
        """Until the terminal event is logged. Cancelling the waiter does not cancel the job."""
        await asyncio.shield(self._task)

    def attach(self, after: int = -1) -> Tail:
        return Tail(self, after)

    def cancel(self) -> None:
        """A user's wish: the response ends as `cancelled` with what was made so far."""
        if self._generation is not None:
            self.transcript.cancelled = True
            self._generation.abort()

    def stop(self) -> None:
        """The server's wish: the response ends with what was made so far, and can be continued;
        as `failed` where that is nothing."""
        if self._generation is not None:
            self.transcript.interrupted = True
            self._generation.abort()

    def reader_came(self) -> None:
        self._num_readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reader_left(self) -> None:
        self._num_readers -= 1
        if self._num_readers or self._grace_s is None or not self.active:
            return
        if self._grace_s == 0:
            self.cancel()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace_s, self.cancel)

    async def _run(
        self, on_done: Callable[[], None], settle: Callable[[], Awaitable[None]] | None
    ) -> None:
        assert self._generation is not None
        try:
            async for event in self._generation:
                self.transcript.feed(event, self.log)
        except Exception:
            log.exception("%s failed", self.transcript.id)
        finally:
            self._generation.abort()
            self._generation = None
            self.transcript.end(self.log)
            try:
                if settle is not None:
                    await settle()
            finally:
                self.transcript.conclude(self.log)
                self.log.close()
                if self._timer is not None:
                    self._timer.cancel()
                on_done()
