"""Several images: the one that is named is the one that shows it, and a change is the only one."""

from __future__ import annotations

import random

import pytest
from PIL import Image

from mmserve.vision.train.assets import Assets, Split
from mmserve.vision.train.example import Draw
from mmserve.vision.train.makers import scenes, several
from mmserve.vision.train.makers.several import Part

BLANK = Image.new("RGB", (8, 8))


def part(count: int, *shows: str) -> Part:
    return Part(BLANK, (), "shapes", frozenset(shows), count)


def test_an_image_is_asked_for_only_by_what_no_other_shows() -> None:
    images = [part(2, "a red circle", "a blue star"), part(1, "a red circle")]
    turns = {t.question: t.answer for t in several.which(random.Random(0), images)}
    assert set(turns.values()) == {"Image 1."}
    assert not any("red circle" in question for question in turns)


def test_images_are_counted_together() -> None:
    images = [part(2, "a red circle"), part(5, "a blue star")]
    total, same = several.together(random.Random(0), images)
    assert (total.answer, same.answer) == ("7.", "Yes.")


@pytest.mark.parametrize("kind", ["color", "shape", "gone"])
@pytest.mark.parametrize("seed", range(6))
def test_a_change_leaves_everything_else(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    before = scenes.scene(rng, 3)
    after, said = several.change(rng, before, 1, kind)
    kept = [t for t in after.things if t in before.things]
    assert kept == [before.things[0], before.things[2]]
    assert before.things[1].shape in said
    assert len(after.things) == (2 if kind == "gone" else 3)


@pytest.mark.parametrize("seed", range(6))
def test_an_image_of_an_earlier_turn_is_asked_for_in_the_last(seed: int, assets: Assets) -> None:
    made = several.by_turn(Draw(random.Random(seed), Split.HELD_OUT, assets))
    assert [turn.shows for turn in made.turns[:-1]] == [(i,) for i in range(len(made.images))]
    assert not made.turns[-1].shows
