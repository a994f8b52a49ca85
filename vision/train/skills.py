"""Every skill by name, and the one way to an example of it.

Owns the registry and how chance is seeded: skill, seed, index and split decide all of an example.
Knows nothing of how a skill's pictures are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

from mmserve.vision.train.assets import Assets
from mmserve.vision.train.example import Draw, Example, Split
from mmserve.vision.train.makers import scenes
from mmserve.vision.train.makers.talk import Maker

SKILLS: Mapping[str, Maker] = MappingProxyType({**scenes.MAKERS})


def example(skill: str, split: Split, *, seed: int, index: int, assets: Assets) -> Example:
    """The same arguments give the same example, in any process and on any machine."""
    # A string is hashed by SHA-512, unlike a tuple, whose hash may differ between processes.
    rng = random.Random(f"{skill} {split.value} {seed} {index}")
    return SKILLS[skill](Draw(rng, split, assets))
