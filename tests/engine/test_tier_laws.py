"""Laws of tiers under pressure: tokens, books and budgets, whatever is evicted, aborted or full."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.config import TierConfig
from mmserve.engine import kv_tiers
from mmserve.engine.engine import Engine
from mmserve.request import Segment
from tests.engine.driver import Driver, picture, words
from tests.engine.test_tiers import MODELS
from tests.engine.tiny import tiny_config

PICTURES = [picture(n) for n in range(3)]
# Which conversation (0 and 1 begin alike), and how much of it has been said. The pools hold hardly
# more than one of them.
TALKS = st.tuples(st.integers(0, 2), st.sampled_from([1, 3, 5, 5]))
# What happens: a conversation is asked, asked and stopped after some steps, or all starts anew.
EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "abort", "restart"]), TALKS, st.integers(0, 6)),
    min_size=3,
    max_size=8,
)


@pytest.fixture(autouse=True, scope="module")
def each_object_is_lifted_when_it_has_come() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_tiers, "AHEAD", 1)
        yield


def segments(d: Driver, talk: tuple[int, int]) -> tuple[Segment, ...]:
    number, length = talk
    said = (
        words(1 if number < 2 else 2, 140),
        d.image(PICTURES[number]),
        words(10 + number, 90),
        d.image(PICTURES[(number + 1) % 3]),
        words(20 + number, 60),
    )
    return (*said[:length], words(99, 2))


def engine(model: Callable[[], Any], config: TierConfig) -> Driver:
    small = tiny_config(text_pages=22, vision_pages=4, max_num_batched_tokens=64)
    d = Driver(Engine(replace(small, tiers=config), model()))
    d.durable = True
    assert d.engine.tiers is not None
    d.engine.tiers.costs.worth = lambda *_: True  # type: ignore[method-assign]
    return d


def check(d: Driver, config: TierConfig) -> None:
    assert d.engine.tiers is not None
    stack = d.engine.tiers.stack
    stack.settle()
    stack.check_invariants()
    assert stack.used("host")[1] <= (config.host_bytes or 0)
    assert stack.used("disk")[1] <= config.disk_bytes
    d.assert_idle()
    lifter = d.engine.tiers.lifter
    assert not lifter._fetched and not lifter._names and not d.engine.tiers._waiting


@pytest.mark.parametrize("name", MODELS)
@given(
    events=EVENTS,
    host=st.sampled_from([100_000, 600_000, 10_000_000]),
    disk=st.sampled_from([0, 600_000, 10_000_000]),
)
@settings(max_examples=12)
def test_tokens_are_those_of_no_cache_whatever_tiers_hold_and_lose(
    name: str, events: list[Any], host: int, disk: int
) -> None:
    plain = Driver(Engine(tiny_config(prefix_caching=False), MODELS[name]()))
    with tempfile.TemporaryDirectory() as folder:
        config = TierConfig(host, disk, Path(folder) if disk else None)
        d = engine(MODELS[name], config)
        for kind, talk, steps in events:
            if kind == "restart":
                d.engine.close()
                d = engine(MODELS[name], config)
                continue
            request = d.submit(segments(d, talk))
            if kind == "abort":
                for _ in range(steps):
                    d.step()
                d.abort(request)
            d.run()
            check(d, config)
            if kind == "ask":
                assert d.tokens(request) == plain.ask(*segments(plain, talk))
        d.engine.close()


@given(st.lists(TALKS, min_size=2, max_size=5))
@settings(max_examples=8)
def test_company_changes_nothing(talks: list[tuple[int, int]]) -> None:
    plain = Driver(Engine(tiny_config(prefix_caching=False), MODELS["full"]()))
    config = TierConfig(host_bytes=200_000)
    d = engine(MODELS["full"], config)
    for _ in range(2):
        asked = [(d.submit(segments(d, talk)), talk) for talk in talks]
        d.run()
        check(d, config)
        for request, talk in asked:
            assert d.tokens(request) == plain.ask(*segments(plain, talk))
    d.engine.close()
