"""From who reads what to a step's work items, which mmserve.kernels.work packs.

Owns how attention of single queries is cut: small items, and one reading for images that several
sequences show. Chunks are mmserve.kernels.work_chunks's, and work_drafts's. Knows nothing of the
array's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np

from mmserve.kernels.work import (
    HEADER,
    IMAGE_SPLIT,
    LARGE,
    LONG_ROWS,
    NEWEST,
    OWN,
    SHARED,
    SHORT_ROWS,
    SMALL,
    SMALL_ROWS,
    SPLITS,
    ImagePart,
    Ints,
    Items,
    Reader,
    Splits,
    WorkTables,
    array,
    pack,
)
from mmserve.kernels.work_chunks import add_chunks
from mmserve.kernels.work_crowds import (
    Crowd,
    Seen,
    choose_tile,
    crowds_of,
    cut_to_fill,
    seen_of,
)
from mmserve.kernels.work_drafts import add_drafts


class _Singles(NamedTuple):
    """Readers of one query each, by column."""

    readers: list[Reader]
    rows: Ints
    reads: Ints  # [N, 4]
    images: list[Sequence[ImagePart]]

    @classmethod
    def of(cls, readers: list[Reader]) -> _Singles:
        count = len(readers)
        rows = np.fromiter(map(attrgetter("first_row"), readers), np.int64, count)
        flat = chain.from_iterable(map(attrgetter("reads"), readers))
        reads = np.fromiter(flat, np.int64, 4 * count).reshape(count, 4)
        return cls(readers, rows, reads, [r.images for r in readers])

    def sees_like(self, other: _Singles) -> bool:
        """Whether they read the same of the same images."""
        return (
            len(self.readers) == len(other.readers)
            and all(map(is_, self.images, other.images))
            and bool((self.rows == other.rows).all())
            and bool((self.reads[:, 2:] == other.reads[:, 2:]).all())
        )


class WorkBuilder:
    """Builds the tables of one step after another; what a batch of decoding sequences reads of
    images stays from step to step and is kept."""

    def __init__(self, group: int, splits: Splits = SPLITS, *, abreast: int = 1) -> None:
        """`group`: query heads per KV head; `abreast`: how many items of LONG_ROWS the device works
        on at a time, its processors over KV heads."""
        assert group <= LONG_ROWS, "more query heads per KV head than a tile has rows"
        self.group, self.splits, self.abreast = group, splits, max(abreast, 1)
        self.short_rows = SHORT_ROWS if group <= SHORT_ROWS else LONG_ROWS
        self._least = 2 if group <= SMALL_ROWS else 1  # queries of a chunk
        self._known: tuple[_Singles, tuple[bool, int], Items] | None = None

    def build(
        self,
        readers: Sequence[Reader],
        num_rows: int,
        *,
        at: int = HEADER,
        share: bool = True,
        long: bool = False,
    ) -> WorkTables:
        """The tables of one step of `num_rows` rows; `long`: large items have LONG_ROWS, else
        `short_rows`, or more where images have many readers.

        `at`: where their body will stand in the array. `share` False reads an image once for each
        of its readers.
        """
        lone = [r for r in readers if r.num_queries < self._least]
        assert all(r.tree is None for r in lone), "a tree has several rows"
        chunks = [r for r in readers if r.num_queries >= self._least]
        rows, parts = LONG_ROWS if long else self.short_rows, list[Items]()
        if lone:
            single = _Singles.of(lone)
            images = self._images(single, share, rows)
            rows, own = images.tile_rows, Items(self.group, images.tile_rows)
            _add_text(own, single, images.parts[0][1], self.splits, self.abreast)
            parts += [images, own]
        tables = Items(self.group, rows)
        if chunks and (left := add_drafts(tables, chunks, self.splits)):
            add_chunks(tables, left, self.splits)
        return pack([tables, *parts], num_rows, at)

    def _images(self, single: _Singles, share: bool, tile_rows: int) -> Items:
        """What single queries read of images, in tiles of at least `tile_rows`."""
        how = (share, tile_rows)
        if self._known is not None and self._known[1] == how and single.sees_like(self._known[0]):
            return self._known[2]
        visual = zip(single.images, single.reads[:, 2:].tolist(), strict=True)
        seen = [seen_of(images, lo, hi) for images, (lo, hi) in visual]
        fixed = self.splits.fixed
        crowds = crowds_of(seen, together=not fixed) if share else []
        if crowds and not fixed:
            tile_rows = max(tile_rows, choose_tile(crowds, self.group))
        items = Items(self.group, tile_rows)
        if fixed:
            for crowd in crowds:
                crowd.cut(IMAGE_SPLIT, 1)
        else:
            cut_to_fill(crowds, items.queries, self.abreast * LONG_ROWS // tile_rows)
        _add_images(items, single, seen, crowds)
        self._known = (single, how, items)
        return items


# -- single queries -----------------------------------------------------------------------------


def _add_images(
    t: Items, single: _Singles, seen: Sequence[Sequence[Seen]], crowds: Sequence[Crowd]
) -> None:
    """Items of single queries over images, those of crowds once for all who are there."""
    crowd_of = {image.key: crowd for crowd in crowds for image in crowd.images}
    small: list[tuple[int, ...]] = []
    parts = np.zeros(len(seen), np.int64)
    for n, row in enumerate(single.rows.tolist()):
        count = 0
        for part in seen[n]:
            image = part.image
            if part.whole and (crowd := crowd_of.get(image.key)) is not None:
                count += crowd.enter(image, row, count)
                continue
            at, base, cuts = t.add_pages(image.pages), image.turning, part.cuts
            small += [(row, p, at, *cut, base) for p, cut in enumerate(cuts, count)]
            count += len(cuts)
        parts[n] = count
    t.parts.append((single.rows, parts))
    t.small.append(array(small, SMALL))
    for crowd in crowds:
        _add_crowd(t, crowd)


def _add_crowd(t: Items, crowd: Crowd) -> None:
    entries = chain.from_iterable(crowd.entries[image.key] for image in crowd.images)
    first = t.add_entries([(*entry, 0, 0, 0, 0) for entry in entries])
    pages = [t.add_pages(image.pages) for image in crowd.images]
    bases = [min(image.turning, 0) for image in crowd.images]
    count, large = crowd.readers, list[tuple[int, ...]]()
    for part, piece in enumerate(crowd.pieces):
        segments = [(SHARED, pages[i], lo, hi, lo, hi, bases[i], i * count) for i, lo, hi in piece]
        begin = t.add_segments(segments)
        large += [
            (first + at, min(t.queries, count - at), begin, len(piece), part)
            for at in range(0, count, t.queries)
        ]
    t.large.append(array(large, LARGE))


def _add_text(t: Items, single: _Singles, before: Ints, splits: Splits, abreast: int) -> None:
    """Small items of single queries over their sequences' own text, behind `before` parts of each;
    a query that reads nothing at all has an item that says so."""
    lo, hi = single.reads[:, 0], single.reads[:, 1]
    if any(map(attrgetter("sink_tokens"), single.readers)):
        before = before + _add_sinks(t, single, before)
    if any(reader.border is not None for reader in single.readers):
        hi, newest = _add_newest(t, single, before)
        before = before + newest
    start, size = splits.even(lo, hi, abreast)
    count = np.where(hi > lo, -((start - hi) // size), before == 0)
    reader = np.repeat(np.arange(len(lo)), count)
    part = np.arange(len(reader)) - np.repeat(np.cumsum(count) - count, count)
    each = size[reader]
    first = start[reader] + part * each
    items = np.empty((len(reader), SMALL), np.int32)
    items[:, 0] = single.rows[reader]
    items[:, 1] = before[reader] + part
    items[:, 2] = _places(t, single)[reader]
    items[:, 3] = np.maximum(first, lo[reader])
    items[:, 4] = np.minimum(first + each, hi[reader])
    items[:, 5] = OWN
    t.small.append(items)
    t.parts.append((single.rows, count))


def _add_sinks(t: Items, single: _Singles, before: Ints) -> Ints:
    """Items over the first text tokens; how many each query has."""
    sinks = np.array([reader.sink_tokens for reader in single.readers])
    ends = np.minimum(sinks, single.reads[:, 0])
    some, none = ends > 0, np.zeros_like(ends)
    items = np.stack([single.rows, before, _places(t, single), none, ends, none + OWN], 1)
    t.small.append(array(items[some], SMALL))
    t.parts.append((single.rows, some.astype(np.int64)))
    return t.parts[-1][1]


def _add_newest(t: Items, single: _Singles, before: Ints) -> tuple[Ints, Ints]:
    """Items over text in the residual; where that begins, or the rest of the text ends, and how
    many each query has."""
    lo, hi = single.reads[:, 0], single.reads[:, 1]
    borders = (hi[n] if r.border is None else r.border for n, r in enumerate(single.readers))
    border = np.minimum(np.fromiter(borders, np.int64, len(hi)), hi)
    first = np.maximum(border, lo)
    some = first < hi
    base = np.full_like(hi, NEWEST)
    items = np.stack([single.rows, before, _places(t, single), first, hi, base], 1)
    t.newest.append(array(items[some], SMALL))
    t.parts.append((single.rows, some.astype(np.int64)))
    return np.maximum(border, lo), t.parts[-1][1]


def _places(t: Items, single: _Singles) -> Ints:
    """Where each reader's page ids stand, or its first would."""
    if not t.pages:
        t.pages += [r.pages for r in single.readers]
        t.num_pages = sum(map(len, t.pages))
    lengths = np.fromiter(map(len, t.pages), np.int64, len(t.pages))
    first = np.fromiter(map(attrgetter("first_page"), single.readers), np.int64, len(t.pages))
    return np.cumsum(lengths) - lengths - first
