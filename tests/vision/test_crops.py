"""Large images in pieces: the pieces cover the image once, and their number goes by its sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config import ImageLimits
from mmserve.vision.crops import Crops, best, boxes, longer
from mmserve.vision.preprocess import decode, decode_pieces, to_pixels
from tests.vision.images import encode, noise, smooth

SIDES = st.integers(1, 4000)
SIZE = 32
LIMITS = ImageLimits()


@given(SIDES, SIDES, st.integers(1, 9))
def test_crops_tile_the_image_and_none_is_longer_than_the_best_grid_allows(
    width: int, height: int, count: int
) -> None:
    whole, *crops = boxes(width, height, count)
    assert list(whole) == [0, 0, width, height] and len(crops) == count
    areas = [(right - left) * (bottom - top) for left, top, right, bottom in crops]
    assert sum(areas) == pytest.approx(width * height)
    longest = longer(width, height, best(width, height, count))
    for left, top, right, bottom in crops:
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert max(right - left, bottom - top) <= longest + 1e-6


@given(SIDES, SIDES, st.integers(2, 9))
def test_a_turned_image_has_as_many_crops(width: int, height: int, most: int) -> None:
    crops = Crops(100, most)
    assert crops.count(width, height, 64, "high") == crops.count(height, width, 64, "high")


@given(SIDES, SIDES, st.integers(2, 9), st.integers(2, 9))
def test_a_lower_limit_gives_other_crops_only_where_it_is_met(
    width: int, height: int, most: int, lower: int
) -> None:
    """The number alone names the pieces, whatever server made them."""
    found = Crops(1, most).count(width, height, 64, "high")
    less = Crops(1, min(most, lower)).count(width, height, 64, "high")
    assert less == found if found <= lower else less <= lower


@pytest.mark.parametrize(
    ("width", "height", "detail", "count"),
    [
        (224, 224, "high", 0),  # nothing more could be seen
        (400, 300, "high", 4),
        (400, 300, "auto", 0),
        (1000, 900, "auto", 4),
        (1000, 900, "low", 0),
        (1920, 1080, "auto", 4),
        (1000, 400, "auto", 3),
        (3000, 200, "original", 4),
    ],
)
def test_high_asks_for_crops_and_auto_by_size(
    width: int, height: int, detail: str, count: int
) -> None:
    assert Crops(448, 4).count(width, height, 224, detail) == count


@pytest.mark.parametrize(("above", "most"), [(0, 4), (448, 1), (448, -1)])
def test_crops_that_cut_nothing_are_refused(above: int, most: int) -> None:
    with pytest.raises(ValueError, match="cut nothing"):
        Crops(above, most)


def test_each_piece_is_what_lies_in_its_box() -> None:
    image = noise(4 * SIZE, 2 * SIZE)
    pieces = decode_pieces(encode(image, "PNG"), LIMITS, SIZE, 8)
    assert pieces.shape == (9, 3, SIZE, SIZE)
    assert np.array_equal(pieces[0], to_pixels(image, SIZE))
    pixels = np.asarray(image).transpose(2, 0, 1)
    for number, piece in enumerate(pieces[1:]):
        row, column = divmod(number, 4)
        there = (slice(None), slice(row * SIZE, row * SIZE + SIZE))
        assert np.array_equal(piece, pixels[there][:, :, column * SIZE : column * SIZE + SIZE])


def test_a_photograph_in_pieces_is_read_fine_enough_for_them() -> None:
    """libjpeg's scaled decoding must leave each crop the pixels that it is made of."""
    image = smooth(40 * SIZE, 40 * SIZE)
    (_, *crops) = decode_pieces(encode(image, "JPEG", quality=95), LIMITS, SIZE, 4)
    for piece, box in zip(crops, list(boxes(40 * SIZE, 40 * SIZE, 4))[1:], strict=True):
        assert np.abs(piece.astype(int) - to_pixels(image, SIZE, box)).max() < 12


def test_without_crops_the_one_piece_is_the_whole_image() -> None:
    data = encode(noise(50, 40), "PNG")
    assert np.array_equal(decode_pieces(data, LIMITS, SIZE, 0), decode(data, LIMITS, SIZE)[None])
