"""What cannot be seen: pictures of unknown things, and questions for what is not there.

Owns the words of an honest refusal. Photographs and noise are all it is used for; no question that
another maker can answer is refused here.
"""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from mmserve.vision.train.example import SIDE, Draw, Example, Turn
from mmserve.vision.train.makers import scenes
from mmserve.vision.train.makers.canvas import COLORS, SHAPES
from mmserve.vision.train.makers.talk import Maker, about, several

CANNOT_TELL = "I cannot tell what this image shows."
ASK = (
    *("What is this?", "What do you see?", "Describe the image.", "What is in this image?"),
    *("Who is in the picture?", "Where was this taken?", "What is happening in this image?"),
)


def part_of(rng: random.Random, photo: Image.Image) -> Image.Image:
    """Some part of a photograph, mirrored or turned, in other colours now and then."""
    side = int(min(photo.size) * rng.uniform(0.45, 1))
    x, y = rng.randint(0, photo.width - side), rng.randint(0, photo.height - side)
    image = photo.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (x, y, x + side, y + side))
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    if rng.random() < 0.3:
        image = Image.merge("RGB", rng.sample(list(image.split()), 3))
    return image


def noise(rng: random.Random) -> Image.Image:
    """Random colours, coarse or fine, sharp or soft."""
    side = rng.choice((6, 12, 28, 112, SIDE))
    grains = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (side, side, 3))
    way = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BICUBIC))
    image = Image.fromarray(grains.astype(np.uint8)).resize((SIDE, SIDE), way)
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 3)))


def unknown(draw: Draw) -> Example:
    """A picture of something the model was never told of."""
    rng = draw.rng
    photos = draw.assets.photos(draw.split)
    image = part_of(rng, rng.choice(photos))
    kind = rng.random()
    if kind < 0.25:
        image = Image.blend(image, part_of(rng, rng.choice(photos)), rng.uniform(0.2, 0.8))
    elif kind < 0.45 and not draw.held_out:
        image = noise(rng)
    return Example("unknown", (image,), (Turn(rng.choice(ASK), CANNOT_TELL, shows=(0,)),))


def absent(draw: Draw) -> Example:
    """A question for a shape or a colour that the scene has none of."""
    rng = draw.rng
    drawn = scenes.scene(rng, rng.randint(1, 4))
    shape = rng.choice([s for s in SHAPES if s not in drawn.shapes])
    color = rng.choice([c for c in COLORS if c not in drawn.colors])
    turns = [
        Turn(f"What color is the {shape}?", f"There is no {shape}."),
        Turn(f"What shape is {color}?", f"There is no {color} shape."),
        Turn(f"How many {several(shape)} are there?", "0."),
    ]
    return about(draw, "absent", scenes.picture(rng, drawn), {"absent": turns})


MAKERS: dict[str, Maker] = {"unknown": unknown, "absent": absent}
