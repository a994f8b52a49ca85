"""Colours, backgrounds and shapes: what scenes, charts and screens are drawn with.

Owns the names of colours and shapes and how each looks. Knows nothing of questions. Drawn at twice
the size and halved, so that edges are smooth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from PIL import Image, ImageDraw

from mmserve.vision.train.example import SIDE

Color = tuple[int, int, int]
Point = tuple[float, float]

DETAIL = 2  # pixels drawn for each that is kept, along each side

COLORS: dict[str, Color] = {
    "red": (222, 32, 32),
    "green": (34, 160, 56),
    "blue": (32, 72, 222),
    "yellow": (246, 220, 40),
    "orange": (250, 138, 18),
    "purple": (132, 42, 168),
    "pink": (250, 132, 190),
    "brown": (130, 80, 42),
    "black": (18, 18, 18),
    "white": (250, 250, 250),
    "gray": (128, 128, 128),
    "teal": (0, 142, 142),
}
SHAPES = (
    *("circle", "square", "rectangle", "triangle", "star", "diamond"),
    *("pentagon", "hexagon", "heart", "cross", "ring", "oval"),
)
# Polygons on a circle: corners, and the share of the radius at which the corners between lie.
CORNERS = {"triangle": (3, None), "star": (5, 0.42), "pentagon": (5, None), "hexagon": (6, None)}
NEAR = 95  # a colour closer than this, in RGB, is hard to tell from another
SHADE = 16  # how far a named colour strays, a channel


@dataclass(frozen=True)
class Background:
    """A colour to draw on; the name is None for a tint that has none."""

    name: str | None
    color: Color


def shade(rng: random.Random, name: str, by: int = SHADE) -> Color:
    """A colour that goes by this name."""
    red, green, blue = (max(0, min(255, c + rng.randint(-by, by))) for c in COLORS[name])
    return red, green, blue


def near(a: Color, b: Color) -> bool:
    return math.dist(a, b) <= NEAR


def background(
    rng: random.Random, avoid: Collection[str] = (), *, named: bool = False
) -> Background:
    """A background that no colour of `avoid` is lost on; white is the most frequent."""
    while True:
        if not named and rng.random() < 0.25:
            tint = (rng.randint(200, 255), rng.randint(200, 255), rng.randint(200, 255))
            found = Background(None, tint)
        else:
            white = rng.random() < (0.2 if named else 0.4)
            name = "white" if white else rng.choice(list(COLORS))
            found = Background(name, shade(rng, name, 8))
        if found.name not in avoid and not any(near(found.color, COLORS[a]) for a in avoid):
            return found


def canvas(color: Color) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty picture, larger than it will be; `finish` makes it the size it has."""
    image = Image.new("RGB", (SIDE * DETAIL, SIDE * DETAIL), color)
    return image, ImageDraw.Draw(image)


def finish(image: Image.Image) -> Image.Image:
    return cast(Image.Image, image.reduce(DETAIL))


def star(
    x: float, y: float, r: float, corners: int, turn: float, inner: float | None
) -> list[Point]:
    """Corners of a regular polygon, or of a star where `inner` says how deep its notches are."""
    count = corners * (2 if inner else 1)
    points = []
    for i in range(count):
        reach = r * inner if inner and i % 2 else r
        angle = 2 * math.pi * i / count + turn
        points.append((x + reach * math.sin(angle), y - reach * math.cos(angle)))
    return points


def draw_shape(
    draw: ImageDraw.ImageDraw,
    rng: random.Random,
    kind: str,
    x: float,
    y: float,
    r: float,
    fill: Color,
) -> None:
    """A shape around (x, y) that stays within about r pixels of it; chance turns it a little."""
    turn = rng.uniform(-0.2, 0.2)
    if kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif kind == "oval":
        draw.ellipse((x - r, y - 0.58 * r, x + r, y + 0.58 * r), fill=fill)
    elif kind == "ring":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=fill, width=max(3, int(0.36 * r)))
    elif kind == "square":
        draw.polygon(star(x, y, 1.15 * r, 4, math.pi / 4 + 0.6 * turn, None), fill=fill)
    elif kind == "diamond":
        draw.polygon([(x, y - r), (x + 0.72 * r, y), (x, y + r), (x - 0.72 * r, y)], fill=fill)
    elif kind == "rectangle":
        short = r * rng.uniform(0.45, 0.6)
        a, b = (r, short) if rng.random() < 0.6 else (short, r)
        draw.rectangle((x - a, y - b, x + a, y + b), fill=fill)
    elif kind == "cross":
        w = 0.32 * r
        draw.rectangle((x - r, y - w, x + r, y + w), fill=fill)
        draw.rectangle((x - w, y - r, x + w, y + r), fill=fill)
    elif kind == "heart":
        top, lobe = y - 0.85 * r, 1.1 * r
        draw.ellipse((x - r, top, x - r + lobe, top + lobe), fill=fill)
        draw.ellipse((x + r - lobe, top, x + r, top + lobe), fill=fill)
        sides = [(x - 0.93 * r, y - 0.08 * r), (x, y - 0.35 * r), (x + 0.93 * r, y - 0.08 * r)]
        draw.polygon([*sides, (x, y + r)], fill=fill)
    else:
        corners, inner = CORNERS[kind]
        turn += math.pi / 6 if kind == "hexagon" else 0
        draw.polygon(star(x, y, 1.1 * r, corners, turn, inner), fill=fill)
