"""Large images in pieces: one entry of the pool, whose tokens see the whole image and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmserve.engine.engine import Engine
from mmserve.errors import PinBudgetExceededError
from mmserve.vision.crops import Crops
from tests.engine.driver import Driver, words
from tests.engine.test_details import answers_as_dense, shown
from tests.engine.tiny import IMAGE_TOKENS, NESTED, tiny_config, tiny_model
from tests.vision.images import encode, noise

CROPS = Crops(above=20, most=4)
LARGE, WIDE, SMALL = (
    encode(noise(*size), "PNG") for size in ((40, 30), (64, 16), (12, 12))
)  # of a model that sees 8 x 8 pixels
ALL = 5 * IMAGE_TOKENS


def driver(most: int | None = None) -> Driver:
    config = tiny_config()
    model = replace(config.model, image_max_tokens=most)
    loaded = tiny_model(sizes=NESTED, crops=CROPS)
    return Driver(Engine(replace(config, model=model), loaded))


@pytest.mark.parametrize(
    ("data", "detail", "tokens"),
    [
        (LARGE, "auto", ALL),
        (LARGE, "high", ALL),
        (LARGE, "low", NESTED[0]),
        (SMALL, "auto", IMAGE_TOKENS),
        (SMALL, "high", ALL),
        (WIDE, "auto", ALL),
    ],
)
def test_an_image_takes_tokens_by_its_size_and_detail(
    data: bytes, detail: str, tokens: int
) -> None:
    assert shown(driver(), data, detail).image.num_tokens == tokens


def test_the_answer_is_that_of_a_dense_pass_over_all_pieces_of_each_image() -> None:
    d = driver()
    prompt = (
        *(words(1, 9), shown(d, LARGE, "auto"), words(2, 7)),
        *(shown(d, SMALL, "auto"), shown(d, LARGE, "low"), words(3, 4)),
    )
    answers_as_dense(d, prompt, tiny_model(sizes=NESTED, crops=CROPS))


def test_it_is_found_as_one_image_and_answers_as_when_it_was_new() -> None:
    d = driver()
    first = d.ask(words(1, 9), shown(d, LARGE, "auto"), words(2, 7))
    runs, decodes, writes = d.counts()
    assert (runs, writes) == (1, 1)
    d.ask(words(4, 3), shown(d, LARGE, "high"), words(5, 3))
    again = shown(d, LARGE, "auto")
    assert again.image.pixels is None
    assert d.ask(words(1, 9), again, words(2, 7)) == first
    assert d.counts() == (runs, decodes, writes)
    d.assert_idle()


@pytest.mark.parametrize(
    ("most", "tokens"),
    [(ALL, ALL), (ALL - 1, 4 * IMAGE_TOKENS), (2 * IMAGE_TOKENS, IMAGE_TOKENS), (19, NESTED[1])],
)
def test_a_limit_leaves_out_crops_that_it_has_no_room_for(most: int, tokens: int) -> None:
    assert shown(driver(most), WIDE, "high").image.num_tokens == tokens


def test_all_details_of_an_image_are_its_and_count_where_it_is_pinned() -> None:
    d = driver()
    named = d.engine.pipeline.identify(LARGE)
    assert named.counts == (ALL, NESTED[0])
    assert {shown(d, LARGE, detail).image.digest for detail in ("high", "low")} == {*named.digests}
    d.ask(words(1, 5), shown(d, LARGE, "low"), words(2, 5), shown(d, LARGE, "high"), words(3, 5))
    (held,) = d.engine.images.held([named])
    pool = d.engine.runner.vision[0]
    pages = sum(pool.index.pages_for(count) for count in named.counts)
    assert held.num_bytes == pages * pool.shape.page_bytes


def test_what_is_cut_up_is_said_with_what_there_is_room_for() -> None:
    border = driver(ALL - 1).engine.border
    assert border.image_crops == {"above": CROPS.above, "most": 3}
    assert border.image_details["high"] == IMAGE_TOKENS
    plain = Engine(tiny_config(), tiny_model()).border
    assert not plain.image_details and plain.image_crops is None


def test_a_pinned_image_takes_what_all_its_details_do() -> None:
    """Eight pages each, of forty, half of which may be pinned."""
    d = driver()
    first, second, third = (
        d.engine.pipeline.identify(encode(noise(40, 30, seed), "PNG")) for seed in range(3)
    )
    d.engine.images.pin(first)
    d.engine.images.pin(second)
    with pytest.raises(PinBudgetExceededError, match="24 pages"):
        d.engine.images.pin(third)
