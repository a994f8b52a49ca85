"""The laws of the system, for every pair of formats that text and images can be held in."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.cache.kv_pool import KVShape
from mmserve.config import (
    KV_FORMATS,
    WHOLE_PAGE,
    WHOLE_PAGE_FORMATS,
    CacheConfig,
    SpecConfig,
    TierConfig,
)
from mmserve.engine.engine import Engine
from mmserve.kernels.kv_formats import FORMATS, GROUP_TOKENS
from mmserve.kvfile.file import read_file, write_file
from mmserve.kvfile.header import KVMismatchError
from mmserve.request import Segment, TextSegment
from tests.engine.driver import GREEDY, Driver, picture, tiny_driver, words
from tests.engine.tiny import IMAGE_TOKENS, build_tiny, tiny_config, tiny_model

PAIRS = list(itertools.product(KV_FORMATS, KV_FORMATS))
SOME = [("int8", "int8"), ("auto", "int4"), ("fp8_e4m3", "int2_outliers"), ("int4", "int2")]
LONG = replace(GREEDY, max_tokens=16)
DRAWN = replace(LONG, temperature=1.0, seed=5)  # so that a small model does not repeat itself


def driver(pair: tuple[str, str], **options: Any) -> Driver:
    """8-bit weights on a CPU: the same bits in any company, so that tokens may be compared."""
    text, vision = pair
    formats = {"text_format": text, "vision_format": vision}
    return tiny_driver(**{"dtype": "int8", **formats, **options})


def conversation(d: Driver, n: int) -> tuple[Segment, ...]:
    """More than a page of text, and an image that others show, too."""
    return (
        words(n, 9 + n),
        d.image(picture(n % 3)),
        words(n + 50, 20),
        d.image(picture(7)),
        words(3, 5),
    )


def test_the_configuration_and_the_kernels_know_the_same_formats() -> None:
    assert set(KV_FORMATS) == set(FORMATS)
    assert all(FORMATS[name].whole_pages == (name in WHOLE_PAGE_FORMATS) for name in FORMATS)
    assert WHOLE_PAGE == GROUP_TOKENS


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_hit_equals_miss(pair: tuple[str, str]) -> None:
    cold = driver(pair)
    expected = cold.ask(*conversation(cold, 4), params=LONG)
    warm = driver(pair)
    for data in (picture(1), picture(7)):
        warm.ask(words(90, 31), warm.image(data), words(91, 4))
    segments = conversation(warm, 4)
    before = warm.counts()
    assert warm.ask(*segments, params=LONG) == expected, "images that were known"
    assert warm.counts() == before
    assert warm.ask(*segments, params=LONG) == expected, "a prefix that was known"
    for segment in segments[1::2]:
        assert torch.equal(warm.kv(segment.image), cold.kv(segment.image))  # type: ignore[union-attr]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_chunks_company_and_pressure_change_nothing(pair: tuple[str, str]) -> None:
    alone = [
        (d := driver(pair, prefix_caching=False)).ask(*conversation(d, n), params=DRAWN)
        for n in range(4)
    ]
    assert len({tuple(answer) for answer in alone}) > 1, "answers must differ to mean something"
    per_page = driver(pair).engine.runner.text[0].shape.page_bytes
    scarce = 9 * per_page // driver(("auto", "auto")).engine.runner.text[0].shape.page_bytes + 1
    d = driver(pair, text_pages=scarce, max_num_batched_tokens=23)
    requests = [d.submit(conversation(d, n), DRAWN) for n in range(4)]
    d.run()
    assert [d.tokens(request) for request in requests] == alone
    d.assert_idle()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_aborts_leave_the_pools_idle_and_disturb_nobody(pair: tuple[str, str]) -> None:
    d = driver(pair, max_num_batched_tokens=40)
    quiet = driver(pair)
    expected = quiet.ask(*conversation(quiet, 2), params=LONG)
    stays = d.submit(conversation(d, 2), LONG)
    for n in range(12):
        others = [d.submit(conversation(d, n + i), LONG) for i in range(2)]
        for _ in range(n % 4):
            d.step()
        for request in others:
            d.abort(request)
    d.run()
    assert d.tokens(stays) == expected
    d.assert_idle()


@pytest.mark.parametrize(
    ("pair", "method"), [*itertools.product(SOME[:-1], ["ngram", "lookahead"]), (SOME[-1], "ngram")]
)
def test_speculative_equals_plain(pair: tuple[str, str], method: str) -> None:
    """`lookahead` drafts trees, whose right paths move in the pool."""
    phrase = words(1, 12).token_ids
    text = TextSegment(phrase * 4)
    config = tiny_config(dtype="int8", text_format=pair[0], vision_format=pair[1])
    plain = Driver(Engine(config, tiny_model()))
    expected = plain.ask(text, plain.image(picture(1)), TextSegment(phrase), params=LONG)
    spec = SpecConfig(method=method, adaptive=False)
    drafted = Driver(Engine(replace(config, speculative=spec), tiny_model()))
    segments = text, drafted.image(picture(1)), TextSegment(phrase)
    assert drafted.ask(*segments, params=LONG) == expected
    drafted.assert_idle()


@pytest.mark.parametrize("pair", SOME, ids="-".join)
def test_stock_layers_see_hits_as_misses_too(pair: tuple[str, str]) -> None:
    cold = driver(pair, dtype="float32")
    expected = cold.ask(*conversation(cold, 4))
    warm = driver(pair, dtype="float32")
    warm.ask(words(1, 3), warm.image(picture(1)), words(2, 3))
    assert warm.ask(*conversation(warm, 4)) == expected


@pytest.mark.parametrize("pair", SOME, ids="-".join)
def test_a_tier_and_a_file_bring_back_the_same_bytes(pair: tuple[str, str], tmp_path: Path) -> None:
    def config(**options: Any) -> Any:
        made = tiny_config(text_format=pair[0], vision_format=pair[1], dtype="int8", **options)
        return replace(made, tiers=TierConfig(folder=tmp_path / "tier"))

    first = Driver(Engine(config(), tiny_model()))
    first.durable = True
    expected = first.ask(*conversation(first, 3), params=LONG)
    write_file(tmp_path / "all.kv", first.engine.collect_kv())
    first.engine.close()
    second = Driver(Engine(config(), tiny_model()))
    assert second.ask(*conversation(second, 3), params=LONG) == expected
    second.engine.close()

    third = driver(pair)
    third.engine.kv.put(third.engine.read_kv(tmp_path / "all.kv"))
    before = third.counts()
    assert third.ask(*conversation(third, 3), params=LONG) == expected
    assert third.counts() == before, "an image of the file was looked at"
    with pytest.raises(KVMismatchError, match="format"):
        driver(("auto", "auto")).engine.read_kv(tmp_path / "all.kv")
    assert read_file(tmp_path / "all.kv").num_bytes > 0


def test_layers_can_be_left_out_and_take_their_full_bytes() -> None:
    d = driver(("int8", "int4"), skip_layers=(1,))
    assert [group.layers for group in d.engine.runner.groups] == [(0, 2), (1,)]
    for pools in (d.engine.runner.text, d.engine.runner.vision):
        assert [pool.shape.kind.plain for pool in pools] == [False, True]
    cold = driver(("int8", "int4"), skip_layers=(1,))
    expected = cold.ask(*conversation(cold, 4), params=LONG)
    d.ask(words(1, 3), d.image(picture(1)), words(2, 3))
    assert d.ask(*conversation(d, 4), params=LONG) == expected


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match="text cannot be 'int3'; known are auto"):
        CacheConfig(text_format="int3")
    lookahead = replace(tiny_config(text_format="int2"), speculative=SpecConfig(method="lookahead"))
    with pytest.raises(ValueError, match="lookahead drafts trees, .* int2 takes chains only"):
        build_tiny(lookahead)
    with pytest.raises(ValueError, match="no layer 3: the model has 0 to 2"):
        build_tiny(tiny_config(text_format="int8", skip_layers=(0, 3)))


@pytest.mark.parametrize(("name", "times"), [("int4", 3.5), ("int2", 6)])
@pytest.mark.parametrize("dim", [64, 128])
def test_so_many_times_more_text_fits_than_in_16_bits(name: str, times: float, dim: int) -> None:
    cpu = torch.device("cpu")
    plain = KVShape(2, 3, dim, WHOLE_PAGE, torch.bfloat16, cpu)
    assert plain.page_bytes >= times * replace(plain, kind=FORMATS[name]).page_bytes


@pytest.mark.parametrize(("tokens", "size"), [(3, 16), (32, 32), (33, 64), (1225, 64)])
def test_pages_that_are_stored_whole_are_no_larger_than_an_image(tokens: int, size: int) -> None:
    whole = CacheConfig(page_size=WHOLE_PAGE, vision_format="int2")
    assert whole.fitted(tokens).page_size == size
    text_too = replace(whole, text_format="int4")
    for asked in (replace(whole, page_size=8), CacheConfig(vision_format="int8"), text_too):
        assert asked.fitted(tokens) == asked


def test_an_engine_fits_its_pages_to_its_images() -> None:
    config = tiny_config(vision_format="int2")
    config = replace(config, cache=replace(config.cache, page_size=WHOLE_PAGE))
    engine = build_tiny(config)
    assert IMAGE_TOKENS == 20 and engine.runner.vision[0].shape.page_size == 32
    assert engine.scheduler.holdings.page_size == 32


def test_an_image_is_known_by_its_format() -> None:
    keys = {driver(pair).image(picture(1)).image.digest for pair in (("auto", "auto"), *SOME)}
    assert len(keys) == len(SOME) + 1
