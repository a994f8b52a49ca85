"""A draft: tokens that may come next, as a tree.

Owns who follows whom in it and who sees whom. Knows nothing of who guessed it, or of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mmserve.config import MOST_DRAFTED

MOST_TOKENS = MOST_DRAFTED  # a mask of 64 bits says who sees whom, the last known token too


@dataclass(frozen=True)
class Draft:
    """A tree of tokens: number i follows number `parents[i]`, or the sequence's last token where
    that is -1. Parents stand before their children, and no two children of one token are equal.
    `author`: whose it is, where several drafters guess."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    author: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        assert 0 < len(self.tokens) == len(self.parents) <= MOST_TOKENS, "no draft of that size"
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), "parents come first"

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Draft:
        """Each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self) -> Draft:
        """As of an `Unread`: it is known."""
        return self

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How far each stands behind the sequence's last token: 1 for those that follow it."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Of each token, the ones that it sees: bit j stands for number j, itself included."""
        masks: list[int] = []
        for i, parent in enumerate(self.parents):
            masks.append(1 << i | (masks[parent] if parent >= 0 else 0))
        return tuple(masks)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The tokens down to each, itself included."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return tuple(paths)

    def children(self, number: int) -> dict[int, int]:
        """By token, the numbers of those that follow number `number` (-1: the last known token)."""
        found = enumerate(self.parents)
        return {self.tokens[i]: i for i, parent in found if parent == number}

    def shortened(self, length: int) -> Draft | None:
        """Without tokens that stand further back than `length`; None where nothing is left."""
        return self.only({i for i, depth in enumerate(self.depths) if depth <= length})

    def only(self, numbers: Container[int]) -> Draft | None:
        """With these of its tokens, whose parents are among them; None where nothing is left."""
        kept = [i for i in range(len(self)) if i in numbers]
        if len(kept) == len(self):
            return self
        place = {old: new for new, old in enumerate(kept)} | {-1: -1}
        tokens = tuple(self.tokens[i] for i in kept)
        parents = tuple(place[self.parents[i]] for i in kept)
        return Draft(tokens, parents, self.author) if kept else None


@dataclass(frozen=True)
class Unread:
    """A draft that only a device has seen: `count` tokens, none further than `length` behind the
    last known one, from number `place` on of what it has grown. `reading` waits for it."""

    count: int
    length: int
    place: int
    reading: Callable[[], Draft] = field(compare=False)
    author: str = field(default="", compare=False)

    def __len__(self) -> int:
        return self.count

    @property
    def is_chain(self) -> bool:
        """Whether it is known to be one."""
        return False

    def read(self) -> Draft:
        return self._draft

    @cached_property
    def _draft(self) -> Draft:
        draft = self.reading()
        return replace(draft, author=self.author) if self.author else draft


AnyDraft = Draft | Unread
