"""What is told of one image's KV is true, and a pinned image outlives the others."""

from __future__ import annotations

import pytest

from mmserve.engine.engine import Engine
from mmserve.errors import PinBudgetExceededError
from mmserve.held_image import HeldImage, ImageId
from tests.engine.driver import Driver, picture, words
from tests.engine.tiny import IMAGE_TOKENS, PAGE_BYTES, build_tiny, tiny_config, tiny_model

PAGES = 2  # of an image


def driver(vision_pages: int = 40) -> Driver:
    return Driver(build_tiny(tiny_config(vision_pages=vision_pages)))


def identify(d: Driver, seed: int) -> ImageId:
    return d.engine.pipeline.identify(picture(seed))


def see(d: Driver, *seeds: int) -> None:
    d.ask(*(d.image(picture(seed)) for seed in seeds), words(1, 5))


def states(d: Driver, *seeds: int) -> list[str]:
    held = d.engine.images.held([identify(d, seed) for seed in seeds])
    return [image.state for image in held]


def test_an_image_is_active_once_it_has_been_seen_and_counts_its_hits() -> None:
    d = driver()
    image = identify(d, 0)
    assert d.engine.images.held([image]) == [HeldImage("absent", IMAGE_TOKENS)]
    see(d, 0)
    (held,) = d.engine.images.held([image])
    assert held == HeldImage("active", IMAGE_TOKENS, PAGES * PAGE_BYTES, hits=0)
    see(d, 0)
    see(d, 0)
    assert d.engine.images.held([image])[0].hits == 2


def test_a_pinned_image_outlives_more_images_than_the_pool_has_room_for() -> None:
    d = driver(vision_pages=4 * PAGES)
    d.engine.images.pin(identify(d, 0))  # not there yet
    for seed in range(8):
        see(d, seed)
    assert states(d, 0, 3, 7) == ["active", "absent", "active"]
    before = d.counts()
    see(d, 0)
    assert d.counts() == before, "nothing was seen or written again"
    d.engine.images.unpin(identify(d, 0))
    for seed in range(8, 12):
        see(d, seed)
    assert states(d, 0) == ["absent"]
    d.assert_idle()


def test_pins_keep_nobody_from_running() -> None:
    d = driver(vision_pages=4 * PAGES)
    for seed in (0, 1):
        d.engine.images.pin(identify(d, seed))
        see(d, seed)
    see(d, 2, 3, 4, 5)  # the whole pool
    assert states(d, 0, 1) == ["absent", "absent"]
    d.assert_idle()


def test_pins_have_half_of_the_pool_and_no_more() -> None:
    d = driver(vision_pages=4 * PAGES)
    pin = d.engine.images.pin
    for seed in (0, 1, 1):
        pin(identify(d, seed))
    with pytest.raises(PinBudgetExceededError, match=f"{3 * PAGES} pages.* {2 * PAGES},"):
        pin(identify(d, 2))
    (refused,) = d.engine.images.held([identify(d, 2)])
    assert not refused.pinned
    d.engine.images.unpin(identify(d, 1))
    d.engine.images.unpin(identify(d, 1))
    pin(identify(d, 2))


def test_an_image_that_is_computed_in_its_context_is_found_where_it_was_last() -> None:
    d = Driver(Engine(tiny_config(), tiny_model()))
    d.engine._images._last_keys[identify(d, 0).digests[0]] = b"k" * 32
    assert states(d, 0) == ["absent"]
    d.engine.runner.vision[0].index.reserve(b"k" * 32, IMAGE_TOKENS)
    d.engine.runner.vision[0].index.mark_ready(b"k" * 32)
    assert states(d, 0) == ["active"]


def test_a_dropped_image_is_written_anew_and_answers_as_before() -> None:
    d = driver()
    (key,) = identify(d, 0).digests
    question = d.image(picture(0)), words(1, 5)
    first = d.ask(*question)
    before = d.counts()
    assert d.engine.images.drop(key)
    assert states(d, 0) == ["absent"]
    assert not d.engine.images.drop(key), "it is gone"
    d.engine.scheduler.holdings.radix.clear()  # type: ignore[union-attr]
    assert d.ask(*question) == first
    assert d.counts()[2] == before[2] + 1, "its KV was written again"
    assert states(d, 0) == ["active"]
    d.assert_idle()


def test_an_image_that_is_read_is_not_dropped() -> None:
    d = driver()
    d.submit((d.image(picture(0)), words(1, 5)))
    d.step()
    assert not d.engine.images.drop(*identify(d, 0).digests)
    d.run()
    d.engine.images.pin(identify(d, 0))
    assert d.engine.images.drop(*identify(d, 0).digests)
    see(d, 0)
    assert d.engine.images.held([identify(d, 0)])[0].pinned
    d.assert_idle()
