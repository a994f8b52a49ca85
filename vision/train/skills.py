"""Every skill by name, and the one way to an example of it.

Owns the registry and how chance is seeded: skill, seed, index and split decide all of an example.
`SKILLS` are what a mixture means by all skills; those of `LARGE` are for models that see crops, and
are in a mixture that names them. Knows nothing of how a skill's pictures are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Container, Mapping
from types import MappingProxyType

from mmserve.vision.train.assets import Assets
from mmserve.vision.train.example import Draw, Example, Split
from mmserve.vision.train.makers import (
    charts,
    digits,
    easy,
    emoji,
    large,
    refusals,
    scenes,
    screens,
    several,
    text,
    textures,
)
from mmserve.vision.train.makers.talk import Maker

FAMILIES = (scenes, textures, text, charts, screens, digits, emoji, easy, several, refusals)
SKILLS: Mapping[str, Maker] = MappingProxyType(
    {name: make for family in FAMILIES for name, make in family.MAKERS.items()}
)
LARGE: Mapping[str, Maker] = MappingProxyType(large.MAKERS)


def mixed(named: Container[str]) -> tuple[str, ...]:
    """What a mixture that names these is of."""
    return (*SKILLS, *(skill for skill in LARGE if skill in named))


def example(skill: str, split: Split, *, seed: int, index: int, assets: Assets) -> Example:
    """The same arguments give the same example, in any process and on any machine."""
    # A string is hashed by SHA-512, unlike a tuple, whose hash may differ between processes.
    rng = random.Random(f"{skill} {split.value} {seed} {index}")
    return {**SKILLS, **LARGE}[skill](Draw(rng, split, assets))
