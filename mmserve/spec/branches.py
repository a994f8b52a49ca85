"""A draft in the making: tokens are hung on one by one, and equal siblings become one.

Owns the growing tree. Knows nothing of where its tokens come from.
"""

from __future__ import annotations

from mmserve.spec.draft import MOST_TOKENS, Draft

ROOT = -1  # the sequence's last known token


class Branches:
    """At most `most` tokens."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._most = min(most, MOST_TOKENS)
        self._numbers: dict[tuple[int, int], int] = {}  # by parent and token, in order

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, parent: int, token: int) -> int | None:
        """The number of `token` behind `parent`, new or not; None: there is no room for it."""
        number = self._numbers.get((parent, token))
        if number is None and len(self) < self._most:
            number = self._numbers[parent, token] = len(self)
        return number

    def draft(self) -> Draft | None:
        """None where nothing was added."""
        if not self._numbers:
            return None
        parents, tokens = zip(*self._numbers, strict=True)
        return Draft(tokens, parents)
