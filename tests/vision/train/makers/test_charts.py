"""Charts: the bars' heights, the clock's hands and the grids' cells say what the answers say."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mmserve.vision.train.assets import Assets, Split
from mmserve.vision.train.example import SIDE, Draw
from mmserve.vision.train.makers import charts
from mmserve.vision.train.makers.canvas import COLORS


def draw(assets: Assets, seed: int) -> Draw:
    return Draw(random.Random(seed), Split.TRAIN, assets)


@pytest.mark.parametrize("seed", range(8))
def test_a_bar_is_as_high_as_its_value(seed: int, assets: Assets) -> None:
    shown = charts.bars(draw(assets, seed))
    pixels = np.asarray(charts.chart_picture(draw(assets, seed), shown)).astype(int)
    unit = (charts.BASE - charts.TOP) / (charts.TOP_VALUE + 0.5)
    step = (charts.RIGHT - charts.LEFT) / len(shown)
    for i, bar in enumerate(shown):
        column = pixels[: charts.BASE - 1, int(charts.LEFT + step * (i + 0.5))]
        ink = np.abs(column - np.array(COLORS[bar.color])).max(axis=1) <= 17
        assert round(int(ink.sum()) / unit) == bar.value


@pytest.mark.parametrize("hour,minute", [(3, 0), (6, 30), (9, 15), (12, 45)])
def test_the_long_hand_points_to_the_minute(hour: int, minute: int, assets: Assets) -> None:
    pixels = np.asarray(charts.clock_picture(draw(assets, 1), hour, minute)).astype(int)
    turn = 2 * np.pi * minute / 60
    y, x = round(112 - 50 * np.cos(turn)), round(112 + 50 * np.sin(turn))
    assert pixels[y, x].sum() < 2 * 255  # ink, where no hour hand reaches


@pytest.mark.parametrize("seed", range(8))
def test_a_grid_cell_has_the_colour_that_is_said(seed: int, assets: Assets) -> None:
    rng = random.Random(seed)
    cells = [[rng.choice(list(COLORS)) for _ in range(3)] for _ in range(3)]
    first, count = charts.grid_questions(rng, cells, lettered=False)
    color = first.answer.strip(".").lower()
    assert any(color in row for row in cells)
    assert count.answer == f"{sum(row.count(color) for row in cells)}."


@pytest.mark.parametrize("seed", range(8))
def test_a_table_has_its_right_border_inside_the_picture(seed: int, assets: Assets) -> None:
    lines = [("Name", "Number"), ("One", "1"), ("Two", "2")]
    picture = np.asarray(charts.table_picture(draw(assets, seed), lines))
    dark = (picture.max(-1) < 100).any(0).nonzero()[0]
    assert SIDE - 16 < dark.max() < SIDE - 4
