"""Where the end of a text stood before: earlier places in a growing list of tokens.

Owns the tables: by the tokens right before a place, the newest such place, and from each place the
one before it of the same kind. One more token costs a few dictionary entries, and a search looks at
so many candidates at most, however long the text is. Knows nothing of requests or drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """`at`: index of the token that followed; `matched`: tokens before it that are the same."""

    at: int
    matched: int


class Index:
    """Over `tokens`, which may grow at its end and does not change else.

    `sizes`: how many tokens have to be the same, ascending; each costs memory for every token.
    With a larger one, long matches are found also where short ones abound.
    """

    def __init__(self, tokens: Sequence[int], sizes: Sequence[int]) -> None:
        assert sizes and list(sizes) == sorted(set(sizes)) and sizes[0] > 0, "sizes ascend"
        self.tokens = tokens
        self._newest: dict[int, dict[int, int]] = {size: {} for size in reversed(sizes)}
        self._before = {size: array("i") for size in sizes}  # of place `size` and on; -1: none

    def grow(self, most: int | None = None) -> None:
        """Take in what was added to the tokens, `most` of them at most."""
        for size, newest in self._newest.items():
            before = self._before[size]
            start = size + len(before)
            stop = len(self.tokens)  # which is no place yet: nothing follows
            if most is not None:
                stop = min(stop, start + most)
            part = self.tokens[start - size : max(stop - 1, 0)]
            grams = zip(*(part[i:] for i in range(size)), strict=False)
            for at, key in enumerate(map(hash, grams), start):
                before.append(newest.get(key, -1))
                newest[key] = at

    def search(self, text: Sequence[int], longest: int, looks: int) -> Iterator[Place]:
        """Places that the end of `text` (often, these tokens') could stand at, newest first.

        The largest size that has any is searched; no more than `looks` candidates are compared.
        `matched` is not counted beyond `longest`.
        """
        tail = text[-longest:]
        for size, newest in self._newest.items():
            if len(tail) < size:
                continue
            at, before = newest.get(hash(tuple(tail[-size:])), -1), self._before[size]
            found = False
            for _ in range(looks):
                if at < 0:
                    break
                matched = self._matched(tail, at)
                if matched >= size:  # else, two hashes are equal by chance
                    found = True
                    yield Place(at, matched)
                at = before[at - size]
            if found:
                return

    def stood(self, tail: Sequence[int], looks: int) -> bool:
        """Whether all of `tail` stood somewhere before. Where it is these tokens' own end, or ends
        one before it, that place is none. Quicker than a search: only the largest size is looked
        up."""
        size, newest = next(iter(self._newest.items()))
        if len(tail) < size:
            return False
        at, before = newest.get(hash(tuple(tail[-size:])), -1), self._before[size]
        for _ in range(looks):
            if at < 0:
                return False
            start = at - len(tail)
            if start >= 0 and at < len(self.tokens) - 1 and self.tokens[start:at] == tail:
                return True
            at = before[at - size]
        return False

    def _matched(self, tail: Sequence[int], at: int) -> int:
        tokens, most = self.tokens, min(at, len(tail))
        start = at - len(tail)
        if start >= 0 and tokens[start] == tail[0] and tokens[start:at] == tail:
            return most  # found so at once, which long matches need
        matched = 0
        while matched < most and tokens[at - 1 - matched] == tail[-1 - matched]:
            matched += 1
        return matched
