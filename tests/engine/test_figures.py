"""The figures of a running engine that are no plain counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mmserve.engine.async_engine import AsyncEngine
from mmserve.errors import ContextLengthExceededError
from mmserve.kvfile.header import KVFileError
from mmserve.prompt import Message, TextPart
from mmserve.request import SamplingParams
from tests.engine.driver import Driver, words
from tests.engine.tiny import build_tiny, tiny_config


def figure(d: Driver, name: str, **labels: str) -> float | None:
    return d.engine.metrics._registry.get_sample_value(f"mmserve:{name}", labels)


def test_sequence_lengths_are_those_of_ended_requests() -> None:
    d = Driver(build_tiny(tiny_config()))
    for count in (10, 20, 60):
        d.ask(words(1, count), params=SamplingParams(max_tokens=1, temperature=0.0))
    d.step()
    assert figure(d, "sequence_tokens_mean") == 31  # the answers' tokens, too
    assert figure(d, "sequence_tokens_p99") == 61


def test_hit_rates_are_by_cause() -> None:
    d = Driver(build_tiny(tiny_config()))
    for _ in range(2):
        d.ask(words(1, 40))
    d.step()
    assert figure(d, "cache_hit_rate", cause="prefix") == 32 / 80
    assert figure(d, "cache_hit_rate", cause="image") == 0
    assert figure(d, "cache_hit_rate", cause="tier") == 0


def test_a_file_that_is_refused_is_counted(tmp_path: Path) -> None:
    d = Driver(build_tiny(tiny_config()))
    (tmp_path / "a.kv").write_bytes(b"nothing")
    with pytest.raises(KVFileError):
        d.engine.kv.put(d.engine.read_kv(tmp_path / "a.kv"))
    assert figure(d, "kv_refusals_total", source="file", reason="damaged") == 1


def test_requests_that_are_refused_are_counted_by_what_their_users_are_told() -> None:
    async def refused() -> float | None:
        engine = AsyncEngine(tiny_config(), build_tiny)
        await engine.start()
        long = await engine.prepare([Message("user", (TextPart("x" * 2000),))])
        with pytest.raises(ContextLengthExceededError):
            engine.submit("a", long, SamplingParams(max_tokens=1))
        found = engine.metrics._registry.get_sample_value(
            "mmserve:request_refusals_total", {"reason": "context_length_exceeded"}
        )
        await engine.stop()
        return found

    assert asyncio.run(refused()) == 1
