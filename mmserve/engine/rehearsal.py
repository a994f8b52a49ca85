"""Steps of nobody, which compile and capture what the first requests will need.

Owns which kinds of steps there are. They read whatever lies in the first page and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mmserve.engine.cuda_layout import CUDALayout, Layout
from mmserve.kernels import work

LONG = 641  # keys, of which a row has several partial results
DRAFT_ROWS = 128  # of steps with drafts that are captured from the start


class Rehearsal:
    def __init__(self, layout: CUDALayout, run: Callable[[Layout, Tensor | None], Tensor]) -> None:
        self._layout, self._run = layout, run

    def steps(self, sizes: Sequence[int]) -> None:
        """Short and long contexts, chunks, both."""
        for count in sizes:
            for context in (1, LONG):
                self.blank(count, *(_reader(row, 1, context) for row in range(count)))
            if count > 1:
                self.blank(count, _reader(0, count, LONG))
                self.blank(count, _reader(0, 1, LONG), _reader(1, count - 1, LONG))

    def drafts(self, sizes: Sequence[int], *, trees: bool) -> None:
        """Drafts of one sequence, beside another or not."""
        for count in (size for size in sizes if 1 < size <= DRAFT_ROWS):
            for context in (count, LONG):
                for tree in (False, True) if trees else (False,):
                    lone, draft = _reader(0, 1, context), _reader(1, count - 1, context, tree)
                    self.blank(count, lone, draft)
                    self.blank(count, _reader(0, count, context, tree))

    def blank(self, count: int, *readers: work.Reader, embeds: Tensor | None = None) -> None:
        groups = self._layout.groups
        rows = self._layout.blank(count)
        blind = [r._replace(reads=tuple(0 * part for part in r.reads)) for r in readers]
        each = [list(readers) if group.text else blind for group in groups]
        self._run(Layout(rows, each, [], []), embeds)


def _reader(first: int, count: int, context: int, tree: bool = False) -> work.Reader:
    reads: Any = (0, context, 0, 0) if count == 1 else work.causal(context - 1, count)
    masks = np.ones(count, np.int64) if tree and count > 1 else None
    return work.Reader(first, count, reads, np.zeros(80, np.int32), tree=masks)
