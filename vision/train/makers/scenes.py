"""Scenes of coloured shapes: what they are, how many, where, how large, and on what.

Owns how shapes are laid out and every question about one scene. Each answer is read from the list
of things that was drawn, never from the picture.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image

from mmserve.vision.train.example import SIDE, Draw, Example, Turn
from mmserve.vision.train.makers.canvas import (
    COLORS,
    DETAIL,
    SHAPES,
    Background,
    background,
    canvas,
    draw_shape,
    finish,
    shade,
)
from mmserve.vision.train.makers.talk import Maker, a, about, say, several, yes_or_no

PLACES = tuple(
    f"{v} {h}".strip() or "center" for v in ("top", "", "bottom") for h in ("left", "", "right")
)
CELL = SIDE / 3  # pixels, of a scene whose things stand in nine places
APART = 28  # pixels between two centres, from which on one is left of or above the other
LARGER = 1.3  # times as wide, and as large in area, as any other, to be called the largest
# Pixels that a shape covers, for a radius of one.
AREAS = {
    **{"circle": 3.14, "oval": 1.82, "ring": 3.14, "square": 2.65, "rectangle": 2.1},
    **{"triangle": 1.57, "star": 1.5, "diamond": 1.44, "pentagon": 2.88, "hexagon": 3.14},
    **{"heart": 2.0, "cross": 2.15},
}


@dataclass(frozen=True)
class Thing:
    """One shape of a scene; the centre and radius in pixels, the place one of nine or None."""

    color: str
    shape: str
    x: float
    y: float
    r: float
    place: str | None

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    def exceeds(self, other: Thing) -> bool:
        """Whether everyone would call it the larger one."""
        mine, others = AREAS[self.shape] * self.r**2, AREAS[other.shape] * other.r**2
        return self.r > LARGER * other.r and mine > LARGER * others


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    ground: Background

    @property
    def names(self) -> list[str]:
        return [thing.name for thing in self.things]

    @property
    def colors(self) -> list[str]:
        return [thing.color for thing in self.things]

    @property
    def shapes(self) -> list[str]:
        return [thing.shape for thing in self.things]


def scene(
    rng: random.Random, count: int, *, placed: bool = False, named_ground: bool = False
) -> Scene:
    """`count` shapes that do not touch; `placed`: each in one of nine places, at most nine."""
    colors = rng.sample(list(COLORS), rng.choice((2, 3, 8)))
    shapes = rng.sample(SHAPES, rng.choice((1, 2, 3, 12)) if count > 3 else 12)
    things: list[Thing] = []
    cells = rng.sample(range(9), count) if placed else []
    for cell in cells:
        r = rng.uniform(19, 33)
        x, y = (CELL * (i + 0.5) + rng.uniform(r - 36, 36 - r) for i in (cell % 3, cell // 3))
        things.append(Thing(rng.choice(colors), rng.choice(shapes), x, y, r, PLACES[cell]))
    largest = 60.0 if count < 3 else 38.0 if count < 5 else 26.0
    while len(things) < count:
        r = rng.uniform(15, largest)
        x, y = rng.uniform(r + 2, SIDE - r - 2), rng.uniform(r + 2, SIDE - r - 2)
        if all(math.dist((x, y), (t.x, t.y)) > 1.16 * (r + t.r) for t in things):
            things.append(Thing(rng.choice(colors), rng.choice(shapes), x, y, r, None))
        else:
            largest = max(16, largest * 0.98)  # a crowd gets smaller until it fits
    used = {thing.color for thing in things}
    return Scene(tuple(things), background(rng, used, named=named_ground))


def picture(rng: random.Random, scene: Scene) -> Image.Image:
    image, pen = canvas(scene.ground.color)
    for t in scene.things:
        x, y, r = t.x * DETAIL, t.y * DETAIL, t.r * DETAIL
        draw_shape(pen, rng, t.shape, x, y, r, shade(rng, t.color))
    return finish(image)


def colors(rng: random.Random, scene: Scene) -> list[Turn]:
    """The colour of each shape that is there once."""
    turns = []
    for t in scene.things:
        if scene.shapes.count(t.shape) == 1:
            ask = [f"What color is the {t.shape}?", f"Which color does the {t.shape} have?"]
            turns.append(say(rng, ask, t.color))
    if len(scene.things) == 1:
        turns.append(say(rng, ["What color is the shape?"], scene.things[0].color))
    return turns


def shapes(rng: random.Random, scene: Scene) -> list[Turn]:
    """The shape that has a colour which is there once."""
    turns = []
    for t in scene.things:
        if scene.colors.count(t.color) == 1:
            ask = [f"What shape is {t.color}?", f"What is the {t.color} shape?"]
            turns.append(say(rng, ask, t.shape))
    if len(scene.things) == 1:
        ask = ["What shape is this?", "What shape is in the image?", "Which shape do you see?"]
        turns.append(say(rng, ask, scene.things[0].shape))
    return turns


def total(rng: random.Random, scene: Scene) -> list[Turn]:
    ask = ["How many shapes are there?", "How many shapes are in the image?", "Count the shapes."]
    return [say(rng, ask, str(len(scene.things)))]


def counts(rng: random.Random, scene: Scene) -> list[Turn]:
    """How many of one shape, or of one colour; now and then of one that is not there."""
    shape = rng.choice(scene.shapes if rng.random() < 0.85 else SHAPES)
    color = rng.choice(scene.colors if rng.random() < 0.85 else list(COLORS))
    many = several(shape)
    ask = [f"How many {many} are there?", f"How many {many} do you see?", f"Count the {many}."]
    of_color = [f"How many {color} shapes are there?", f"How many shapes are {color}?"]
    return [
        say(rng, ask, str(scene.shapes.count(shape))),
        say(rng, of_color, str(scene.colors.count(color))),
    ]


def exists(rng: random.Random, scene: Scene) -> list[Turn]:
    other_color = f"{rng.choice(list(COLORS))} {rng.choice(scene.shapes)}"
    other_shape = f"{rng.choice(scene.colors)} {rng.choice(SHAPES)}"
    turns = []
    for name in (rng.choice(scene.names), other_color, other_shape):
        ask = [f"Is there {a(name)}?", f"Do you see {a(name)} in the image?"]
        turns.append(say(rng, ask, yes_or_no(name in scene.names)))
    return turns


def positions(rng: random.Random, scene: Scene) -> list[Turn]:
    """Where a thing is, and what is at a place, of the nine places."""
    turns = []
    for t in scene.things:
        if t.place is None:
            continue
        if scene.shapes.count(t.shape) == 1:
            ask = [f"Where is the {t.shape}?", f"Where in the image is the {t.shape}?"]
            turns.append(say(rng, ask, t.place))
        if scene.colors.count(t.color) == 1:
            turns.append(say(rng, [f"Where is the {t.color} shape?"], t.place))
        ask = [f"What is at the {t.place}?", f"Which shape is at the {t.place} of the image?"]
        turns.append(say(rng, ask, a(t.name)))
    return turns


def relations(rng: random.Random, scene: Scene) -> list[Turn]:
    """Left, right, above, below: as yes or no, and of two things as a question for the other."""
    turns: list[Turn] = []
    one, two = rng.sample(scene.things, 2) if len(scene.things) > 1 else (None, None)
    if one is None or two is None or scene.names.count(one.name) + scene.names.count(two.name) > 2:
        return turns
    for gap, low, high in (
        (one.x - two.x, "to the left of", "to the right of"),
        (one.y - two.y, "above", "below"),
    ):
        if abs(gap) < APART:
            continue
        word = rng.choice((low, high))
        truth = (gap < 0) == (word == low)
        turns.append(say(rng, [f"Is the {one.name} {word} the {two.name}?"], yes_or_no(truth)))
        if len(scene.things) == 2:
            turns.append(
                say(rng, [f"What is {low if gap > 0 else high} the {one.name}?"], a(two.name))
            )
    return turns


def sizes(rng: random.Random, scene: Scene) -> list[Turn]:
    """The largest and the smallest, where one clearly is."""
    turns = []
    for t in scene.things if len(scene.things) > 1 else ():
        others = [o for o in scene.things if o is not t]
        if all(t.exceeds(o) for o in others):
            ask = ["Which shape is the largest?", "What is the biggest shape?"]
            turns.append(say(rng, ask, a(t.name)))
        if all(o.exceeds(t) for o in others):
            turns.append(say(rng, ["Which shape is the smallest?"], a(t.name)))
    return turns


def grounds(rng: random.Random, scene: Scene) -> list[Turn]:
    if scene.ground.name is None:
        return []
    ask = ["What is the background color?", "What color is the background?"]
    return [say(rng, ask, scene.ground.name)]


def captions(rng: random.Random, scene: Scene) -> list[Turn]:
    """All of a scene of one to three things, by column and then by row, and of more a summary."""
    ask = ["Describe the image.", "What do you see?", "What is in this image?"]
    on = f" on a {scene.ground.name} background" if scene.ground.name else ""
    if len(scene.things) > 3:
        return [say(rng, ask, f"{len(scene.things)} shapes{on}")]
    order = sorted(scene.things, key=lambda t: (t.x // CELL, t.y) if t.place else (t.x, 0.0))
    parts = [a(t.name) + (f" at the {t.place}" if t.place else "") for t in order]
    listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    return [say(rng, ask, listed + on)]


QUESTIONS = {
    "colour": colors,
    "shape": shapes,
    "count": total,
    "count_mixed": counts,
    "exists": exists,
    "position": positions,
    "relation": relations,
    "size": sizes,
    "background": grounds,
    "caption": captions,
}


def facts(rng: random.Random, scene: Scene) -> dict[str, list[Turn]]:
    """All that can be asked about a scene, by skill; a skill it has nothing for is left out."""
    asked = {skill: ask(rng, scene) for skill, ask in QUESTIONS.items()}
    return {skill: turns for skill, turns in asked.items() if turns}


def scene_for(rng: random.Random, skill: str) -> Scene:
    """A scene of the kind that a skill asks about; it need not have an answer."""
    if skill == "count":
        return scene(rng, rng.randint(1, 9))
    if skill == "count_mixed":
        return scene(rng, rng.randint(2, 9))
    if skill == "position":
        return scene(rng, rng.randint(1, 5), placed=True)
    if skill == "caption":
        return scene(rng, rng.randint(1, 3), placed=rng.random() < 0.6)
    if skill in ("relation", "size"):
        return scene(rng, rng.choice((2, 2, 3, 4)))
    return scene(rng, rng.choice((1, 2, 2, 3, 4, 6)), named_ground=skill == "background")


def maker(skill: str) -> Maker:
    def make(draw: Draw) -> Example:
        while True:
            drawn = scene_for(draw.rng, skill)
            asked = facts(draw.rng, drawn)
            if skill in asked:
                return about(draw, skill, picture(draw.rng, drawn), asked)

    return make


MAKERS = {skill: maker(skill) for skill in QUESTIONS}
