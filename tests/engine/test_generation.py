"""A reader that falls behind: so much waits for it and no more, and it is told."""

from __future__ import annotations

import asyncio

from mmserve.engine.generation import MOST_BEHIND, Generation
from mmserve.request import FinishReason, TokenEvent
from tests.engine.driver import picture
from tests.engine.test_async_engine import GREEDY, at_rest, collect, prompt, run, running


def test_what_waits_for_a_reader_that_never_reads_is_bounded_and_its_request_is_aborted() -> None:
    async def test() -> None:
        aborted: list[str] = []
        generation = Generation("a", aborted.append)
        for _ in range(3 * MOST_BEHIND):
            generation.put(TokenEvent(text="x"))
        assert generation.num_waiting == MOST_BEHIND
        assert set(aborted) == {"a"}
        generation.put(TokenEvent(finish_reason=FinishReason.ABORT))
        events = await collect(generation)
        assert len(events) == MOST_BEHIND + 1
        assert (events[-1].finish_reason, events[-1].code) == (
            FinishReason.ERROR,
            "reader_too_slow",
        )

    asyncio.run(test())


def test_a_reader_that_keeps_up_reads_any_number() -> None:
    async def test() -> None:
        generation = Generation("a", lambda id: None)
        reading = asyncio.create_task(collect(generation))
        for _ in range(2 * MOST_BEHIND):
            generation.put(TokenEvent(text="x"))
            await asyncio.sleep(0)
        generation.put(TokenEvent(finish_reason=FinishReason.STOP))
        events = await reading
        assert len(events) == 2 * MOST_BEHIND + 1
        assert events[-1].finish_reason is FinishReason.STOP

    asyncio.run(test())


def test_an_answer_that_nobody_reads_does_not_hold_the_engine() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "Hello", picture(1))
            forgotten = engine.submit("a", made, GREEDY)
            assert len(await collect(engine.submit("b", made, GREEDY))) == 6
            assert await at_rest(engine)
            assert forgotten.num_waiting == 6

    run(test)
