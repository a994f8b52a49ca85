"""A node of the prefix tree, and what the tree is asked and answers.

Owns the shapes only; `radix_cache` keeps them true. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

HOLE = -1  # in a window's pages: given back, or not wanted

Keys = Sequence[Hashable]
# For a prefix of so many tokens, by group: the first of them that whoever goes on reads; None: one
# cannot go on from there. A shorter prefix never needs later tokens.
Needs = Callable[[int], Sequence[int] | None]


class RadixNode:
    """A run of whole pages below its parent. Outside this module it is a handle to lock."""

    __slots__ = ("keys", "pages", "parent", "children", "locks", "last_used", "memo", "writer")

    def __init__(
        self, keys: list[Hashable], pages: list[list[int]], parent: RadixNode | None
    ) -> None:
        self.keys = keys
        self.pages = pages  # by group, equally many
        self.parent = parent
        self.children: dict[tuple[Hashable, ...], RadixNode] = {}  # by the child's first page
        self.locks = 0  # locks on this node or below it
        self.last_used = 0  # ticks
        self.memo: Any = None  # whatever who listens to evictions notes of it; gone by a split
        self.writer: str | None = None  # whoever put it in, where that is known

    @property
    def num_pages(self) -> int:
        return len(self.pages[0])


class MatchResult(NamedTuple):
    pages: list[list[int]]  # by group, HOLE where a window needs nothing
    num_tokens: int
    node: RadixNode  # the end of the match; the root when nothing matched


class InsertResult(NamedTuple):
    num_tokens: int  # tokens of the given keys that the tree now holds
    num_new_pages: int  # pages of the given ones that the tree took, of all groups
    node: RadixNode  # the end of what it holds


def run_starts(pages: list[int]) -> list[int]:
    """For each n: where the unbroken run of pages begins that ends before page n."""
    starts = [0]
    for n, page in enumerate(pages, 1):
        starts.append(n if page == HOLE else starts[-1])
    return starts
