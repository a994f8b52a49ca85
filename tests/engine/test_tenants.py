"""What one tenant has shown or said makes no difference to another, unless they share a salt.

What is compared is work: pictures decoded, encoder runs and cached tokens, which is all that time
could tell of.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from mmserve.config import EngineConfig, SpecConfig, TierConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.held_image import ABSENT, ACTIVE
from mmserve.request import EVERYBODY, Tenant
from tests.engine.driver import picture
from tests.engine.test_async_engine import GREEDY, collect, run, tokens, user
from tests.engine.test_vision_modes import serve
from tests.engine.tiny import build_tiny, tiny_config
from tests.model import families

ANN, BEN, CARL = (Tenant(name, name[0].encode() * 32) for name in ("ann", "ben", "carl"))
BEA = replace(ANN, name="bea")  # who shares with Ann
TEXT = "what is to be seen in this picture, and what is not? " * 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "families"


class Told(NamedTuple):
    """What a request can be told apart by."""

    answer: list[int]
    cached: int
    cached_image: int
    misses: int
    decodes: float
    runs: float


@asynccontextmanager
async def running(
    config: EngineConfig, build: Callable[[EngineConfig], Engine] = build_tiny
) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config, build=build)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def ask(engine: AsyncEngine, tenant: Tenant, data: bytes) -> Told:
    metrics = engine.engine.metrics

    def work() -> tuple[float, float]:
        values = metrics.values()
        names = ("image_decodes", "vision_encoder_runs")
        return values[f"mmserve:{names[0]}_total"], values[f"mmserve:{names[1]}_total"]

    before = work()
    prompt = await engine.prepare(user(data, TEXT), tenant=tenant)
    name = f"{tenant.name}{id(prompt)}"
    events = await collect(engine.submit(name, prompt, GREEDY, tenant=tenant))
    usage = events[-1].usage
    assert usage is not None
    decodes, runs = (after - then for after, then in zip(work(), before, strict=True))
    misses = usage.vision_misses
    return Told(
        tokens(events), usage.cached_tokens, usage.cached_image_tokens, misses, decodes, runs
    )


CONFIGS = {
    "plain": tiny_config(),
    "tiers": replace(tiny_config(), tiers=TierConfig(host_bytes=1 << 26)),
    "drafts": replace(tiny_config(), speculative=SpecConfig(method="suffix")),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_picture_that_another_tenant_has_shown_is_like_a_fresh_one(config: str) -> None:
    async def test() -> None:
        async with running(CONFIGS[config]) as engine:
            first = await ask(engine, ANN, picture(1))
            again = await ask(engine, ANN, picture(1))
            other = await ask(engine, BEN, picture(1))
            fresh = await ask(engine, CARL, picture(2))
            nobodys = await ask(engine, EVERYBODY, picture(1))
            assert again.cached > 0 and again.runs == 0 and again.decodes == 0
            assert other == first == nobodys
            assert other[1:] == fresh[1:] == (0, 0, 1, 1, 1)
            assert again.answer == other.answer
            assert await ask(engine, BEN, picture(1)) == again

    run(test)


def test_who_shares_a_salt_shares_what_is_cached() -> None:
    async def test() -> None:
        async with running(tiny_config()) as engine:
            await ask(engine, ANN, picture(1))
            assert await ask(engine, BEA, picture(1)) == await ask(engine, ANN, picture(1))
            assert (await ask(engine, BEA, picture(1))).runs == 0

    run(test)


@pytest.mark.parametrize("mode", ["prefix", "blend"])
def test_so_it_is_where_images_see_what_stands_before_them(folders: Path, mode: str) -> None:
    async def test() -> None:
        folder = families.build("qwen2_5_vl", folders)
        async with running(tiny_config(), lambda _: serve(folder, mode).engine) as engine:
            first, again = [await ask(engine, ANN, picture(1, 64)) for _ in range(2)]
            assert await ask(engine, BEN, picture(1, 64)) == first != again

    run(test)


def test_where_an_image_is_kept_tells_its_own_tenant_only() -> None:
    async def test() -> None:
        async with running(tiny_config()) as engine:
            await ask(engine, ANN, picture(1))
            names = [await engine.identify(picture(1), tenant) for tenant in (ANN, BEN, EVERYBODY)]
            states = [held.state for held in await engine.held_images(names)]
            assert states == [ACTIVE, ABSENT, ABSENT]

    run(test)
