"""Fonts, words, emoji and pictures that makers draw with, read from one archive.

Owns what in it is held out: words by their hash, fonts, photographs and an emoji vendor by name,
digits by their place. Knows nothing of skills. `mmserve train --fetch` makes the archive; it needs
no network afterwards.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFont

from mmserve.vision.train import sources

HELD_OUT_HASHES = 20  # of 256: the share of words, and of strings of Chinese characters
HELD_OUT_DIGITS = 0.15  # of each handwritten digit's samples, the last ones
TILE = 64  # pixels, of an emoji in its sheet
ACROSS = 48  # emoji side by side in a sheet
DIGIT = 28  # pixels, a side of a handwritten digit


class AssetsMissingError(ValueError):
    """There is no archive of fonts and pictures to draw with."""


class Split(Enum):
    """What an example is for. Held-out ones share no word, font or emoji vendor with others."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class NamedEmoji:
    """An emoji's place in every sheet, and its names."""

    index: int
    name: str
    chinese: str
    kind: str


def is_held_out(text: str) -> bool:
    """Whether a word, or a string of characters, is kept from training; the same everywhere."""
    return hashlib.md5(text.encode(), usedforsecurity=False).digest()[0] < HELD_OUT_HASHES


class Assets:
    """The archive at `path`; parts are read when a maker first needs them, and then kept."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise AssetsMissingError(
                f"{path} is missing: `mmserve train --fetch` makes it from free packages."
            )
        self.path = path
        self._fonts: dict[tuple[str, int], ImageFont.FreeTypeFont] = {}
        self._sheets: dict[str, Image.Image] = {}

    def __reduce__(self) -> tuple[type[Assets], tuple[Path]]:
        return Assets, (self.path,)  # another process reads for itself

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        # In memory: processes that fork share the place in an open file, and would read nonsense.
        return zipfile.ZipFile(io.BytesIO(self.path.read_bytes()))

    def _json(self, name: str) -> Any:
        return json.loads(self._archive.read(name))

    @cached_property
    def _words(self) -> dict[Split, list[str]]:
        found: dict[Split, list[str]] = {split: [] for split in Split}
        for word in self._json("words.json")["words"]:
            found[Split.HELD_OUT if is_held_out(word) else Split.TRAIN].append(word)
        return found

    def words(self, split: Split) -> list[str]:
        """English words of 3 to 10 letters in lower case."""
        return self._words[split]

    @cached_property
    def characters(self) -> str:
        """Chinese characters, the most common first; single ones are never held out."""
        return str(self._json("words.json")["characters"])

    @cached_property
    def _faces(self) -> dict[tuple[str, Split], list[str]]:
        held = (*sources.LATIN_HELD_OUT, *sources.CHINESE_HELD_OUT)
        found = defaultdict(list)
        for name in self._archive.namelist():
            if name.startswith("fonts/"):
                _, script, file = name.split("/")
                split = Split.HELD_OUT if file.rpartition("-")[0] in held else Split.TRAIN
                found[script, split].append(name)
        return found

    def fonts(self, split: Split, script: str = "latin") -> list[str]:
        """Names of fonts, for `font`; scripts are latin and chinese."""
        return self._faces[script, split]

    def font(self, name: str, size: int) -> ImageFont.FreeTypeFont:
        if (name, size) not in self._fonts:
            # Basic layout: one letter after another, which is all that words need, and quicker.
            self._fonts[name, size] = ImageFont.truetype(
                io.BytesIO(self._archive.read(name)), size, layout_engine=ImageFont.Layout.BASIC
            )
        return self._fonts[name, size]

    @cached_property
    def emoji(self) -> list[NamedEmoji]:
        listed = self._json("emoji.json")["emoji"]
        return [NamedEmoji(i, e["name"], e["zh"], e["kind"]) for i, e in enumerate(listed)]

    @cached_property
    def _drawn(self) -> dict[str, frozenset[int]]:
        return {name: frozenset(have) for name, have in self._json("emoji.json")["have"].items()}

    def vendors(self, split: Split) -> tuple[str, ...]:
        return sources.VENDORS if split is Split.TRAIN else (sources.VENDOR_HELD_OUT,)

    def drawn_by(self, vendor: str) -> frozenset[int]:
        """Which emoji a vendor has a picture of."""
        return self._drawn[vendor]

    def emoji_picture(self, vendor: str, index: int) -> Image.Image:
        """RGBA [TILE, TILE]."""
        if vendor not in self._sheets:
            sheet = Image.open(io.BytesIO(self._archive.read(f"emoji/{vendor}.webp")))
            self._sheets[vendor] = sheet.convert("RGBA")
        x, y = index % ACROSS * TILE, index // ACROSS * TILE
        return self._sheets[vendor].crop((x, y, x + TILE, y + TILE))

    @cached_property
    def _digits(self) -> dict[int, list[Image.Image]]:
        found = {}
        for digit, samples in self._json("digits.json").items():
            pixels = [np.frombuffer(bytes.fromhex(s), np.uint8) for s in samples]
            found[int(digit)] = [Image.fromarray(p.reshape(DIGIT, DIGIT)) for p in pixels]
        return found

    def digits(self, split: Split, digit: int) -> list[Image.Image]:
        """Handwritten samples of one digit: white on black, "L" [DIGIT, DIGIT]."""
        samples = self._digits[digit]
        cut = int(len(samples) * (1 - HELD_OUT_DIGITS))
        return samples[:cut] if split is Split.TRAIN else samples[cut:]

    @cached_property
    def _photos(self) -> dict[Split, list[Image.Image]]:
        found: dict[Split, list[Image.Image]] = {split: [] for split in Split}
        for name, held_out in sources.PHOTOS.items():
            data = self._archive.read(f"photos/{Path(name).stem}.webp")
            split = Split.HELD_OUT if held_out else Split.TRAIN
            found[split].append(Image.open(io.BytesIO(data)).convert("RGB"))
        return found

    def photos(self, split: Split) -> list[Image.Image]:
        """Photographs of things that the model is told nothing of."""
        return self._photos[split]

    @cached_property
    def _questions(self) -> dict[Split, list[tuple[int, list[tuple[str, str]]]]]:
        found = {}
        for split, folder in ((Split.TRAIN, "train"), (Split.HELD_OUT, "test")):
            by_image = defaultdict(list)
            for question, answer, image in self._json(f"easy_vqa/{folder}/questions.json"):
                by_image[image].append((question, answer))
            found[split] = sorted(by_image.items())
        return found

    def easy_vqa(self, split: Split) -> list[tuple[int, list[tuple[str, str]]]]:
        """The number of each image with all questions about it and their answers."""
        return self._questions[split]

    def easy_vqa_image(self, split: Split, image: int) -> Image.Image:
        folder = "train" if split is Split.TRAIN else "test"
        data = self._archive.read(f"easy_vqa/{folder}/images/{image}.png")
        return Image.open(io.BytesIO(data)).convert("RGB")
