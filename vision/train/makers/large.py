"""Large pictures of small things: what is lost when the whole is shrunk, and is seen in crops.

Owns their sizes, layout and questions. Things stand in cells of three by three, by whose places
they are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from PIL import Image, ImageDraw

from mmserve.vision.train.example import Draw, Example, Turn
from mmserve.vision.train.makers.canvas import Color, background, shade
from mmserve.vision.train.makers.charts import distinct, short_words, small_font
from mmserve.vision.train.makers.emoji import ground, is_thing, pick
from mmserve.vision.train.makers.scenes import PLACES
from mmserve.vision.train.makers.talk import about, read, say

SHAPES = ((4, 3), (16, 9), (1, 1), (3, 4), (2, 1))
LONGER = (560, 800)  # pixels, of a picture's longer side
LETTERS = (18, 26)  # pixels, of a font
EMOJI = (44, 64)
THINGS = (3, 6)
LONGEST = 7  # letters of a word, so that the narrowest cell holds it
MARGIN = 4


def empty(rng: random.Random, color: Color) -> Image.Image:
    wide, high = rng.choice(SHAPES)
    scale = rng.randint(*LONGER) / max(wide, high)
    return Image.new("RGB", (round(wide * scale), round(high * scale)), color)


def corner(
    rng: random.Random, image: Image.Image, cell: int, size: tuple[int, int]
) -> tuple[int, int]:
    """Left and top of a thing of this size, somewhere in a cell and wholly in the picture."""
    row, column = divmod(cell, 3)
    found = []
    for number, side, length in (
        (column, image.width, size[0]),
        (row, image.height, size[1]),
    ):
        low, high = number * side // 3 + MARGIN, (number + 1) * side // 3 - MARGIN - length
        found.append(rng.randint(low, max(low, high)))
    return found[0], found[1]


def cells(rng: random.Random) -> list[int]:
    return rng.sample(range(9), rng.randint(*THINGS))


def text(draw: Draw) -> Example:
    """Words in small letters, each in a colour of its own."""
    rng = draw.rng
    where = cells(rng)
    paper = background(rng)
    image = empty(rng, paper.color)
    words = short_words(draw, len(where), LONGEST)
    colors = distinct(rng, len(where), paper.color)
    pen = ImageDraw.Draw(image)
    for cell, word, color in zip(where, words, colors, strict=True):
        font = small_font(draw, rng.randint(*LETTERS))
        _, _, right, bottom = font.getbbox(word)
        at = corner(rng, image, cell, (round(right), round(bottom)))
        pen.text(at, word, font=font, fill=shade(rng, color))
    found = {
        "small_text": [
            read(f"What is written {placed(cell)}?", word)
            for cell, word in zip(where, words, strict=True)
        ],
        "ink": [
            say(rng, [f"What color is the word {word}?"], color)
            for word, color in zip(words, colors, strict=True)
        ],
        "where": [
            say(rng, [f"Where is the word {word}?"], placed(cell))
            for cell, word in zip(where, words, strict=True)
        ],
        "total": total("words", where),
    }
    return about(draw, "small_text", image, found)


def emoji(draw: Draw) -> Example:
    """Small emoji far from each other."""
    rng = draw.rng
    where = cells(rng)
    image = empty(rng, ground(draw))
    names = []
    for cell in where:
        one, vendor = pick(draw, is_thing)
        side = rng.randint(*EMOJI)
        tile = draw.assets.emoji_picture(vendor, one.index)
        tile = tile.resize((side, side), Image.Resampling.BICUBIC)
        image.paste(tile, corner(rng, image, cell, tile.size), tile)
        names.append(one.name)
    found = {
        "small_emoji": [
            Turn(f"Which emoji is {placed(cell)}?", name)
            for cell, name in zip(where, names, strict=True)
        ],
        "total": total("emoji", where),
    }
    return about(draw, "small_emoji", image, found)


def placed(cell: int) -> str:
    """Where a cell is, as part of a sentence."""
    return f"at the {PLACES[cell]}"


def total(things: str, where: Sequence[int]) -> list[Turn]:
    return [Turn(f"How many {things} are there?", f"{len(where)}.")]


MAKERS = {"small_text": text, "small_emoji": emoji}
