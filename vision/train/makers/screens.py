"""Screens as programs show them: a window with a title, buttons, boxes to tick and a field.

Owns their layout and questions. Words on them are read, so they are spelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image, ImageDraw

from mmserve.vision.train.example import SIDE, Draw, Example, Turn
from mmserve.vision.train.makers.canvas import COLORS, Color, shade
from mmserve.vision.train.makers.charts import distinct, short_words, small_font
from mmserve.vision.train.makers.talk import Maker, about, read, say, yes_or_no

LIGHT: tuple[Color, Color] = ((250, 250, 250), (30, 30, 30))  # ground and ink
DARK: tuple[Color, Color] = ((38, 40, 46), (235, 235, 235))


@dataclass(frozen=True)
class Screen:
    """All that is written on a screen, and which boxes are ticked."""

    title: str
    field: str
    boxes: tuple[tuple[str, bool], ...]
    buttons: tuple[tuple[str, str], ...]  # what each says, and its colour


def screen(draw: Draw) -> Example:
    rng = draw.rng
    title, field, *rest = short_words(draw, 6, 7)
    boxes = tuple((word, rng.random() < 0.5) for word in rest[:2])
    ground, ink = rng.choice((LIGHT, LIGHT, DARK))
    colors = distinct(rng, 2, ground)
    buttons = tuple(zip(rest[2:], colors, strict=True))
    shown = Screen(title, field, boxes, buttons)
    return about(draw, "screen", picture(draw, shown, ground, ink), {"screen": facts(draw, shown)})


def facts(draw: Draw, shown: Screen) -> list[Turn]:
    rng = draw.rng
    turns = [
        read("What is the title of the window?", shown.title),
        read("What is written in the field?", shown.field),
        say(rng, ["How many buttons are there?"], str(len(shown.buttons))),
    ]
    for word, ticked in shown.boxes:
        turns.append(say(rng, [f"Is the box {word} checked?"], yes_or_no(ticked)))
    for word, color in shown.buttons:
        turns.append(read(f"What does the {color} button say?", word))
        turns.append(say(rng, [f"What color is the button {word}?"], color))
    return turns


def picture(draw: Draw, shown: Screen, ground: Color, ink: Color) -> Image.Image:
    rng = draw.rng
    image = Image.new("RGB", (SIDE, SIDE), ground)
    pen = ImageDraw.Draw(image)
    font = small_font(draw, 19)
    bar = shade(rng, rng.choice(("blue", "gray", "teal", "purple")))
    pen.rectangle((0, 0, SIDE, 32), fill=bar)
    pen.text((10, 16), shown.title, font=font, fill=COLORS["white"], anchor="lm")
    for i, color in enumerate(("red", "yellow", "green")):
        pen.ellipse((164 + 18 * i, 10, 176 + 18 * i, 22), fill=COLORS[color])
    pen.rectangle((10, 46, 212, 78), outline=ink)
    pen.text((18, 62), shown.field, font=font, fill=ink, anchor="lm")
    for i, (word, ticked) in enumerate(shown.boxes):
        y = 92 + 34 * i
        pen.rectangle((12, y, 32, y + 20), outline=ink, width=2)
        if ticked:
            pen.line(((16, y + 10), (21, y + 16), (29, y + 4)), fill=ink, width=3)
        pen.text((42, y + 10), word, font=font, fill=ink, anchor="lm")
    for i, (word, color) in enumerate(shown.buttons):
        x = 10 + 106 * i
        pen.rounded_rectangle((x, 170, x + 98, 206), 6, fill=COLORS[color])
        light = sum(COLORS[color]) < 3 * 140
        fill = COLORS["white" if light else "black"]
        pen.text((x + 49, 188), word, font=font, fill=fill, anchor="mm")
    return image


MAKERS: dict[str, Maker] = {"screen": screen}
