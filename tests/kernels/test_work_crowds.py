"""Who sees images together, the tile that they are read in, and the pieces they are cut into."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.kernels.work import BLOCK, ImagePart, Reader
from mmserve.kernels.work_builder import WorkBuilder
from mmserve.kernels.work_crowds import (
    Crowd,
    choose_tile,
    crowds_of,
    cut_to_fill,
    seen_of,
)

TOKENS = {"a": 100, "b": 1225, "c": 64}


def shown(names: str) -> list[ImagePart]:
    """Images of TOKENS, one behind the other."""
    firsts = accumulate((TOKENS[name] for name in names), initial=0)
    none = np.zeros(0, np.int32)
    return [
        ImagePart(name, none, TOKENS[name], first, first)
        for name, first in zip(names, firsts, strict=False)
    ]


def crowds(*sessions: str, together: bool = True) -> list[tuple[str, int]]:
    """The images of every crowd, and how many read them."""
    seen = [seen_of(shown(names), 0, 10_000) for names in sessions]
    found = crowds_of(seen, together=together)
    return [("".join(str(image.key) for image in crowd.images), crowd.readers) for crowd in found]


def crowd(readers: int, names: str) -> Crowd:
    return Crowd(shown(names), readers)


def test_images_of_the_same_readers_are_one_crowds() -> None:
    assert crowds("abc", "ab", "ba") == [("ab", 3)]
    assert crowds("abc", "ab", "cb") == [("a", 2), ("b", 3), ("c", 2)]


def test_each_image_is_its_own_crowds_where_all_is_cut_alike() -> None:
    assert crowds("ab", "ab", together=False) == [("a", 2), ("b", 2)]


def test_who_shows_an_image_twice_reads_it_twice() -> None:
    assert crowds("aba") == [("a", 2)]
    assert crowds("aa", "a") == [("a", 3)]


def test_who_sees_an_image_in_part_is_in_no_crowd() -> None:
    whole, part = seen_of(shown("ab"), 0, 10_000), seen_of(shown("ab"), 7, 10_000)
    (only,) = crowds_of([whole, part, whole[:1]], together=True)[:1]
    assert [image.key for image in only.images] == ["a"]
    assert only.readers == 2


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.integers(1, 30))
def test_pieces_hold_every_key_once_and_are_nearly_alike(names: list[str], each: int) -> None:
    cut = crowd(2, "".join(names))
    cut.cut(BLOCK, each)
    keys = [(n, key) for piece in cut.pieces for n, lo, hi in piece for key in range(lo, hi)]
    assert keys == [(n, key) for n, name in enumerate(names) for key in range(TOKENS[name])]
    assert all(lo % BLOCK == 0 for piece in cut.pieces for _, lo, _ in piece)
    blocks = [sum(-(-(hi - lo) // BLOCK) for _, lo, hi in piece) for piece in cut.pieces]
    assert 0 < min(blocks) >= max(blocks) - 1 and max(blocks) <= each


@pytest.mark.parametrize(
    ("readers", "group", "rows"),
    [(2, 7, 32), (4, 7, 32), (5, 7, 64), (64, 1, 64), (64, 7, 64), (9, 71, 128)],
)
def test_a_tile_is_what_the_readers_need(readers: int, group: int, rows: int) -> None:
    assert choose_tile([crowd(readers, "b")], group) == rows


def test_what_most_is_read_of_chooses_the_tile() -> None:
    assert choose_tile([crowd(64, "c"), crowd(2, "b"), crowd(2, "b")], 7) == 32


@pytest.mark.parametrize("abreast", [4, 33, 66])
def test_items_fill_the_device_once(abreast: int) -> None:
    cut = [crowd(64, "bbbb")]
    cut_to_fill(cut, 18, abreast)
    assert abreast / 2 < len(cut[0].pieces) * -(-64 // 18) <= max(abreast, 4)


def test_no_piece_is_shorter_than_what_is_read_alone() -> None:
    cut = [crowd(2, "b")]
    cut_to_fill(cut, 18, 1000)
    assert len(cut[0].pieces) == 5


def test_sixty_four_sessions_have_few_partial_results() -> None:
    """Of four images of 1,225 tokens: eight each, where four times five would stand alone."""
    readers = [Reader(n, 1, (0, 0, 0, 4900), np.zeros(0, np.int32), _four(n)) for n in range(64)]
    shared = WorkBuilder(7, abreast=33).build(readers, 64)
    alone = WorkBuilder(7, abreast=33).build(readers, 64, share=False)
    assert (shared.num_slots, alone.num_slots) == (64 * 8, 64 * 20)
    assert (shared.tile_rows, shared.large, shared.small) == (64, 64, 0)


def _four(base: int) -> list[ImagePart]:
    pages = np.zeros(77, np.int32)
    return [ImagePart(n, pages, 1225, 1225 * n, base) for n in range(4)]
