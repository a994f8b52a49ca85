"""Scenes: what is said of one is true of its pixels, and of the things it was drawn from."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.vision.train.example import SIDE
from mmserve.vision.train.makers import scenes
from mmserve.vision.train.makers.canvas import COLORS, SHAPES, Color
from mmserve.vision.train.makers.scenes import Scene, Thing
from mmserve.vision.train.makers.talk import several

seeds = st.integers(0, 2**32)
HOLLOW = ("ring",)


def named(color: Color) -> str:
    return min(COLORS, key=lambda name: math.dist(COLORS[name], color))


def ink_at(scene: Scene, thing: Thing, seed: int) -> str:
    """The colour in the picture a little beside the middle of a thing, or on its ring."""
    image = scenes.picture(random.Random(seed), scene)
    x = thing.x - (0.8 * thing.r if thing.shape in HOLLOW else 0)
    return named(image.getpixel((int(x), int(thing.y))))


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 9), st.booleans())
def test_every_thing_is_drawn_in_its_colour(seed: int, count: int, placed: bool) -> None:
    scene = scenes.scene(random.Random(seed), count, placed=placed)
    assert len(scene.things) == count
    for thing in scene.things:
        assert ink_at(scene, thing, seed) == thing.color


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 9))
def test_as_many_blots_are_seen_as_are_counted(seed: int, count: int) -> None:
    scene = scenes.scene(random.Random(seed), count)
    pixels = np.asarray(scenes.picture(random.Random(seed), scene)).astype(int)
    ink = np.abs(pixels - np.array(scene.ground.color)).max(axis=2) > 40
    assert blots(ink) == count
    (turn,) = scenes.total(random.Random(seed), scene)
    assert turn.answer == f"{count}."


def blots(ink: npt.NDArray[np.bool_]) -> int:
    """Connected regions of a picture [rows, columns] of yes and no."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(ink), strict=True)}
    found = 0
    while left:
        found += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            for near in ((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
    return found


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(2, 6))
def test_things_keep_apart_and_within_the_picture(seed: int, count: int) -> None:
    things = scenes.scene(random.Random(seed), count).things
    for i, one in enumerate(things):
        assert one.r <= one.x <= SIDE - one.r and one.r <= one.y <= SIDE - one.r
        for other in things[:i]:
            assert math.dist((one.x, one.y), (other.x, other.y)) > one.r + other.r


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 9))
def test_a_place_is_where_the_thing_is(seed: int, count: int) -> None:
    for thing in scenes.scene(random.Random(seed), count, placed=True).things:
        column, row = (int(v // scenes.CELL) for v in (thing.x, thing.y))
        assert scenes.PLACES[3 * row + column] == thing.place


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_a_count_is_that_of_the_things_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    scene = scenes.scene(rng, rng.randint(1, 9))
    for turn in scenes.counts(rng, scene):
        words = re.findall(r"[a-z]+", turn.question)
        wanted = [t for t in scene.things if several(t.shape) in words or t.color in words]
        assert turn.answer == f"{len(wanted)}."


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_a_relation_holds_between_the_two_middles(seed: int) -> None:
    rng = random.Random(seed)
    scene = scenes.scene(rng, rng.randint(2, 4))
    for turn in scenes.relations(rng, scene):
        match = re.fullmatch(r"Is the (\w+ \w+) (.+?) the (\w+ \w+)\?", turn.question)
        if match is None:
            continue
        name, word, other = match.groups()
        one, two = (next(t for t in scene.things if t.name == n) for n in (name, other))
        truth = {
            "to the left of": one.x < two.x,
            "to the right of": one.x > two.x,
            "above": one.y < two.y,
            "below": one.y > two.y,
        }[word]
        assert turn.answer == ("Yes." if truth else "No.")


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 4))
def test_a_caption_names_everything(seed: int, count: int) -> None:
    rng = random.Random(seed)
    scene = scenes.scene(rng, count, placed=rng.random() < 0.5)
    (turn,) = scenes.captions(rng, scene)
    named = re.findall(rf"(?:{'|'.join(COLORS)}) (?:{'|'.join(SHAPES)})", turn.answer.lower())
    assert sorted(named) == (sorted(scene.names) if count <= 3 else [])
    assert (scene.ground.name or "") in turn.answer.lower()
