"""KV files of a running engine, and KV of weights that are declared to be nearly these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.config import EngineConfig
from mmserve.engine import kv_sharing
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.errors import KVRefusedError
from mmserve.kvfile.file import read_file
from mmserve.kvfile.header import KVHeader, TextRun
from mmserve.prompt import Prompt
from mmserve.request import Tenant, TextSegment
from tests.engine.driver import picture
from tests.engine.test_async_engine import GREEDY, ask, collect, run, tokens
from tests.engine.tiny import build_tiny, tiny_config
from tests.kvfile.files import identity

TEXT = tuple(3 + n * 7 % 200 for n in range(90))
OTHER = "ab" * 32  # the other weights' fingerprint


def other_weights(config: EngineConfig) -> Engine:
    """The same model, each weight moved by a hundredth."""
    engine = build_tiny(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in engine.runner.lm.parameters():
            weight.mul_(1 + 0.01 * torch.randn_like(weight))
    own = engine.kv.identity
    engine.kv.identity = replace(own, weights=OTHER, processor="of " + OTHER)
    return engine


@asynccontextmanager
async def running(build: Any = build_tiny, *compatible: str) -> AsyncIterator[AsyncEngine]:
    config = tiny_config()
    cache = replace(config.cache, kv_compatible_with=compatible)
    engine = AsyncEngine(replace(config, cache=cache), build=build)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def say(engine: AsyncEngine, name: str, salt: bytes = b"") -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were cached."""
    prompt = Prompt((TextSegment(TEXT),), len(TEXT), 0)
    tenant = Tenant(salt=salt)
    events = await collect(engine.submit(name, prompt, GREEDY, tenant=tenant))
    assert events[-1].usage is not None
    return tokens(events), events[-1].usage.cached_tokens


def test_what_one_engine_wrote_another_goes_on_from(tmp_path: Path) -> None:
    async def test() -> None:
        async with running() as one:
            said = await say(one, "a")
            seen = await ask(one, "b", picture(1), "what is it?")
            await one.export_kv(tmp_path / "a.kv")
        async with running() as two:
            told = await two.import_kv(tmp_path / "a.kv")
            assert told["images"] == {"new": 1, "known": 0, "left_out": 0}
            assert "divergence" not in told
            tokens_now, cached = await say(two, "a")
            assert tokens_now == said[0] and cached >= 80
            assert await ask(two, "b", picture(1), "what is it?") == seen

    run(test)


def test_other_weights_kv_is_refused_unless_it_is_declared(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(other_weights) as near:
            await say(near, "a")
            await near.export_kv(tmp_path / "near.kv")
        async with running() as strict:
            with pytest.raises(KVRefusedError, match="weights differs"):
                await strict.import_kv(tmp_path / "near.kv")
            assert (await say(strict, "a"))[1] == 0

    run(test)


def test_declared_weights_share_text_and_the_divergence_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(other_weights) as near:
            await say(near, "a")
            await ask(near, "b", picture(1), "what is it?")
            await near.export_kv(tmp_path / "near.kv")
        async with running(build_tiny, OTHER) as engine:
            told = await engine.import_kv(tmp_path / "near.kv")
            assert told["text"]["new"] >= 80
            assert told["images"] == {"new": 0, "known": 0, "left_out": 1}
            found = told["divergence"]
            assert found["prompts"] > 1 and 0 <= found["same_first_token"] <= found["prompts"]
            assert 0 < found["nats"] < 1
            assert (await say(engine, "a"))[1] >= 80

    run(test)


def test_a_salt_keeps_requests_from_finding_each_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with running() as engine:
            plain = await say(engine, "a")
            assert await say(engine, "b", b"own") == (plain[0], 0)
            assert (await say(engine, "c", b"own"))[1] >= 80
            assert (await say(engine, "d"))[1] >= 80

    run(test)


def test_damage_is_refused_and_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with running() as engine:
            await say(engine, "a")
            await engine.export_kv(tmp_path / "a.kv")
            data = bytearray((tmp_path / "a.kv").read_bytes())
            data[-1] ^= 1
            (tmp_path / "a.kv").write_bytes(data)
            with pytest.raises(KVRefusedError, match="damaged"):
                await engine.import_kv(tmp_path / "a.kv")
            with pytest.raises(KVRefusedError, match="could not be written"):
                await engine.export_kv(tmp_path / "nowhere" / "a.kv")

    run(test)


def test_the_longest_text_has_no_image_in_or_before_it() -> None:
    header = KVHeader(
        identity(),
        (
            TextRun(None, (1, 2), (), ()),
            TextRun(0, (3, 4), ((0, (b"image",)),), ()),
            TextRun(1, (5, 6, 7, 8), (), ()),
            TextRun(0, (9, 10), (), ()),
        ),
    )
    assert kv_sharing.longest_text(header) == [1, 2, 9, 10]
    assert kv_sharing.longest_text(KVHeader(identity())) == []


def test_the_file_says_whose_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with running() as engine:
            await say(engine, "a")
            await engine.export_kv(tmp_path / "a.kv")
            assert read_file(tmp_path / "a.kv").header.identity == engine.engine.kv.identity

    run(test)
