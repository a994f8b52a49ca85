"""Large pictures: small things stand whole in the place that is said, and in crops of some size."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageChops

from mmserve.vision.crops import Crops, boxes
from mmserve.vision.train.assets import Assets, Split
from mmserve.vision.train.example import SIDE, Draw, Example
from mmserve.vision.train.makers import large
from mmserve.vision.train.makers.scenes import PLACES

CROPS = Crops(448, 4)


def made(skill: str, seed: int, assets: Assets) -> Example:
    return large.MAKERS[skill](Draw(random.Random(seed), Split.HELD_OUT, assets))


def ink(image: Image.Image) -> npt.NDArray[np.bool_]:
    """bool [rows, columns]: what is not the ground, which shows in the first corner."""
    ground = Image.new("RGB", image.size, image.getpixel((0, 0)))
    apart: npt.NDArray[np.uint8] = np.asarray(ImageChops.difference(image, ground))
    return np.asarray(apart.max(axis=2) > 0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("skill", large.MAKERS)
def test_something_small_stands_where_it_is_asked_for(
    skill: str, seed: int, assets: Assets
) -> None:
    example = made(skill, seed, assets)
    (image,) = example.images
    place = example.turns[-1].question.rstrip("?").partition(" at the ")[2]
    row, column = divmod(PLACES.index(place), 3)
    seen = ink(image)
    rows, columns = (
        slice(number * side // 3, (number + 1) * side // 3)
        for number, side in ((row, image.height), (column, image.width))
    )
    cell = seen[rows, columns]
    assert cell.any()
    lines, letters = (np.flatnonzero(cell.any(axis=axis)) for axis in (1, 0))
    assert np.ptp(lines) < max(large.EMOJI) and np.ptp(letters) < cell.shape[1] - large.MARGIN


@pytest.mark.parametrize("seed", range(12))
def test_pictures_are_so_large_that_crops_are_made_of_them(seed: int, assets: Assets) -> None:
    (image,) = made("small_text", seed, assets).images
    count = CROPS.count(image.width, image.height, SIDE, "auto")
    assert 2 <= count <= CROPS.most
    longest = max(
        max(b[2] - b[0], b[3] - b[1]) for b in list(boxes(image.width, image.height, count))[1:]
    )
    assert longest < max(image.size)
