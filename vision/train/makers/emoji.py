"""Emoji and flags: what each is called, in English and in Chinese, and where one of several is.

Owns how they are laid out. Names are CLDR's; held-out pictures come from a vendor that training
never sees.
"""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from mmserve.vision.train.assets import NamedEmoji
from mmserve.vision.train.example import SIDE, Draw, Example, Turn
from mmserve.vision.train.makers.canvas import Color
from mmserve.vision.train.makers.talk import Maker, about, say, yes_or_no

NAME = ("What is this?", "Which emoji is this?", "What emoji is shown?", "Name this emoji.")
NAME_IN_CHINESE = ("这是什么？", "这是什么表情符号？", "用中文说出这个表情的名字。")
FLAG = ("Which flag is this?", "Whose flag is shown?", "What is this?")
# Territories that fly another land's flag: which of the two is shown cannot be told.
SAME_FLAG = {
    *("U.S. Outlying Islands", "Svalbard & Jan Mayen", "Bouvet Island", "St. Martin"),
    *("Clipperton Island", "Heard & McDonald Islands", "Ceuta & Melilla", "Diego Garcia"),
}
PLACES = {2: ("left", "right"), 4: ("top left", "top right", "bottom left", "bottom right")}


def ground(draw: Draw) -> Color:
    rng = draw.rng
    low = rng.choice((255, 255, 255, 150, 0))
    return rng.randint(low, 255), rng.randint(low, 255), rng.randint(low, 255)


def pick(draw: Draw, wanted: Callable[[NamedEmoji], bool]) -> tuple[NamedEmoji, str]:
    """An emoji, and a vendor of this split who has drawn it; each emoji is as likely."""
    emoji = draw.assets.emoji
    while True:
        one = draw.rng.choice(emoji)
        vendors = [v for v in draw.assets.vendors(draw.split) if drawn(draw, v, one)]
        if vendors and wanted(one):
            return one, draw.rng.choice(vendors)


def drawn(draw: Draw, vendor: str, emoji: NamedEmoji) -> bool:
    return emoji.index in draw.assets.drawn_by(vendor)


def place(draw: Draw, image: Image.Image, emoji: NamedEmoji, vendor: str, size: int) -> None:
    """Somewhere in the image, a little wider or higher than it was drawn."""
    rng = draw.rng
    tile = draw.assets.emoji_picture(vendor, emoji.index)
    height = int(size * rng.uniform(0.94, 1.06))
    tile = tile.resize((size, height), Image.Resampling.BICUBIC)
    x, y = (rng.randint(0, max(0, side)) for side in (image.width - size, image.height - height))
    image.paste(tile, (x, y), tile)


def alone(draw: Draw, emoji: NamedEmoji, vendor: str) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), ground(draw))
    place(draw, image, emoji, vendor, draw.rng.randint(120, 210))
    return image


def facts(draw: Draw, skill: str, emoji: NamedEmoji) -> dict[str, list[Turn]]:
    rng = draw.rng
    other = rng.choice(draw.assets.emoji).name
    guess = rng.choice((emoji.name, other))
    ask = FLAG if skill == "flag" else NAME
    land = emoji.name.removeprefix("flag of ")
    named = Turn(rng.choice(ask), emoji.name, accepted=(land,) if skill == "flag" else ())
    return {
        skill: [Turn(rng.choice(NAME_IN_CHINESE), emoji.chinese)]
        if skill == "emoji_chinese"
        else [named],
        "described": [Turn("Describe the image.", f"An emoji: {emoji.name}.")],
        "guess": [Turn(f'Is this the emoji "{guess}"?', yes_or_no(guess == emoji.name))],
        "group": [say(rng, ["What kind of emoji is this?"], emoji.kind)],
    }


def maker(skill: str, wanted: Callable[[NamedEmoji], bool]) -> Maker:
    def make(draw: Draw) -> Example:
        emoji, vendor = pick(draw, wanted)
        return about(draw, skill, alone(draw, emoji, vendor), facts(draw, skill, emoji))

    return make


def among(draw: Draw) -> Example:
    """Two or four emoji, of which one is asked for by its place."""
    rng = draw.rng
    count = rng.choice((2, 4))
    color = ground(draw)
    image = Image.new("RGB", (SIDE, SIDE), color)
    chosen = [pick(draw, is_thing) for _ in range(count)]
    half = SIDE // 2
    for i, (emoji, vendor) in enumerate(chosen):
        part = Image.new("RGB", (half, half), color)
        place(draw, part, emoji, vendor, rng.randint(84, 104))
        image.paste(part, (i % 2 * half, half // 2 if count == 2 else i // 2 * half))
    asked = rng.randrange(count)
    where = PLACES[count][asked]
    names = [emoji.name for emoji, _ in chosen]
    ask = (f"Which emoji is at the {where}?", f"What is at the {where}?")
    number = "Two" if count == 2 else "Four"
    found = {
        "emoji_at": [Turn(rng.choice(ask), names[asked])],
        "described": [Turn("Describe the image.", f"{number} emoji: {', '.join(names)}.")],
        "total": [Turn("How many emoji are there?", f"{count}.")],
    }
    return about(draw, "emoji_at", image, found)


def is_flag(emoji: NamedEmoji) -> bool:
    return emoji.kind == "flag" and emoji.name.removeprefix("flag of ") not in SAME_FLAG


def is_thing(emoji: NamedEmoji) -> bool:
    return emoji.kind != "flag"


MAKERS: dict[str, Maker] = {
    "emoji": maker("emoji", is_thing),
    "emoji_chinese": maker("emoji_chinese", is_thing),
    "flag": maker("flag", is_flag),
    "emoji_at": among,
}
