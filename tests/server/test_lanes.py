"""Lanes: order, parallelism, bounds."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import QueueFullError
from mmserve.server.errors import RateLimitError
from mmserve.server.lanes import Lanes


@given(st.lists(st.sampled_from("ABC"), max_size=24))
def test_each_lane_keeps_its_order_and_runs_one_at_a_time(names: list[str]) -> None:
    async def check() -> None:
        done: list[tuple[str, int]] = []
        busy: set[str] = set()

        async def run(item: tuple[str, int]) -> None:
            assert item[0] not in busy
            busy.add(item[0])
            await asyncio.sleep(0)
            busy.discard(item[0])
            done.append(item)

        lanes: Lanes[tuple[str, int]] = Lanes(run, max_lanes=3, max_queue=99, max_bytes=10**6)
        for number, name in enumerate(names):
            lanes.push(name, (name, number), 1)
        for _ in range(4 * len(names) + 4):
            await asyncio.sleep(0)
        for name in "ABC":
            expected = [(n, i) for i, n in enumerate(names) if n == name]
            assert [item for item in done if item[0] == name] == expected

    asyncio.run(check())


def test_bounds_of_lanes_items_and_bytes() -> None:
    async def check() -> None:
        gate = asyncio.Event()
        done: list[int] = []

        async def run(item: int) -> None:
            await gate.wait()
            done.append(item)

        lanes: Lanes[int] = Lanes(run, max_lanes=2, max_queue=2, max_bytes=100)
        lanes.push("a", 1, 10)
        await asyncio.sleep(0)
        lanes.push("a", 2, 60)
        with pytest.raises(QueueFullError):
            lanes.push("b", 3, 60)
        lanes.push("a", 4, 1)
        with pytest.raises(QueueFullError):
            lanes.push("a", 5, 1)
        lanes.push("b", 6, 1)
        with pytest.raises(RateLimitError):
            lanes.push("c", 7, 1)
        gate.set()
        while len(done) < 4:
            await asyncio.sleep(0)
        assert sorted(done) == [1, 2, 4, 6]
        lanes.push("c", 8, 99)
        await lanes.close()
        assert 8 not in done

    asyncio.run(check())
