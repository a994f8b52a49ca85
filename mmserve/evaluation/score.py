"""Whether an answer is right, and how sure a share of right ones is.

Owns what counts as the same answer, for every skill. Knows nothing of who was asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from mmserve.vision.train.example import Turn

CONFIDENCE = 1.96  # standard deviations: 95 %
REFUSALS = ("cannot tell", "can't tell", "cannot see", "can't see", "not sure", "do not know")

Scorer = Callable[[Turn, str], bool]


def normal(text: str) -> str:
    """Case, runs of blanks and the final full stop do not matter."""
    return " ".join(text.lower().replace("\u2019", "'").split()).strip(" .。")


def exact(turn: Turn, said: str) -> bool:
    return normal(said) in {normal(answer) for answer in (turn.answer, *turn.accepted)}


def without_blanks(turn: Turn, said: str) -> bool:
    """Of Chinese, which has no blanks between words."""
    return re.sub(r"\s", "", normal(said)) == re.sub(r"\s", "", normal(turn.answer))


def same_things(turn: Turn, said: str) -> bool:
    """A caption: the same things at the same places on the same background, in any order."""
    return things(turn.answer) == things(said)


def things(caption: str) -> tuple[list[str], str]:
    listed, _, ground = normal(caption).partition(" on a ")
    return sorted(part.strip() for part in re.split(r", | and ", listed)), ground


def refused(turn: Turn, said: str) -> bool:
    """The skill's only right answer is that it cannot tell; in which words is free."""
    return any(words in normal(said) for words in REFUSALS)


SCORERS: dict[str, Scorer] = {
    "caption": same_things,
    "chinese": without_blanks,
    "emoji_chinese": without_blanks,
    "unknown": refused,
}


def right(skill: str, turn: Turn, said: str) -> bool:
    return SCORERS.get(skill, exact)(turn, said)


def interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's, in percent: where the true share lies, at 95 %."""
    share, z2 = right / n, CONFIDENCE**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    spread = CONFIDENCE * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return 100 * max(0.0, middle - spread), 100 * min(1.0, middle + spread)
