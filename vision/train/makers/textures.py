"""Patterns in two colours: plain, gradients, stripes, checkerboards, dots, noise.

Owns what each looks like; a pattern fills the picture and has no things in it.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmserve.vision.train.example import SIDE, Draw, Example
from mmserve.vision.train.makers.canvas import COLORS, near, shade
from mmserve.vision.train.makers.talk import Maker, about, say

PATTERNS = ("plain", "gradient", "stripes", "checkerboard", "dots", "noise")
BLOCK = 7  # pixels, a side of what noise is made of


def share(rng: random.Random, pattern: str) -> npt.NDArray[np.float32]:
    """How much of the second colour each pixel has, [SIDE, SIDE] from 0 to 1."""
    y, x = np.mgrid[:SIDE, :SIDE]
    found: npt.NDArray[Any]
    turn, period = rng.uniform(0, math.pi), rng.randint(16, 48)
    along = x * math.cos(turn) + y * math.sin(turn)
    if pattern == "plain":
        found = np.zeros_like(x)
    elif pattern == "gradient":
        found = (along - along.min()) / (along.max() - along.min())
    elif pattern == "stripes":
        found = along // period % 2
    elif pattern == "checkerboard":
        found = (x // period + y // period) % 2
    elif pattern == "dots":
        middle = (x % (2 * period) - period) ** 2 + (y % (2 * period) - period) ** 2
        found = middle < (0.6 * period) ** 2
    else:
        blocks = np.random.default_rng(rng.getrandbits(32)).random((SIDE // BLOCK, SIDE // BLOCK))
        found = blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)
    return np.asarray(found, np.float32)


def texture(draw: Draw) -> Example:
    rng = draw.rng
    one = rng.choice(list(COLORS))
    two = rng.choice([c for c in COLORS if not near(COLORS[c], COLORS[one])])
    pattern = rng.choice(PATTERNS)
    a, b = (np.array(shade(rng, c), np.float32) for c in (one, two))
    mixed = a + (b - a) * share(rng, pattern)[..., None]
    ask = ["What pattern is this?", "What kind of pattern do you see?"]
    both = f"{min(one, two)} and {max(one, two)}"
    facts = {"texture": [say(rng, ask, pattern)]}
    if pattern == "plain":
        facts["colors"] = [say(rng, ["What color is the image?"], one)]
    else:
        facts["colors"] = [say(rng, ["Which two colors do you see?"], both)]
    return about(draw, "texture", Image.fromarray(mixed.astype(np.uint8)), facts)


MAKERS: dict[str, Maker] = {"texture": texture}
