"""Of draft trees that have been checked, the right path's keys and values go where text is read.

Owns which slots they leave and which they go to. Knows nothing of how a path was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mmserve.cache.kv_pool import KVPool
from mmserve.engine.rows import slots_in
from mmserve.engine.transfer import upload


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


def keep(pools: Sequence[KVPool], kept: Sequence[KeptPath]) -> None:
    """Make paths the text behind what was known, in the text pools by layer group, in the order of
    the stream. Their keys are rotated as it takes; so it is a copy, to be made before anything else
    is done with the pages."""
    moves = [(of.tables, move) for of in kept for move in of.moves]
    for group, pool in enumerate(pools):
        size = pool.shape.page_size
        held = [(tables[group], move) for tables, move in moves if tables[group]]
        if held:
            slots = [slots_in(table, move[n], size) for n in (0, 1) for table, move in held]
            ends = upload(slots, torch.long, pool.shape.device).view(2, -1)
            pool.move(ends[0], ends[1])
