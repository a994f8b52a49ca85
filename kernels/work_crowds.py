"""Images that several single queries see: who sees which of them together, and how they are cut.

Owns the choice of the tile and of the pieces. Knows nothing of text, of chunks or of the tables'
layout.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from mmserve.kernels.work import BLOCK, IMAGE_SPLIT, LONG_ROWS, SHORT_ROWS, ImagePart

# What a device spends on one block of keys for a tile of so many rows, by measurement on an H200.
TILE_COSTS = {SHORT_ROWS: 4, 64: 5, LONG_ROWS: 11}

Span = tuple[int, int, int]  # number of an image, [first key, end)


class Seen(NamedTuple):
    """What a single query reads of an image: its tokens [lo, hi)."""

    image: ImagePart
    lo: int
    hi: int

    @property
    def whole(self) -> bool:
        return self.hi - self.lo == self.image.num_tokens

    @property
    def cuts(self) -> list[tuple[int, int]]:
        starts = range(self.lo // IMAGE_SPLIT * IMAGE_SPLIT, self.hi, IMAGE_SPLIT)
        return [(max(s, self.lo), min(s + IMAGE_SPLIT, self.hi)) for s in starts]


def seen_of(images: Sequence[ImagePart], lo: int, hi: int) -> list[Seen]:
    """What is read of `images` by who reads the visual tokens [lo, hi)."""
    found = [Seen(i, max(lo - i.first, 0), min(hi - i.first, i.num_tokens)) for i in images]
    return [part for part in found if part.lo < part.hi]


@dataclass
class Crowd:
    """Images that the same queries see whole, read one after another, and what is known of each
    query there: (row, first part, position of the image). Who sees them twice is there twice."""

    images: list[ImagePart]
    readers: int
    pieces: list[list[Span]] = field(default_factory=list)
    entries: dict[Hashable, list[tuple[int, int, int]]] = field(default_factory=dict)

    def blocks(self, size: int = BLOCK) -> list[Span]:
        return [
            (number, at, min(at + size, image.num_tokens))
            for number, image in enumerate(self.images)
            for at in range(0, image.num_tokens, size)
        ]

    def cut(self, size: int, each: int) -> None:
        """Into pieces of about as many blocks of `size` keys, `each` at most."""
        blocks = self.blocks(size)
        count = -(-len(blocks) // each)
        for piece in range(count):
            mine = blocks[piece * len(blocks) // count : (piece + 1) * len(blocks) // count]
            spans = [list(of_one) for _, of_one in groupby(mine, itemgetter(0))]
            self.pieces.append([(s[0][0], s[0][1], s[-1][2]) for s in spans])

    def enter(self, image: ImagePart, row: int, part: int) -> int:
        """Say that `row` sees `image` here. The results of all images count with the first one:
        how many the row has from `part` on."""
        self.entries.setdefault(image.key, []).append((row, part, image.base or 0))
        return len(self.pieces) if image.key == self.images[0].key else 0


def crowds_of(seen: Sequence[Sequence[Seen]], *, together: bool) -> list[Crowd]:
    """Crowds of two and more among what each query has `seen`; `together`: images that the same
    queries see are one crowd's."""
    readers: dict[Hashable, list[int]] = {}
    images: dict[Hashable, ImagePart] = {}
    for number, parts in enumerate(seen):
        for part in parts:
            if part.whole:
                readers.setdefault(part.image.key, []).append(number)
                images.setdefault(part.image.key, part.image)
    crowds: dict[Hashable, Crowd] = {}
    for key, who in readers.items():
        if len(who) > 1:
            crowd = crowds.setdefault(tuple(who) if together else key, Crowd([], len(who)))
            crowd.images.append(images[key])
    return list(crowds.values())


def choose_tile(crowds: Sequence[Crowd], group: int) -> int:
    """Rows of the tile in which the crowds are read soonest, a query having `group`."""

    def cost(rows: int) -> int:
        return TILE_COSTS[rows] * _work(crowds, rows // group)

    return min((rows for rows in TILE_COSTS if rows >= group), key=cost)


def cut_to_fill(crowds: Sequence[Crowd], queries: int, abreast: int) -> None:
    """Cut `crowds` into pieces such that about `abreast` items of up to `queries` queries each hold
    all; none is shorter than an item of an image that nobody shares."""
    each = max(-(-_work(crowds, queries) // abreast), IMAGE_SPLIT // BLOCK)
    for crowd in crowds:
        crowd.cut(BLOCK, each)


def _work(crowds: Sequence[Crowd], queries: int) -> int:
    """Blocks that tiles of so many queries read."""
    return sum(len(crowd.blocks()) * -(-crowd.readers // queries) for crowd in crowds)
