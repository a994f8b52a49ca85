"""Handwritten digits, one or up to three beside each other.

Owns how samples become ink on paper. Held out are samples that training never sees.
"""

from __future__ import annotations

from PIL import Image

from mmserve.vision.train.example import SIDE, Draw, Example
from mmserve.vision.train.makers.canvas import COLORS, background, shade
from mmserve.vision.train.makers.talk import Maker, about, read


def digit(draw: Draw) -> Example:
    rng = draw.rng
    digits = [rng.randrange(10) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    color = rng.choice(list(COLORS))
    ground = background(rng, (color,))
    image = Image.new("RGB", (SIDE, SIDE), ground.color)
    ink = Image.new("RGB", (SIDE, SIDE), shade(rng, color))
    size = rng.randint(60, (210, 104, 70)[len(digits) - 1])
    x = rng.randint(2, SIDE - 2 - size * len(digits))
    y = rng.randint(2, SIDE - 2 - size)
    for i, one in enumerate(digits):
        sample = rng.choice(draw.assets.digits(draw.split, one))
        stroke = sample.resize((size, size), Image.Resampling.BICUBIC)
        image.paste(ink.crop((0, 0, size, size)), (x + i * size, y), stroke)
    text = "".join(map(str, digits))
    ask = (f"Which digit{'s are these' if digits[1:] else ' is this'}?", "Read the handwriting.")
    turn = read(rng.choice((*ask, "What number is written here?")), text)
    return about(draw, "digit", image, {"digit": [turn]})


MAKERS: dict[str, Maker] = {"digit": digit}
