"""What the KV view costs: `python tests/checks/kv_cost.py`.

Two figures. What one picture takes of the engine's thread and of the coding thread, by size of the
pools; and the share of the time that a watched engine spends on it, with answers being written all
the while. Exits with 1 where that is more than 2 %.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.cache.layer_group import LayerGroup
from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.vision_index import VisionIndex
from mmserve.config import SchedulerConfig, ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.kv_snapshot import Snapshot
from mmserve.prompt import Prompt
from mmserve.request import SamplingParams
from mmserve.scheduler.page_owners import PageOwners
from mmserve.scheduler.scheduler import Scheduler
from mmserve.server.blobs import BlobStore
from mmserve.server.journal import NoJournal
from mmserve.server.kv_delta import NOTHING, message, picture
from mmserve.server.kv_feed import SHARE, KVFeed, pause
from mmserve.server.store import ResponseStore
from mmserve.server.wire import dumps
from tests.engine.driver import words
from tests.engine.tiny import tiny_config, tiny_model

PAGE, TURN, IMAGE = 16, (5, 25), 16  # tokens; pages of a turn, and of an image
LOOKS, WATCHED_S, WRITERS, ANSWER = 30, 10.0, 8, 1000


def crowded(text_pages: int, vision_pages: int) -> tuple[PageOwners, RadixCache, PagePool]:
    """Pools nine tenths full of conversations of three turns, each with a picture."""
    text, vision = PagePool(text_pages), VisionIndex(vision_pages, PAGE)
    radix = RadixCache([text], PAGE)
    scheduler = Scheduler(
        SchedulerConfig(),
        groups=[LayerGroup((0,))],
        text=[text],
        vision=[vision],
        radix=radix,
        page_size=PAGE,
        max_model_len=1 << 20,
    )
    draw = random.Random(0)
    session = 0
    while text.num_free > text_pages // 10 and text.num_free > 3 * TURN[1]:
        grow(radix, text, session, [draw.randint(*TURN) for _ in range(3)])
        if vision.num_free >= IMAGE:
            key = session.to_bytes(32, "big")
            vision.reserve(key, IMAGE * PAGE, f"resp_{session}_0")
            vision.mark_ready(key)
            vision.release(key)
        session += 1
    return PageOwners(scheduler, [1], [1]), radix, text


def grow(radix: RadixCache, pool: PagePool, session: int, turns: list[int]) -> None:
    keys: list[Any] = []
    pages: list[int] = []
    for turn, count in enumerate(turns):
        keys += [(session, turn, place) for place in range(count * PAGE)]
        new = pool.allocate(count)
        pages += new
        radix.insert(keys, [pages], f"resp_{session}_{turn}")
        pool.release(new)


def code(before: Any, snapshot: Snapshot) -> tuple[Any, float, int]:
    """The picture, seconds of the coding thread, and bytes."""
    started = time.thread_time()
    after = picture(snapshot, lambda request: request, {})
    text = dumps(message(1, before, after, PAGE))
    return after, time.thread_time() - started, len(text)


def size(text_pages: int, vision_pages: int) -> None:
    owners, radix, pool = crowded(text_pages, vision_pages)
    looks, codes = [], []
    before, whole_s, whole = code(NOTHING, owners.look())
    change = 0
    for number in range(LOOKS):
        if pool.num_free >= TURN[1]:
            grow(radix, pool, 1_000_000 + number, [3])
        started = time.thread_time()
        snapshot = owners.look()
        looks.append(time.thread_time() - started)
        before, seconds, change = code(before, snapshot)
        codes.append(seconds)
    look, coding = statistics.median(looks), statistics.median(codes)
    print(
        f"{text_pages:6,} text and {vision_pages:6,} image pages, {len(snapshot.owners):5,} owners:"
        f" engine {look * 1e3:5.2f} ms, coding {coding * 1e3:5.2f} ms, a change {change:,} bytes, "
        f"the whole {whole:,} in {whole_s * 1e3:.0f} ms; one each {pause(look + coding):.2f} s"
    )


class Timed(AsyncEngine):
    """Sums what the pictures take of its thread."""

    looking_s = 0.0

    async def kv_snapshot(self) -> Snapshot:
        snapshot = await super().kv_snapshot()
        self.looking_s += snapshot.seconds
        return snapshot


async def write_on(engine: Timed, number: int, until: float) -> None:
    """One answer after the other."""
    params = SamplingParams(max_tokens=ANSWER, temperature=1.0, seed=number, ignore_eos=True)
    turn = 0
    while time.monotonic() < until:
        segment = words(number * 1000 + turn, 60)
        generation = engine.submit(f"r{number}_{turn}", Prompt((segment,), 60, 0), params)
        async for _ in generation:
            if time.monotonic() > until:
                generation.abort()
        turn += 1


async def watched() -> float:
    """The engine thread's share that goes into pictures, all of it counted as lost."""
    config = tiny_config(text_pages=2000)
    engine = Timed(config, lambda config: Engine(config, tiny_model(1600)))
    await engine.start()
    journal = NoJournal()
    feed = KVFeed(engine, ResponseStore(ServerConfig(), BlobStore(None, journal), journal))
    started = time.monotonic()
    until = started + WATCHED_S
    writers = [asyncio.ensure_future(write_on(engine, n, until)) for n in range(WRITERS)]
    version, told = (await feed.now())[0], 1
    while time.monotonic() < until:
        version, _ = await asyncio.wait_for(feed.after(version), 2 * WATCHED_S)
        told += 1
    share = engine.looking_s / (time.monotonic() - started)
    await asyncio.gather(*writers)
    await engine.stop()
    print(
        f"{WRITERS} answers at a time, {told} pictures in {WATCHED_S:.0f} s: {share:.3%} of the "
        f"engine's time, {engine.looking_s / told * 1e3:.2f} ms each"
    )
    return share


def main() -> int:
    for pages in ((1_500, 700), (12_000, 5_000), (50_000, 20_000)):
        size(*pages)
    return int(asyncio.run(watched()) > SHARE)


if __name__ == "__main__":
    sys.exit(main())
