"""The event log: order, replay, merging for slow readers, eviction."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.server.event_log import DELTA, MERGE_ABOVE, Event, EventLog, LogEvictedError


def delta(text: str) -> dict[str, Any]:
    return {"delta": text, "logprobs": []}


def filled(texts: list[str], max_events: int = 10**6) -> EventLog:
    log = EventLog(max_events, 10**9)
    log.append("response.created", {})
    for text in texts:
        log.append(DELTA, delta(text))
    log.append("response.completed", {})
    log.close()
    return log


async def read_all(log: EventLog, after: int = -1) -> list[Event]:
    return [event async for event in log.read(after)]


def text_of(events: list[Event]) -> str:
    return "".join(json.loads(e.data)["delta"] for e in events if e.type == DELTA)


@given(st.lists(st.text(max_size=3), max_size=30), st.integers(-1, 40))
def test_a_replay_is_the_rest_of_the_log(texts: list[str], after: int) -> None:
    async def check() -> None:
        log = filled(texts)
        whole = await read_all(log)
        assert [e.sequence_number for e in whole] == list(range(len(texts) + 2))
        assert await read_all(log, after) == (whole[after + 1 :] or whole[-1:])

    asyncio.run(check())


@given(st.integers(1, 3000), st.integers(1, 300))
def test_a_lagging_reader_gets_fewer_events_and_all_the_text(count: int, size: int) -> None:
    async def check() -> None:
        texts = [f"{i}:" + "x" * size for i in range(count)]
        events = await read_all(filled(texts))
        assert text_of(events) == "".join(texts)
        numbers = [e.sequence_number for e in events]
        assert numbers == sorted(set(numbers)) and numbers[-1] == count + 1
        if count > MERGE_ABOVE:
            assert len(events) < count
        assert all(len(e.data) < 200_000 for e in events)

    asyncio.run(check())


def test_a_merged_delta_carries_the_last_number_so_that_resume_is_exact() -> None:
    async def check() -> None:
        log = filled(["a"] * 1000)
        events = await read_all(log)
        for cut, event in enumerate(events[:-1]):
            before = text_of(events[: cut + 1])
            after = text_of(await read_all(log, event.sequence_number))
            assert before + after == "a" * 1000

    asyncio.run(check())


def test_readers_wait_for_what_is_not_there_yet() -> None:
    async def check() -> None:
        log = EventLog(100, 10**6)
        tails = [asyncio.create_task(read_all(log)) for _ in range(3)]
        for i in range(20):
            log.append(DELTA, delta(str(i)))
            await asyncio.sleep(0)
        log.close()
        results = await asyncio.gather(*tails)
        assert results[0] == results[1] == results[2]
        assert len(results[0]) == 20

    asyncio.run(check())


@pytest.mark.parametrize("bounds", [(50, 10**9), (10**9, 20_000)])
def test_bounds_evict_the_oldest_and_say_so(bounds: tuple[int, int]) -> None:
    async def check() -> None:
        log = EventLog(*bounds)
        for i in range(1000):
            log.append(DELTA, delta(str(i)))
            assert log.num_bytes <= max(bounds[1], 0) + 1000
        log.close()
        with pytest.raises(LogEvictedError) as caught:
            await read_all(log, 3)
        assert caught.value.param == "starting_after"
        assert (await read_all(log, 998))[0].sequence_number == 999

    asyncio.run(check())
