"""Printed text: words, numbers, codes, pairs of words, and Chinese characters, in many fonts.

Owns what is written and how it is laid out. The answer is the text itself, spelled a character a
token, so that no word need be known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from mmserve.vision.train.assets import Assets, is_held_out
from mmserve.vision.train.example import SIDE, Draw, Example, Turn
from mmserve.vision.train.makers.canvas import COLORS, Background, background, shade
from mmserve.vision.train.makers.talk import Maker, about, read, say

SMALLEST = 14  # pixels, of a font
MARGIN = 6
CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # without those that look like another
MADE_UP = 0.2  # share of training words that are none: letters must be read, not guessed
KINDS = {"word": "word", "number": "number", "code": "code", "word_pair": "text"}


@dataclass(frozen=True)
class Written:
    """Lines as they stand in a picture, in which colours, on what."""

    lines: tuple[str, ...]
    color: str
    ground: Background

    @property
    def text(self) -> str:
        return " ".join(self.lines)


def word(draw: Draw) -> str:
    rng = draw.rng
    if not draw.held_out and rng.random() < MADE_UP:
        return cased(rng, made_up(rng))
    return cased(rng, rng.choice(draw.assets.words(draw.split)))


def made_up(rng: random.Random) -> str:
    """Letters that are no word of those kept for later."""
    while True:
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))
        if not is_held_out(text):
            return text


def cased(rng: random.Random, text: str) -> str:
    return rng.choice((text, text, text.title(), text.upper()))


def number(rng: random.Random) -> str:
    if rng.random() < 0.85:
        return str(rng.randrange(10 ** rng.randint(1, 6)))
    return rng.choice(
        (
            f"{rng.randrange(100)}.{rng.randrange(100):02d}",
            f"{rng.randrange(101)}%",
            f"${rng.randint(1, 999)}",
            f"{rng.randrange(24)}:{rng.randrange(60):02d}",
        )
    )


def lines(draw: Draw, skill: str) -> tuple[str, ...]:
    rng = draw.rng
    if skill == "word":
        return (word(draw),)
    if skill == "number":
        return (number(rng),)
    if skill == "code":
        return ("".join(rng.choices(CODE_LETTERS, k=rng.randint(2, 6))),)
    second = word(draw) if draw.held_out or rng.random() < 0.75 else str(rng.randrange(1000))
    first = word(draw)
    return (first, second) if rng.random() < 0.67 else (f"{first} {second}",)


def written(rng: random.Random, text: tuple[str, ...]) -> Written:
    color = rng.choice(list(COLORS))
    return Written(text, color, background(rng, (color,)))


def fitted(
    assets: Assets, name: str, size: int, text: tuple[str, ...]
) -> tuple[ImageFont.FreeTypeFont, float, float]:
    """The font, as large as asked or as fits, with the width and height of the text in pixels."""
    while True:
        font = assets.font(name, size)
        width = max(font.getlength(line) for line in text)
        height = sum(font.getmetrics()) * len(text)
        most = SIDE - 2 * MARGIN
        if size <= SMALLEST or (width <= most and height <= most):
            return font, width, height
        size = max(SMALLEST, min(size - 1, int(size * most / max(width, height))))


def picture(draw: Draw, text: Written, script: str = "latin") -> Image.Image:
    rng = draw.rng
    name = rng.choice(draw.assets.fonts(draw.split, script))
    font, width, height = fitted(draw.assets, name, rng.randint(26, 80), text.lines)
    image = Image.new("RGB", (SIDE, SIDE), text.ground.color)
    pen = ImageDraw.Draw(image)
    x = rng.uniform(MARGIN, max(MARGIN, SIDE - MARGIN - width))
    y = rng.uniform(MARGIN / 2, max(MARGIN / 2, SIDE - MARGIN / 2 - height))
    if rng.random() < 0.35:
        x, y = (SIDE - width) / 2, (SIDE - height) / 2
    ink = shade(rng, text.color)
    middle = rng.random() < 0.5
    for i, line in enumerate(text.lines):
        left = x + (width - font.getlength(line)) / 2 if middle else x
        pen.text((left, y + i * sum(font.getmetrics())), line, font=font, fill=ink)
    return image


def reading(rng: random.Random, text: str, what: str) -> Turn:
    ask = ("What does the text say?", "Read the text.", f"What {what} is shown?")
    more = (f"Read the {what}.", "What is written here?", "What does it say?")
    return read(rng.choice((*ask, *more)), text)


def facts(rng: random.Random, skill: str, text: Written) -> dict[str, list[Turn]]:
    what = KINDS[skill]
    on = f" on a {text.ground.name} background" if text.ground.name else ""
    ask = rng.choice(("Describe the image.", "What do you see?"))
    found = {
        skill: [reading(rng, text.text, what)],
        "ink": [say(rng, ["What color is the text?"], text.color)],
        "described": [read(ask, text.text, f'The {what} "', f'" in {text.color}{on}.')],
    }
    if text.ground.name:
        found["ground"] = [say(rng, ["What color is the background?"], text.ground.name)]
    return found


def maker(skill: str) -> Maker:
    def make(draw: Draw) -> Example:
        text = written(draw.rng, lines(draw, skill))
        return about(draw, skill, picture(draw, text), facts(draw.rng, skill, text))

    return make


def chinese(draw: Draw) -> Example:
    """One to four common characters; held out are strings of several, by their hash, and a font."""
    rng = draw.rng
    while True:
        count = rng.randint(1, 4)
        string = "".join(rng.choices(draw.assets.characters, k=count))
        if count == 1 or is_held_out(string) == draw.held_out:
            break
    split_up = count == 4 and rng.random() < 0.4
    text = written(rng, (string[:2], string[2:]) if split_up else (string,))
    ask = ["What Chinese characters are shown?", "Read the Chinese text.", "图中写的是什么字？"]
    turn = read(rng.choice(ask), string)
    image = picture(draw, text, "chinese")
    return about(draw, "chinese", image, {"chinese": [turn], **ink(rng, text)})


def ink(rng: random.Random, text: Written) -> dict[str, list[Turn]]:
    return {"ink": [say(rng, ["What color is the text?"], text.color)]}


MAKERS: dict[str, Maker] = {**{skill: maker(skill) for skill in KINDS}, "chinese": chinese}
