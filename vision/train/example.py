"""One example of what the model learns: pictures, and a conversation about them.

Owns the form in which data makers hand over to the training loop and to the evaluation. Knows no
maker, no model, no tokenizer and no score.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from PIL import Image

from mmserve.vision.train.assets import Assets, Split

__all__ = ("SIDE", "Draw", "Example", "Split", "Turn")

SIDE = 224  # pixels; makers draw for this size, though an image may have another


@dataclass(frozen=True)
class Turn:
    """A question and its answer; the pictures it brings stand before the question."""

    question: str
    answer: str
    shows: tuple[int, ...] = ()  # indices into the example's images; every image is shown once
    accepted: tuple[str, ...] = ()  # other answers that are as right
    spelled: tuple[tuple[int, int], ...] = ()  # [start, end) of the answer: one token a character


@dataclass(frozen=True)
class Example:
    """Pictures in the order shown, and turns. In held-out examples the last turn is scored."""

    skill: str
    images: tuple[Image.Image, ...]  # RGB
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        shown = [i for turn in self.turns for i in turn.shows]
        assert shown == list(range(len(self.images))), f"{self.skill}: images shown are {shown}"
        assert all(image.mode == "RGB" for image in self.images)

    def enlarged(self, longer: int) -> Example:
        """The same with so many pixels on the longer side of each picture."""

        def resized(image: Image.Image) -> Image.Image:
            scale = longer / max(image.size)
            size = round(image.width * scale), round(image.height * scale)
            return image.resize(size, Image.Resampling.BICUBIC)

        return replace(self, images=tuple(map(resized, self.images)))


@dataclass(frozen=True)
class Draw:
    """What a maker draws from: all its chance, whom it draws for, and fonts, words, emoji."""

    rng: random.Random
    split: Split
    assets: Assets

    @property
    def held_out(self) -> bool:
        return self.split is Split.HELD_OUT
