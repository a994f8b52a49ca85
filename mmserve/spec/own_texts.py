"""Each live sequence's own text, indexed as it grows: what may be said again.

Owns the indices. Knows nothing of other sequences' answers, or of what is made of a match.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.spec.drafter import Context, Landed
from mmserve.spec.index import Index

PART = 4096  # tokens of a long prompt that are taken in after one step


class OwnTexts:
    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: as `Index` has them."""
        self._sizes = sizes
        self._indices: dict[str, Index] = {}

    def index(self, context: Context) -> Index:
        """Of all tokens that are known."""
        index = self._of(context)
        index.grow()
        return index

    def landed(self, context: Context, landed: Landed) -> None:
        if not landed.chosen:  # a prompt is under way, and long: its index grows along with it
            self._of(context).grow(PART)

    def end(self, context: Context) -> None:
        self._indices.pop(context.id, None)

    def _of(self, context: Context) -> Index:
        index = self._indices.get(context.id)
        if index is None:
            index = self._indices[context.id] = Index(context.token_ids, self._sizes)
        return index


def end_of(context: Context, length: int) -> Sequence[int]:
    """Its last tokens, without one that is on its way. None where there are not so many."""
    tokens = context.token_ids
    stop = len(tokens) - (tokens[-1] < 0) if tokens else 0
    return tokens[stop - length : stop] if stop >= length else []
