"""Pictures to ask about, drawn on the spot: coloured shapes, digits and words.

Owns the drawing. A picture is a function of its number.
"""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw

SIZE = 224  # pixels a side
PICTURES = 1024  # that are written about: those of the first numbers
_COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
    "grey": (128, 128, 128),
    "brown": (130, 80, 40),
    "teal": (30, 150, 150),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "pink": (245, 150, 190),
}
_WORDS = ("STOP", "HELLO", "OPEN", "SALE", "EXIT", "CAT", "TEA", "NO", "YES", "42", "7", "2026")


def picture(number: int) -> bytes:
    """A PNG file of one to five shapes, or of a word."""
    draw = random.Random(number)
    ground, *colours = draw.sample(list(_COLOURS.values()), 6)
    image = Image.new("RGB", (SIZE, SIZE), ground)
    canvas = ImageDraw.Draw(image)
    if draw.random() < 0.2:
        canvas.text((20, 80), draw.choice(_WORDS), fill=colours[0], font_size=draw.randint(36, 64))
    else:
        for colour in colours[: draw.choice((1, 1, 1, 2, 2, 3, 4, 5))]:
            _shape(canvas, draw, colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _shape(canvas: ImageDraw.ImageDraw, draw: random.Random, colour: tuple[int, int, int]) -> None:
    size = draw.randint(40, 90)
    x, y = (draw.randint(size // 2, SIZE - size // 2) for _ in range(2))
    box = (x - size // 2, y - size // 2, x + size // 2, y + size // 2)
    kind = draw.choice(("circle", "rectangle", "triangle"))
    if kind == "circle":
        canvas.ellipse(box, fill=colour)
    elif kind == "rectangle":
        canvas.rectangle(box, fill=colour)
    else:
        canvas.polygon([(box[0], box[3]), (box[2], box[3]), (x, box[1])], fill=colour)
