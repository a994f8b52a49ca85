"""Of draft trees that have been checked, the right path's keys and values go where text is read.

Owns which slots they leave and which they go to. Knows nothing of how a path was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmserve.cache.kv_pool import KVPool
from mmserve.engine.rows import slots_in

Move = Callable[[int, Sequence[int]], None]  # as `ModelRunner.move`


class KeptPath(NamedTuple):
    """The numbers of a draft's right tokens, in order; the draft stood behind `known` text tokens.
    `tables`: by layer group, the pages of the sequence's text."""

    tables: Sequence[Sequence[int]]
    known: int
    path: Sequence[int]

    @property
    def moves(self) -> list[tuple[int, int]]:
        """By text index, from where and to where. A chain's tokens stand there already."""
        places = enumerate(self.path)
        return [(self.known + number, self.known + n) for n, number in places if number != n]


class Keeping:
    """Paths on their way, of text pools by layer group. Their keys are rotated as it takes, so each
    is a copy, to be made (`settle`) before anything else is done with the pages, in the order of
    the stream; which slots it is about is known at once."""

    def __init__(self, pools: Sequence[KVPool], move: Move) -> None:
        self._pools, self._move = pools, move
        self._moves: list[list[tuple[int, int]]] = [[] for _ in pools]

    def add(self, kept: KeptPath) -> None:
        """Make a path the text behind what was known."""
        moves = kept.moves
        for table, pool, found in zip(kept.tables, self._pools, self._moves, strict=True):
            if table:
                size = pool.shape.page_size
                found += [(slots_in(table, a, size), slots_in(table, b, size)) for a, b in moves]

    def settle(self) -> None:
        """All that was added, in one go."""
        for group, moves in enumerate(self._moves):
            if moves:
                self._move(group, [slot for ends in zip(*moves, strict=True) for slot in ends])
                moves.clear()
