"""Which rotary angles the rows of a sequence have, where these depend on its length.

Owns the numbering. Regime 0 is every sequence within the trained length; what a number above it
means in angles is `mmserve.model.rope`'s. Keys and values made in one regime are of no use in
another. Lengths are in positions, as rotary embedding counts them. Knows nothing of tensors.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass


class Growth(enum.Enum):
    """How regimes follow each other beyond the trained length."""

    SWITCH = "switch"  # one for all lengths
    DOUBLE = "double"  # one up to twice the trained length, one up to four times, ...
    EXACT = "exact"  # one for each length: how far it is beyond


@dataclass(frozen=True)
class Regimes:
    """`trained`: the longest length of regime 0; None: lengths do not matter.

    `whole`: all rows of a sequence are in one regime, so that all are computed again when it grows
    into the next. Else a row keeps the regime it was computed in: the prompt's rows that of the
    prompt, a later row that of the length it brings about.

    `turns_images`: an image's keys are rotated, so that they belong to a regime even where they
    depend on nothing else but the image.
    """

    trained: int | None = None
    growth: Growth = Growth.SWITCH
    whole: bool = True
    turns_images: bool = True

    def of(self, length: int) -> int:
        """The regime of a sequence of so many positions."""
        if self.trained is None or length <= self.trained:
            return 0
        if self.growth is Growth.EXACT:
            return length - self.trained
        if self.growth is Growth.DOUBLE:
            return ((length - 1) // self.trained).bit_length()
        return 1


ONE = Regimes()  # angles that depend on nothing but the position


class Course:
    """One sequence's way through the regimes.

    `regime`: that of all its rows, or where rows keep theirs, of its prompt's.
    """

    def __init__(self, regimes: Regimes, prompt: int) -> None:
        """`prompt`: its length."""
        self.regimes, self.prompt = regimes, prompt
        self.regime = regimes.of(prompt)

    def at(self, position: int) -> int:
        """The regime of the row at a position."""
        if self.regimes.whole or position < self.prompt:
            return self.regime
        return self.regimes.of(position + 1)

    def due(self, length: int) -> int:
        """What `regime` has to be for a sequence that has come to this length."""
        return self.regimes.of(length) if self.regimes.whole else self.regime

    def room(self, length: int, wanted: int) -> int:
        """How many positions, at most `wanted`, surely follow a length in the same regime."""
        if self.due(length + max(wanted, 0)) == self.regime:
            return wanted
        trained = self.regimes.trained
        return 0 if self.regime or trained is None else max(trained - length, 0)

    def salt(self, position: int) -> bytes:
        """What the key of the row at a position has to say, where the key before it does not."""
        regime = self.at(position)
        before = self.at(position - 1) if position else 0
        return b"" if regime == before else b"regime%d" % regime

    def key(self, digest: bytes) -> bytes:
        """Of an image that depends on nothing else but the regime."""
        if not self.regime or not self.regimes.turns_images:
            return digest
        return hashlib.sha256(b"regime%d" % self.regime + digest).digest()
