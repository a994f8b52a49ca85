"""Images that had to leave the pool are read again in fewer bits, without being looked at again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve import keys
from mmserve.cache.cold_images import ColdImages
from mmserve.config import CacheConfig, TierConfig
from mmserve.engine.engine import Engine
from mmserve.kernels.kv_formats import FORMATS
from mmserve.kernels.reference import read_pages
from mmserve.kv_snapshot import ImageOwner
from mmserve.request import Usage
from mmserve.sequence import Sequence
from tests.engine.driver import Driver, picture, words
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import build_tiny, tiny_config, tiny_model

ROOM = 3  # images in the pool; each takes two pages
MUCH = 1 << 20


def config(
    to: str | None = "int8", cold_bytes: int = MUCH, vision_pages: int = 2 * ROOM, **options: Any
) -> Any:
    """8-bit weights on a CPU: the same bits in any company, so that tokens may be compared."""
    made = tiny_config(**{"dtype": "int8", "vision_pages": vision_pages, **options})
    cache = replace(made.cache, cold_format=to, cold_bytes=cold_bytes)
    return replace(made, cache=cache)


def driver(*args: Any, **options: Any) -> Driver:
    return Driver(build_tiny(config(*args, **options)))


def store(d: Driver) -> ColdImages:
    cold = d.engine.images.cold
    assert cold is not None
    cold.images.check_invariants()
    return cold.images


def look(d: Driver, seed: int, text: int = 1) -> list[int]:
    return d.ask(words(text, 4), d.image(picture(seed)), words(text, 5))


def flood(d: Driver) -> None:
    """Push everything out of both pools."""
    for seed in range(100, 100 + ROOM):
        look(d, seed)
    radix = d.engine.scheduler.holdings.radix
    assert radix is not None
    radix.evict(0, 10_000)


def usage(d: Driver) -> Usage:
    """Of the last request."""
    found = d.last(str(len(d.events) - 1)).usage
    assert found is not None
    return found


def held(d: Driver, seed: int, name: str | None) -> torch.Tensor | None:
    """K and V of an image as it lies in the pool, in a format or as computed, exactly."""
    key = d.engine.pipeline.identify(picture(seed)).digests[0]
    pool = d.engine.runner.vision[0]
    entry = pool.index.lookup(key if name is None else keys.stepped(key, name))
    if entry is None or not entry.ready:
        return None
    pages = torch.tensor([entry.pages])
    tokens = [torch.stack(read_pages(pool.layer(n), pages)) for n in range(pool.shape.num_layers)]
    return torch.stack(tokens)[..., : entry.num_tokens, :]


def test_an_image_that_was_evicted_is_not_looked_at_again_and_the_answer_says_so() -> None:
    d = driver()
    look(d, 1)
    assert usage(d).vision_kv_dtype is None
    flood(d)
    before = d.counts()
    look(d, 1)
    assert d.counts() == before, "it was encoded, decoded or written as if new"
    found = usage(d)
    assert (found.vision_hits, found.vision_misses) == (1, 0)
    assert found.vision_kv_dtype == "int8"
    d.assert_idle()


def test_without_the_option_images_are_as_computed() -> None:
    d = driver(None)
    expected = look(d, 1)
    flood(d)
    assert d.engine.images.cold is None
    assert look(d, 1) == expected
    assert usage(d).vision_kv_dtype is None and usage(d).vision_misses == 1


@pytest.mark.parametrize("to", ["int8", "int4", "int2"])
def test_what_comes_back_is_the_same_however_often(to: str) -> None:
    """Hit equals miss: what lies in the pool, what was just brought back, and in another engine."""
    answers: list[list[int]] = []
    bytes_held: list[torch.Tensor | None] = []
    for engine in range(2):
        d = driver(to)
        look(d, 7 if engine else 1, text=3)
        look(d, 1)
        for _ in range(2):
            flood(d)
            answers.append(look(d, 1))
            name = usage(d).vision_kv_dtype
            assert name == "int8"
            bytes_held.append(held(d, 1, name))
            answers.append(look(d, 1))
    assert all(answer == answers[0] for answer in answers)
    first = bytes_held[0]
    assert first is not None
    assert all(other is not None and torch.equal(other, first) for other in bytes_held)


def test_what_is_lost_is_what_the_format_loses() -> None:
    """One step down and back: each value is off by half a level at most, scales included."""
    d = driver()
    look(d, 1)
    full = held(d, 1, None)
    flood(d)
    look(d, 1)
    back = held(d, 1, "int8")
    assert full is not None and back is not None
    step = full.abs().amax(-1, keepdim=True) / 127
    assert 0 < (full - back).abs().max() and bool(((full - back).abs() <= 0.51 * step).all())


def test_text_behind_such_an_image_is_known_by_its_format() -> None:
    d = driver()
    full = d.ask(words(1, 40), d.image(picture(1)), words(2, 40))
    flood(d)
    d.ask(words(1, 40), d.image(picture(1)), words(2, 40))
    assert usage(d).vision_kv_dtype == "int8"
    d.ask(words(1, 40), d.image(picture(1)), words(2, 40))
    again = usage(d)
    assert again.vision_kv_dtype == "int8" and again.cached_tokens > 60
    key = d.engine.pipeline.identify(picture(1)).digests[0]
    store(d).drop(key)
    d.engine.runner.vision[0].index.clear()
    assert d.ask(words(1, 40), d.image(picture(1)), words(2, 40)) == full
    last = usage(d)
    assert last.vision_kv_dtype is None and last.vision_misses == 1
    assert last.cached_tokens <= 40, (
        "text that saw it in fewer bits was taken for text that did not"
    )


def test_more_text_than_an_image_is_worth_is_not_computed_anew() -> None:
    d = driver()
    segments = words(1, 4), d.image(picture(1)), words(2, 90)
    full = d.ask(*segments)
    for seed in range(100, 100 + ROOM):  # the text stays
        look(d, seed)
    costs = d.engine.images.cold._costs  # type: ignore[union-attr]
    costs.token_s, costs.image_token_s = 1.0, 2.0
    costs.computed = lambda *_: None  # type: ignore[method-assign]
    assert d.ask(*segments) == full
    assert usage(d).vision_kv_dtype is None and usage(d).vision_misses == 1
    for seed in range(100, 100 + ROOM):
        look(d, seed)
    costs.image_token_s = 20.0
    d.ask(*segments)
    assert usage(d).vision_kv_dtype == "int8" and usage(d).vision_misses == 0


def test_who_pins_an_image_has_it_as_it_was_computed() -> None:
    d = driver()
    expected = look(d, 1)
    flood(d)
    d.engine.images.pin(d.engine.pipeline.identify(picture(1)))
    assert look(d, 1) == expected
    assert usage(d).vision_kv_dtype is None


def test_a_tier_that_has_the_image_whole_goes_first() -> None:
    made = replace(config(), tiers=TierConfig(host_bytes=1 << 26))
    d = Driver(Engine(made, tiny_model()))
    assert d.engine.tiers is not None
    d.engine.tiers.costs.worth = lambda *_: True  # type: ignore[method-assign]
    expected = look(d, 1)
    flood(d)
    assert look(d, 1) == expected
    assert usage(d).vision_kv_dtype is None and usage(d).vision_misses == 0


def test_its_state_and_its_format_are_told() -> None:
    d = driver()
    image = d.engine.pipeline.identify(picture(1))
    look(d, 1)
    flood(d)
    (found,) = d.engine.images.held([image])
    assert (found.state, found.kv_format) == ("cold", "int8")
    look(d, 1)
    owners = d.engine.page_owners.look().owners
    formats = {owner.kv_format for owner in owners if isinstance(owner, ImageOwner)}
    assert formats == {None, "int8"}
    figures = d.engine.metrics.values()
    assert figures["mmserve:cold_images_read_total"] == 1
    assert figures['mmserve:cold_images{dtype="int8"}'] == len(store(d)._held[0]) > 0
    assert figures['mmserve:cold_bytes{dtype="int8"}'] == store(d).used
    assert d.engine.images.drop(image.digests[0])
    assert store(d).rung(image.digests[0]) is None


def test_skipped_layers_lose_nothing() -> None:
    d = driver("int2", vision_pages=6, skip_layers=(1,))
    look(d, 1)
    groups = [pool for pool in d.engine.runner.vision if pool.shape.num_layers]
    flood(d)
    look(d, 1)
    assert usage(d).vision_kv_dtype == "int8"
    assert [r.kinds for r in store(d).rungs][-1] == (FORMATS["int2"], FORMATS["auto"])
    assert len(groups) == 2
    d.assert_idle()


@settings(max_examples=12, deadline=None)
@given(
    asks=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 2)), max_size=16),
    cold_bytes=st.sampled_from([1, 12_000, 24_000, 50_000]),
)
def test_an_answer_is_what_its_formats_make_it(
    asks: list[tuple[int, int, int]], cold_bytes: int
) -> None:
    """Whatever left and came back in between: what lies in the pool is a function of image and
    format, an answer is one of its question and these, and one that says nothing of formats is that
    of a pool with room for all."""
    d, roomy = driver("int2", cold_bytes=cold_bytes), driver(None, vision_pages=40)
    seen: dict[tuple[int, str | None], torch.Tensor] = {}
    said: dict[Any, list[int]] = {}
    for first, second, text in asks:
        segments = (
            d.image(picture(first)),
            words(text, 3),
            d.image(picture(second)),
            words(text, 20),
        )
        formats: list[tuple[bytes, str]] = []
        lift = d.engine.scheduler.lift

        def noting(seq: Sequence, lift: Any = lift, formats: Any = formats) -> bool:
            found: bool = lift(seq)
            formats[:] = sorted(seq.coarse.items())
            return found

        d.engine.scheduler.lift = noting
        answer = d.ask(*segments)
        d.engine.scheduler.lift = lift
        assert answer == said.setdefault((first, second, text, *formats), answer)
        assert usage(d).vision_kv_dtype == min((name for _, name in formats), default=None)
        if not formats:
            assert answer == roomy.ask(*segments)
        for seed in range(5):
            for name in (None, "int8", "int4", "int2"):
                if (found := held(d, seed, name)) is not None:
                    assert torch.equal(found, seen.setdefault((seed, name), found))
        store(d)
        d.assert_idle()


def test_company_and_preemption_leave_no_trace() -> None:
    """Many at once, where text pages are scarce, too: all end, and nothing stays held."""
    d = driver("int4", cold_bytes=40_000, text_pages=12, max_num_batched_tokens=23)
    for turn in range(3):
        requests = [
            d.submit((d.image(picture((turn + n) % 5)), words(n, 9 + n), d.image(picture(7))))
            for n in range(6)
        ]
        d.run()
        assert all(len(d.tokens(request)) > 0 for request in requests)
        d.assert_idle()
    assert d.engine.metrics.values()["mmserve:cold_images_read_total"] > 0


def test_what_cannot_step_down_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="from 'int4' to 'int8'; steps are int8, int4, int2"):
        CacheConfig(vision_format="int4", cold_format="int8")
    assert CacheConfig(vision_format="int4_outliers", cold_format="int2").cold_formats == ("int2",)
    made = config()
    with pytest.raises(ValueError, match="deterministic"):
        build_tiny(replace(made, model=replace(made.model, deterministic=True)))
    with pytest.raises(ValueError, match="window"):
        Engine(
            replace(config(), model=replace(made.model, dtype="float32")),
            windowed_model(KINDS["hybrid"]),
        )
