"""Bar charts, clocks, grids and tables: numbers and letters that stand for something by place.

Owns their layout and questions. A value is a whole number, so that a chart can be read exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from mmserve.vision.train.example import SIDE, Draw, Example, Turn
from mmserve.vision.train.makers.canvas import COLORS, DETAIL, Color, canvas, finish, near, shade
from mmserve.vision.train.makers.talk import Maker, about, read, say

INK: Color = (40, 40, 40)
PAPER: Color = (255, 255, 255)
TOP_VALUE = 9  # of a bar
LEFT, RIGHT, TOP, BASE = 26, 216, 16, 190  # pixels, of a chart's frame
LABELS = (14, 19)  # pixels, of a chart's labels
CELL = (SIDE - 16) // 2  # of a table, across
ORDER = ("first", "second", "third", "fourth")


def short_words(draw: Draw, count: int, most: int) -> list[str]:
    """Different words of at most `most` letters, as labels are."""
    found: dict[str, None] = {}
    while len(found) < count:
        word = draw.rng.choice(draw.assets.words(draw.split))
        if len(word) <= most:
            found.setdefault(word.title())
    return list(found)


def small_font(draw: Draw, size: int) -> ImageFont.FreeTypeFont:
    return draw.assets.font(draw.rng.choice(draw.assets.fonts(draw.split)), size)


def label_font(draw: Draw, labels: Sequence[str], room: float) -> ImageFont.FreeTypeFont:
    """As large as lets each label stand under its bar."""
    name = draw.rng.choice(draw.assets.fonts(draw.split))
    sizes = [draw.assets.font(name, size) for size in range(*LABELS)]
    fits = [font for font in sizes if max(map(font.getlength, labels)) <= room]
    return fits[-1] if fits else sizes[0]


def distinct(rng: random.Random, count: int, ground: Color) -> list[str]:
    """Names of colours that can be told apart on the ground."""
    return rng.sample([c for c in COLORS if not near(COLORS[c], ground)], count)


@dataclass(frozen=True)
class Bar:
    label: str
    color: str
    value: int


def bars(draw: Draw) -> tuple[Bar, ...]:
    rng = draw.rng
    count = rng.randint(3, 5)
    if rng.random() < 0.5:
        labels = short_words(draw, count, 4)
    else:
        labels = list("ABCDE"[:count])
    colors = distinct(rng, count, PAPER)
    if rng.random() < 0.3:
        colors = [colors[0]] * count
    values = rng.sample(range(1, TOP_VALUE + 1), count)
    return tuple(Bar(*parts) for parts in zip(labels, colors, values, strict=True))


def chart_picture(draw: Draw, shown: tuple[Bar, ...]) -> Image.Image:
    """Bars over their labels, beside a scale; in some charts each value stands over its bar."""
    rng = draw.rng
    image = Image.new("RGB", (SIDE, SIDE), PAPER)
    pen = ImageDraw.Draw(image)
    step = (RIGHT - LEFT) / len(shown)
    font = label_font(draw, [bar.label for bar in shown], step - 4)
    unit = (BASE - TOP) / (TOP_VALUE + 0.5)
    for value in range(TOP_VALUE + 1):
        y = BASE - value * unit
        pen.line((LEFT, y, RIGHT, y), fill=(222, 222, 222) if value else INK)
        pen.text((LEFT - 5, y), str(value), font=font, fill=INK, anchor="rm")
    width = step * rng.uniform(0.5, 0.75)
    written = rng.random() < 0.4
    for i, bar in enumerate(shown):
        x, y = LEFT + step * (i + 0.5), BASE - bar.value * unit
        pen.rectangle((x - width / 2, y, x + width / 2, BASE), fill=shade(rng, bar.color))
        pen.text((x, BASE + 5), bar.label, font=font, fill=INK, anchor="mt")
        if written:
            pen.text((x, y - 2), str(bar.value), font=font, fill=INK, anchor="mb")
    return image


def bar_chart(draw: Draw) -> Example:
    rng = draw.rng
    shown = bars(draw)
    most, least = max(shown, key=lambda b: b.value), min(shown, key=lambda b: b.value)
    asked = rng.choice(shown)
    turns = [
        read(rng.choice(("Which bar is the tallest?", "Which bar is the highest?")), most.label),
        read("Which bar is the shortest?", least.label),
        *(say(rng, [f"What is the value of {b.label}?"], str(b.value)) for b in (asked, most)),
        say(rng, ["How many bars are there?"], str(len(shown))),
    ]
    if shown[0].color != shown[1].color:
        turns.append(say(rng, [f"What color is the bar {asked.label}?"], asked.color))
        ask = f"What is the value of the {asked.color} bar?"
        turns.append(say(rng, [ask], str(asked.value)))
    return about(draw, "bar_chart", chart_picture(draw, shown), {"bar_chart": turns})


def clock(draw: Draw) -> Example:
    """An analogue clock, to five minutes."""
    rng = draw.rng
    hour, minute = rng.randint(1, 12), rng.randrange(0, 60, 5)
    image = clock_picture(draw, hour, minute)
    ask = ["What time is it?", "What time does the clock show?", "Read the clock."]
    return about(draw, "clock", image, {"clock": [say(rng, ask, f"{hour}:{minute:02d}")]})


def clock_picture(draw: Draw, hour: int, minute: int) -> Image.Image:
    rng = draw.rng
    ground = shade(rng, rng.choice(list(COLORS)))
    image, pen = canvas(ground)
    middle, r = SIDE * DETAIL / 2, rng.uniform(75, 105) * DETAIL
    box = (middle - r, middle - r, middle + r, middle + r)
    pen.ellipse(box, fill=PAPER, outline=INK, width=3 * DETAIL)
    font = small_font(draw, int(r / 6))
    numbers = rng.random() < 0.75

    def at(turn: float, reach: float) -> tuple[float, float]:
        angle = 2 * math.pi * turn
        return middle + r * reach * math.sin(angle), middle - r * reach * math.cos(angle)

    for i in range(12):
        pen.line((at(i / 12, 0.9), at(i / 12, 0.98)), fill=INK, width=2 * DETAIL)
        if numbers:
            pen.text(at(i / 12, 0.78), str(i or 12), font=font, fill=INK, anchor="mm")
    hand = rng.choice((INK, COLORS["red"], COLORS["blue"]))
    pen.line(((middle, middle), at(hour / 12 + minute / 720, 0.48)), fill=INK, width=7 * DETAIL)
    pen.line(((middle, middle), at(minute / 60, 0.86)), fill=hand, width=3 * DETAIL)
    pen.ellipse((middle - 10, middle - 10, middle + 10, middle + 10), fill=INK)
    return finish(image)


def grid(draw: Draw) -> Example:
    """Coloured cells, or letters, in rows and columns that are counted from the top left."""
    rng = draw.rng
    size = rng.randint(2, 4)
    cell = (SIDE - 16) / size
    image = Image.new("RGB", (SIDE, SIDE), PAPER)
    pen = ImageDraw.Draw(image)
    lettered = rng.random() < 0.4
    font = small_font(draw, int(cell * 0.55))
    palette = distinct(rng, rng.randint(2, 5), PAPER)
    cells: list[list[str]] = []
    for row in range(size):
        cells.append([])
        for column in range(size):
            x, y = 8 + column * cell, 8 + row * cell
            what = rng.choice("ABCDEFGHJKLMNPRSTUVXYZ") if lettered else rng.choice(palette)
            cells[-1].append(what)
            fill = PAPER if lettered else shade(rng, what)
            pen.rectangle((x, y, x + cell, y + cell), fill=fill, outline=INK, width=2)
            if lettered:
                pen.text((x + cell / 2, y + cell / 2), what, font=font, fill=INK, anchor="mm")
    return about(draw, "grid", image, {"grid": grid_questions(rng, cells, lettered)})


def grid_questions(rng: random.Random, cells: list[list[str]], lettered: bool) -> list[Turn]:
    row, column = rng.randrange(len(cells)), rng.randrange(len(cells))
    what = cells[row][column]
    kind = "letter" if lettered else "color"
    ask = [
        f"Which {kind} is in row {row + 1}, column {column + 1}?",
        f"What {kind} is in the {ORDER[row]} row and the {ORDER[column]} column?",
    ]
    turns = [say(rng, ask, what)]
    if not lettered:
        times = sum(line.count(what) for line in cells)
        turns.append(say(rng, [f"How many cells are {what}?"], str(times)))
    return turns


def table(draw: Draw) -> Example:
    """A table of names and numbers, or of names and colours, under a head."""
    rng = draw.rng
    rows = rng.randint(2, 4)
    head, *names = short_words(draw, rows + 1, 6)
    numbers = rng.random() < 0.6
    values = [
        str(rng.randrange(1000)) if numbers else rng.choice(list(COLORS)) for _ in range(rows)
    ]
    lines = [(head, "Number" if numbers else "Color"), *zip(names, values, strict=True)]
    asked = rng.randrange(rows)
    name, value = names[asked], values[asked]
    kind = "number" if numbers else "color"
    turns = [read(f"What is the {kind} of {name}?", value)]
    if values.count(value) == 1:
        turns.append(read(f"Which row has the {kind} {value}?", name))
    turns.append(say(rng, ["How many rows are there below the head?"], str(rows)))
    return about(draw, "table", table_picture(draw, lines), {"table": turns})


def table_picture(draw: Draw, lines: list[tuple[str, str]]) -> Image.Image:
    rng = draw.rng
    image = Image.new("RGB", (SIDE, SIDE), PAPER)
    pen = ImageDraw.Draw(image)
    font = small_font(draw, rng.randint(17, 21))
    high = rng.uniform(32, (SIDE - 16) / len(lines))
    tint = shade(rng, rng.choice(("white", "yellow", "pink", "gray")))
    for i, cells in enumerate(lines):
        y = 8 + i * high
        for j, text in enumerate(cells):
            x = 8 + j * CELL
            fill = tint if i == 0 else PAPER
            pen.rectangle((x, y, x + CELL, y + high), fill=fill, outline=INK)
            pen.text((x + 8, y + high / 2), text, font=font, fill=INK, anchor="lm")
    return image


MAKERS: dict[str, Maker] = {"bar_chart": bar_chart, "clock": clock, "grid": grid, "table": table}
