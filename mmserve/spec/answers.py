"""Earlier answers, to be searched by what led to a place in them.

Owns them by tenant and subject, and how much memory all of them may take: the subjects that nobody
asked about for longest go first, and of one subject the oldest answers. One tenant's search never
sees, nor is slowed or sped by, another tenant's answers. Knows nothing of drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from mmserve.spec.index import Index

END = -1  # stands behind each answer
SIZES = (1, 3, 16)  # tokens by which a place is found
TOKEN_BYTES = 320  # that a token takes with its places in the tables: the most that was measured
MOST_TOKENS = 1 << 15  # about one subject
PART = 4096  # tokens that are indexed at a time


class Subject(NamedTuple):
    """`image`: the digest of one that was shown to those who asked; empty: anything at all."""

    tenant: bytes
    image: bytes


class Answers:
    """`num_bytes` of memory at most, about."""

    def __init__(self, num_bytes: int) -> None:
        self._room = num_bytes // TOKEN_BYTES  # tokens
        self._most = min(MOST_TOKENS, self._room)
        self._about: OrderedDict[Subject, Index] = OrderedDict()  # the latest last
        self._texts: dict[Subject, list[int]] = {}  # what the indices are of
        self._held = 0  # tokens

    @property
    def num_bytes(self) -> int:
        return self._held * TOKEN_BYTES

    def __len__(self) -> int:
        """Subjects."""
        return len(self._about)

    def about(self, subject: Subject) -> Index | None:
        """What was answered about it. Only what is asked for is indexed, and not all at once."""
        index = self._about.get(subject)
        if index is not None:
            self._about.move_to_end(subject)
            index.grow(PART)
        return index

    def file(self, subject: Subject, answer: Sequence[int]) -> None:
        """Remember an answer, with what led to it, as far as there is room at all."""
        added = [*answer, END]
        if len(added) > self._most:
            return
        text = self._texts.get(subject, [])
        if not text or len(text) + len(added) > self._most:
            self._drop(subject)
            text = self._texts[subject] = _newest(text, self._most // 2 - len(added))
            self._about[subject] = Index(text, SIZES)
            self._held += len(text)
        text.extend(added)
        self._held += len(added)
        self._about.move_to_end(subject)
        while self._held > self._room:
            self._drop(next(iter(self._about)))

    def _drop(self, subject: Subject) -> None:
        if self._about.pop(subject, None) is not None:
            self._held -= len(self._texts.pop(subject))


def _newest(text: list[int], room: int) -> list[int]:
    """The latest whole answers that fit."""
    if room >= len(text) or not text:
        return text
    kept = text[len(text) - max(room, 0) - 1 :]  # and the token before, which may be an end
    return kept[kept.index(END) + 1 :]
