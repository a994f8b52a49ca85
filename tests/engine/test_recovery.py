"""An engine that fails: what its requests are told, and that the next one is answered.

Faults are armed by name. After each the books are checked, the pools are idle, and an answer is the
one that an engine gives which never failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.recovery import RESTARTS_IN_A_ROW, STEPS_IN_A_ROW
from mmserve.errors import EngineUnavailableError
from mmserve.faults import Faults
from mmserve.held_image import ImageId
from mmserve.request import FinishReason, TokenEvent
from mmserve.scheduler.batch import Batch
from tests.engine.driver import picture
from tests.engine.test_async_engine import (
    GREEDY,
    LONG,
    ask,
    at_rest,
    collect,
    prompt,
    run,
    tokens,
)
from tests.engine.tiny import build_tiny, tiny_config

PICTURE = picture(1)


@asynccontextmanager
async def failing(
    armed: str, *, watchdog_s: float = 0.0, seats: int = 64
) -> AsyncIterator[tuple[AsyncEngine, Faults]]:
    """An engine that has answered once; then the faults are armed."""
    faults = Faults("tier.read=error@1000000")  # whoever holds it may be armed later
    config = replace(tiny_config(max_num_seqs=seats), faults=faults, watchdog_s=watchdog_s)
    engine = AsyncEngine(config, build=build_tiny)
    await engine.start()
    try:
        assert await ask(engine, "before", "Hello", PICTURE)
        for part in filter(None, armed.split(",")):
            faults.arm(part)
        yield engine, faults
    finally:
        faults.release()
        await engine.stop()
        await asyncio.to_thread(engine._thread.stop)  # also where it was given up


async def last(engine: AsyncEngine, id: str) -> TokenEvent:
    """The last event of a request that may be refused on its way."""
    made = await prompt(engine, "Hello", PICTURE)
    return (await collect(engine.submit(id, made, LONG)))[-1]


async def until(engine: AsyncEngine, status: str) -> None:
    while engine.status != status:
        await asyncio.sleep(0.002)


async def healthy() -> list[int]:
    async with failing("") as (engine, _):
        return await ask(engine, "after", "Hello", PICTURE)


@pytest.mark.parametrize(
    ("armed", "code"),
    [
        ("engine.launch=error", "engine_restarted"),
        ("engine.launch=oom", "out_of_memory"),
        ("engine.launch=error@4", "engine_restarted"),
        ("engine.launch=oom@4", "out_of_memory"),
        ("engine.launch=error,engine.recover=error", "engine_restarted"),
        ("engine.command=error", "engine_restarted"),
    ],
)
def test_a_fault_ends_what_ran_and_the_next_request_is_answered(armed: str, code: str) -> None:
    async def test() -> None:
        expected = await healthy()
        async with failing(armed) as (engine, _):
            event = await last(engine, "doomed")
            assert (event.finish_reason, event.code) == (FinishReason.ERROR, code)
            assert event.error and "injected" not in event.error
            await until(engine, "ok")
            assert await ask(engine, "after", "Hello", PICTURE) == expected
            assert await at_rest(engine)
            await engine.call(engine.engine.scheduler.check_invariants)

    run(test)


def test_steps_that_fail_in_a_row_are_answered_by_an_engine_with_empty_pools() -> None:
    async def test() -> None:
        async with failing(f"engine.launch=error*{STEPS_IN_A_ROW}") as (engine, _):
            first = engine.engine
            for number in range(STEPS_IN_A_ROW):
                assert engine.engine is first
                assert (await last(engine, str(number))).code == "engine_restarted"
            while engine.engine is first:
                await asyncio.sleep(0.002)
            assert engine.status == "ok" and engine.engine.runner is first.runner
            assert await at_rest(engine)
            text, vision = first.runner.text[0], first.runner.vision[0]
            assert text.pages.num_free == text.pages.num_pages and vision.index.num_used == 0
            assert engine.metrics is first.metrics
            assert await ask(engine, "after", "Hello", PICTURE) == await healthy()

    run(test)


def test_out_of_memory_ends_what_runs_and_leaves_what_waits() -> None:
    async def test() -> None:
        async with failing("engine.launch=oom@6", seats=2) as (engine, _):
            made = await prompt(engine, "Hello", PICTURE)
            three = [collect(engine.submit(id, made, replace(LONG, max_tokens=40))) for id in "abc"]
            ends = [events[-1] for events in await asyncio.gather(*three)]
            assert [event.code for event in ends] == ["out_of_memory", "out_of_memory", None]
            assert ends[2].finish_reason is FinishReason.LENGTH
            assert await at_rest(engine)

    run(test)


def test_images_stay_pinned_over_a_restart() -> None:
    async def test() -> None:
        async with failing("engine.command=error@3") as (engine, _):
            image = await engine.identify(PICTURE)
            await engine.pin_image(image)
            first = engine.engine
            with pytest.raises(EngineUnavailableError):
                for _ in range(3):
                    await engine.held_images([image])
            await until(engine, "ok")
            assert engine.engine is not first
            held: list[ImageId] = engine.engine.images.pinned
            assert held == [image]

    run(test)


def test_an_engine_that_fails_again_and_again_is_given_up() -> None:
    async def test() -> None:
        times = RESTARTS_IN_A_ROW + 1
        armed = f"engine.launch=error*{times},engine.recover=error*{times}"
        async with failing(armed) as (engine, _):
            for number in range(times):
                assert (await last(engine, str(number))).finish_reason is FinishReason.ERROR
                while engine.status == "restarting":
                    await asyncio.sleep(0.002)
            assert engine.status == "dead" and "times in a row" in await engine.lost()
            with pytest.raises(EngineUnavailableError, match="dead"):
                engine.submit("late", await prompt(engine, "Hello"), GREEDY)
            with pytest.raises(EngineUnavailableError):
                await engine.held_images([])

    run(test)


def test_a_device_that_no_longer_computes_is_told_at_once() -> None:
    async def test() -> None:
        async with failing("engine.launch=error,device.probe=error*9") as (engine, _):
            event = await last(engine, "doomed")
            assert event.finish_reason is FinishReason.ERROR
            assert "no longer computes" in await engine.lost()
            assert engine.status == "dead"

    run(test)


def test_a_step_that_stands_still_is_reported_and_forgiven_when_it_ends() -> None:
    async def test() -> None:
        async with failing("engine.launch=hang", watchdog_s=1.5) as (engine, faults):
            made = await prompt(engine, "Hello")
            answer = asyncio.create_task(collect(engine.submit("slow", made, GREEDY)))
            await until(engine, "stalled")
            with pytest.raises(EngineUnavailableError, match="stalled"):
                engine.submit("refused", made, GREEDY)
            faults.release()
            assert len(tokens(await answer)) == 6
            await until(engine, "ok")

    run(test)


def test_a_step_that_never_ends_is_given_up_and_nobody_waits_for_it() -> None:
    async def test() -> None:
        async with failing("engine.launch=hang", watchdog_s=1.0) as (engine, _):
            event = await last(engine, "doomed")
            assert (event.finish_reason, event.code) == (FinishReason.ERROR, "engine_unavailable")
            assert "did not end" in await engine.lost()

    run(test)


def test_an_engine_that_turns_without_moving_starts_anew() -> None:
    """B13: whatever the scheduler cannot make up its mind about."""

    async def test() -> None:
        async with failing("", watchdog_s=1.0) as (engine, _):
            first = engine.engine
            first.scheduler.schedule = lambda drafts: Batch()  # type: ignore[method-assign, assignment, misc]
            event = await last(engine, "doomed")
            assert event.code == "engine_restarted" and engine.engine is not first
            assert await ask(engine, "after", "Hello", PICTURE) == await healthy()

    run(test)
