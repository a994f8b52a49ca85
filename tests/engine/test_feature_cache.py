"""What is in use stays; of the rest the latest used, up to the limit."""

from __future__ import annotations

import pytest
import torch

from mmserve.engine.feature_cache import Done, FeatureCache
from mmserve.model.adapter import Features

SIZE = 40  # bytes of one image's


def filled(max_bytes: int, names: bytes) -> FeatureCache:
    cache = FeatureCache(max_bytes)
    for name in names:
        cache.put(bytes([name]), Features(torch.zeros(2, 5)), Done())
    return cache


def kept(cache: FeatureCache) -> bytes:
    return bytes(name for name in range(256) if bytes([name]) in cache)


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    cache = filled(2 * SIZE, b"abc")
    cache.trim()
    cache.get(b"a")
    cache.trim()
    assert kept(cache) == b"ac"


def test_what_was_used_since_the_last_time_stays_beyond_the_limit() -> None:
    cache = filled(0, b"ab")
    cache.trim()
    assert kept(cache) == b"ab"
    cache.touch(b"a")
    cache.trim()
    assert kept(cache) == b"a"
    cache.trim()
    assert kept(cache) == b""


def test_an_image_is_ready_when_it_is_known_and_done() -> None:
    class Never(Done):
        def passed(self) -> bool:
            return False

    cache = filled(SIZE, b"a")
    cache.put(b"b", Features(torch.zeros(2, 5)), Never())
    assert [cache.is_ready(name) for name in (b"a", b"b", b"c")] == [True, False, False]
    assert b"b" in cache and b"c" not in cache


def test_features_that_were_forgotten_are_an_error() -> None:
    with pytest.raises(KeyError):
        filled(SIZE, b"a").get(b"b")
