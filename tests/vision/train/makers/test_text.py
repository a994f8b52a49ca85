"""Printed text: in the colour that is said, whole, and of words its split may show."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmserve.vision.train.assets import Assets, Split, is_held_out
from mmserve.vision.train.example import Draw
from mmserve.vision.train.makers import text
from mmserve.vision.train.makers.canvas import COLORS, SHADE

seeds = st.integers(0, 2**32)
one_archive = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@one_archive
@given(seed=seeds, skill=st.sampled_from(list(text.KINDS)), split=st.sampled_from(Split))
def test_text_is_whole_and_in_its_colour(
    seed: int, skill: str, split: Split, assets: Assets
) -> None:
    draw = Draw(random.Random(seed), split, assets)
    shown = text.written(draw.rng, text.lines(draw, skill))
    pixels = np.asarray(text.picture(draw, shown)).astype(int)
    off = np.linalg.norm(pixels - np.array(shown.ground.color), axis=2)
    assert not np.concatenate([off[0], off[-1], off[:, 0], off[:, -1]]).any()
    darkest = pixels.reshape(-1, 3)[off.argmax()]
    assert math.dist(darkest, COLORS[shown.color]) <= SHADE * math.sqrt(3) + 1


@one_archive
@given(seed=seeds, split=st.sampled_from(Split))
def test_a_word_is_one_its_split_may_show(seed: int, split: Split, assets: Assets) -> None:
    word = text.word(Draw(random.Random(seed), split, assets)).lower()
    assert is_held_out(word) == (split is Split.HELD_OUT)
    assert 2 <= len(word) <= 10


@one_archive
@given(seed=seeds, split=st.sampled_from(Split))
def test_several_characters_are_of_one_split(seed: int, split: Split, assets: Assets) -> None:
    string = text.chinese(Draw(random.Random(seed), split, assets)).turns[0].answer
    assert len(string) == 1 or is_held_out(string) == (split is Split.HELD_OUT)
    assert set(string) <= set(assets.characters)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_spelled_is_what_is_written(seed: int, assets: Assets) -> None:
    rng = random.Random(seed)
    shown = text.written(rng, text.lines(Draw(rng, Split.TRAIN, assets), "word_pair"))
    facts = text.facts(rng, "word_pair", shown)
    for turn in (*facts["word_pair"], *facts["described"]):
        ((start, end),) = turn.spelled
        assert turn.answer[start:end] == shown.text
