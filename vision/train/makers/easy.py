"""easy-VQA's own images and questions; held out is its test split.

Owns how they become examples: shown as they are, of 64 pixels, and in training half of them
enlarged and half of them mirrored, for no question depends on a side.
"""

from __future__ import annotations

from PIL import Image

from mmserve.vision.train.example import SIDE, Draw, Example, Turn
from mmserve.vision.train.makers.talk import Maker, about


def easy_vqa(draw: Draw) -> Example:
    rng = draw.rng
    number, asked = rng.choice(draw.assets.easy_vqa(draw.split))
    image = draw.assets.easy_vqa_image(draw.split, number)
    if not draw.held_out:
        if rng.random() < 0.5:
            image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return about(draw, "easy_vqa", image, {"easy_vqa": [Turn(*question) for question in asked]})


MAKERS: dict[str, Maker] = {"easy_vqa": easy_vqa}
