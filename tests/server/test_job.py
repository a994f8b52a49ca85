"""When a generation without readers ends, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mmserve.request import FinishReason, Timings, TokenEvent, Usage
from mmserve.server.event_log import EventLog
from mmserve.server.job import Job
from mmserve.server.transcript import Transcript

GRACE_S = 60.0


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time, in seconds, stands still until it is moved."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def forward(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(9):  # more turns than anything here needs to come to an end
            await asyncio.sleep(0)


class Endless:
    """A generation that ends only when it is aborted."""

    id = "resp_1"

    def __init__(self) -> None:
        self._aborted = asyncio.Event()

    def abort(self) -> None:
        self._aborted.set()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        await self._aborted.wait()
        yield TokenEvent(finish_reason=FinishReason.ABORT, usage=Usage(), timings=Timings())


def started(grace_s: float | None) -> Job:
    transcript, log = Transcript("resp_1", {}), EventLog(100, 10**6)
    return Job(transcript, Endless(), log, grace_s=grace_s, on_done=lambda: None)


def run(test: Callable[[Clock], Awaitable[None]]) -> None:
    clock = Clock()

    async def whole() -> None:
        await test(clock)

    try:
        clock.run_until_complete(whole())
    finally:
        clock.close()


def test_the_grace_begins_when_the_last_reader_leaves() -> None:
    async def test(clock: Clock) -> None:
        job = started(GRACE_S)
        first, second = job.attach(), job.attach()
        await clock.forward(2 * GRACE_S)
        first.close()
        first.close()
        await clock.forward(2 * GRACE_S)
        assert job.active
        second.close()
        await clock.forward(GRACE_S - 1)
        assert job.active
        await clock.forward(2)
        assert job.transcript.status == "cancelled"

    run(test)


def test_a_new_reader_stops_the_clock_which_then_begins_anew() -> None:
    async def test(clock: Clock) -> None:
        job = started(GRACE_S)
        job.attach().close()
        await clock.forward(GRACE_S - 1)
        reader = job.attach()
        await clock.forward(2 * GRACE_S)
        assert job.active
        reader.close()
        await clock.forward(GRACE_S - 1)
        assert job.active
        await clock.forward(2)
        assert job.transcript.status == "cancelled"

    run(test)


@pytest.mark.parametrize(("grace_s", "runs_on"), [(None, True), (0.0, False)])
def test_a_job_may_need_no_reader_or_always_one(grace_s: float | None, runs_on: bool) -> None:
    async def test(clock: Clock) -> None:
        job = started(grace_s)
        await clock.forward(1e6)
        job.attach().close()
        await clock.forward(1e6 if runs_on else 0)
        assert job.active is runs_on
        job.stop()
        await job.wait()
        assert job.transcript.status == ("failed" if runs_on else "cancelled")

    run(test)
