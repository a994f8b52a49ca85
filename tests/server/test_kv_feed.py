"""How often the pools are looked at, and that a late reader is told the whole instead."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mmserve.config import ServerConfig
from mmserve.server.blobs import BlobStore
from mmserve.server.journal import NoJournal
from mmserve.server.kv_feed import INTERVAL_S, SHARE, KVFeed, pause
from mmserve.server.store import ResponseStore
from tests.server.fake_engine import FakeEngine


def feed_of(engine: FakeEngine) -> KVFeed:
    journal = NoJournal()
    return KVFeed(engine, ResponseStore(ServerConfig(), BlobStore(None, journal), journal))


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.02, 3.0])
def test_looking_takes_a_small_share_of_the_time(seconds: float) -> None:
    assert pause(seconds) >= INTERVAL_S
    assert seconds <= SHARE * pause(seconds) * 1.000001


def test_a_reader_who_missed_a_change_is_told_the_whole() -> None:
    async def follow() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        engine = FakeEngine()
        feed = feed_of(engine)
        first, _ = await feed.now()
        engine.ids.append("resp_1")
        second, change = await feed.after(first)
        engine.ids.append("resp_2")
        third, _ = await feed.after(second)
        again, late = await feed.after(first)
        assert (second, third, again) == (first + 1, first + 2, third)
        _, new = await feed.now()
        return json.loads(change), json.loads(late), json.loads(new)

    change, late, new = asyncio.run(follow())
    assert "pools" not in change and change["runs"] == [[0, 0, 1, 0]]
    assert late["runs"] == [[0, 0, 1, 0], [0, 1, 1, 1]] and "pools" in late
    assert new == late


def test_readers_hear_of_an_engine_that_fails() -> None:
    class Broken(FakeEngine):
        async def kv_snapshot(self) -> Any:
            raise RuntimeError("no pools")

    async def follow() -> None:
        feed = feed_of(Broken())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no pools"):
                await feed.now()

    asyncio.run(follow())
