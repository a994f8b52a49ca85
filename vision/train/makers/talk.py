"""From what is true of a picture to a conversation about it.

Owns how a question becomes an example: alone where it is scored, among others in training. Knows
nothing of pictures.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from PIL import Image

from mmserve.vision.train.example import Draw, Example, Turn

MORE_TURNS = (0, 0, 1, 1, 2, 3)  # further questions about the same picture, in training

# Questions with their answers, each list under the skill it asks for.
Facts = Mapping[str, Sequence[Turn]]
Maker = Callable[[Draw], Example]


def a(thing: str) -> str:
    """The thing with its article."""
    return ("an " if thing[0] in "aeiou" else "a ") + thing


def several(thing: str) -> str:
    """More than one of it."""
    return thing + ("es" if thing.endswith(("s", "x", "ch")) else "s")


def say(rng: random.Random, questions: Sequence[str], answer: str) -> Turn:
    """One of the questions, and the answer as a sentence."""
    text = answer[:1].upper() + answer[1:]
    return Turn(rng.choice(questions), text if text.endswith((".", "?", "!")) else text + ".")


def read(question: str, text: str, before: str = "", after: str = "") -> Turn:
    """An answer in which `text` was read from a picture, and is spelled a character a token."""
    start = len(before)
    return Turn(question, before + text + after, spelled=((start, start + len(text)),))


def yes_or_no(truth: bool) -> str:
    return "Yes." if truth else "No."


def about(draw: Draw, skill: str, image: Image.Image, facts: Facts) -> Example:
    """A question of the skill about one image; in training others may follow it."""
    first = draw.rng.choice(facts[skill])
    turns = [dataclasses.replace(first, shows=(0,))]
    if not draw.held_out:
        rest = [t for s in facts for t in facts[s] if t.question != first.question]
        more = min(draw.rng.choice(MORE_TURNS), len(rest))
        turns += draw.rng.sample(rest, more)
    return Example(skill, (image,), tuple(turns))
