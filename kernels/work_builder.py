"""From who reads what to a step's work items, which mmserve.kernels.work packs.

Owns how attention is cut: small items for single queries, tiles of queries for chunks, one reading
for images that several sequences show. Knows nothing of the array's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np

from mmserve.kernels.work import (
    ENTRY,
    HEADER,
    IMAGE_SPLIT,
    LARGE,
    LONG_ROWS,
    OWN,
    SHARED,
    SHORT_CHUNK,
    SHORT_PARTS,
    SHORT_ROWS,
    SINKS,
    SMALL,
    SMALL_ROWS,
    SPLITS,
    STILL,
    TEXT,
    VISION,
    ImagePart,
    Ints,
    Items,
    Reader,
    Splits,
    WorkTables,
    array,
    pack,
)
from mmserve.kernels.work_crowds import (
    Crowd,
    Seen,
    choose_tile,
    crowds_of,
    cut_to_fill,
    seen_of,
)


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
        single = _Singles.of([r for r in readers if r.num_queries < self._least])
        assert all(r.tree is None for r in single.readers), "a tree has several rows"
        chunks = [r for r in readers if r.num_queries >= self._least]
        rows = LONG_ROWS if long else self.short_rows
        images = self._images(single, share, rows) if single.readers else Items(self.group, rows)
        tables = Items(self.group, images.tile_rows)
        room = SHORT_PARTS
        for reader in chunks:
            reads = reader.matrix
            parts = len(self.splits.cuts(int(reads[0].min()), int(reader.ends.max())))
            room -= reader.num_queries * (parts + len(reader.images))
            short = self.splits.fixed or (reader.num_queries <= SHORT_CHUNK and room >= 0)
            _add_chunk(tables, reader, reads, self.splits if short else None)
        if not single.readers:
            return pack([tables], num_rows, at)
        own = Items(self.group, tables.tile_rows)
        _add_text(own, single, images.parts[0][1], self.splits, self.abreast)
        return pack([tables, images, own], num_rows, at)

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
            at, base, cuts = t.add_pages(image.pages), _base(image), part.cuts
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
    bases = [min(_base(image), 0) for image in crowd.images]
    count, large = crowd.readers, list[tuple[int, ...]]()
    for part, piece in enumerate(crowd.pieces):
        segments = [(SHARED, pages[i], lo, hi, lo, hi, bases[i], i * count) for i, lo, hi in piece]
        begin = t.add_segments(segments)
        large += [
            (first + at, min(t.queries, count - at), begin, len(piece), part)
            for at in range(0, count, t.queries)
        ]
    t.large.append(array(large, LARGE))


def _base(image: ImagePart) -> int:
    return STILL if image.base is None else image.base


def _add_text(t: Items, single: _Singles, before: Ints, splits: Splits, abreast: int) -> None:
    """Small items of single queries over their sequences' own text, behind `before` parts of each;
    a query that reads nothing at all has an item that says so."""
    lo, hi = single.reads[:, 0], single.reads[:, 1]
    if any(map(attrgetter("sink_tokens"), single.readers)):
        before = before + _add_sinks(t, single, before)
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


def _places(t: Items, single: _Singles) -> Ints:
    """Where each reader's page ids stand, or its first would."""
    if not t.pages:
        t.pages += [r.pages for r in single.readers]
        t.num_pages = sum(map(len, t.pages))
    lengths = np.fromiter(map(len, t.pages), np.int64, len(t.pages))
    first = np.fromiter(map(attrgetter("first_page"), single.readers), np.int64, len(t.pages))
    return np.cumsum(lengths) - lengths - first


# -- chunks -------------------------------------------------------------------------------------


def _add_chunk(t: Items, reader: Reader, reads: Ints, splits: Splits | None) -> None:
    """Large items of several queries of one sequence, `reads` [4, Q].

    With `splits` each run of keys is an item of its own, images first, as for single queries;
    without, a tile of queries reads all its runs in one item, and the longest go first.
    """
    runs = _runs(t, reader, reads, splits)
    starts = np.arange(0, reader.num_queries, t.queries)
    bounds = _bounds(runs, reads, reader.ends, starts)
    used = bounds[..., 0] < bounds[..., 1]  # [runs, tiles]
    used[-1, ~used.any(0)] = True  # a tile that reads nothing has an item that says so
    rows = np.arange(reader.first_row, reader.first_row + reader.num_queries)
    entries = np.zeros((reader.num_queries, ENTRY), np.int32)
    entries[:, 0] = rows
    entries[:, 3:] = reads.T
    first = t.add_entries(entries)
    if reader.tree is not None:
        t.trees.append((first, reader.tree))
    sizes = np.minimum(t.queries, reader.num_queries - starts)
    if splits is None:
        tile, run = (used.T[::-1]).nonzero()
        tile = len(starts) - 1 - tile
        each = used.sum(0)[::-1]
        tiles, begins = np.arange(len(starts))[::-1], np.cumsum(each) - each
        part = begins * 0
        t.parts.append((rows, np.ones_like(rows)))
    else:
        run, tile = used.nonzero()
        each, begins = np.ones_like(run), np.arange(len(run))
        tiles, part = tile, (np.cumsum(used, 0) - 1)[run, tile]
        t.parts.append((rows, np.repeat(used.sum(0), sizes)))
    segments = runs[run]
    segments[:, 2:6] = bounds[run, tile]
    begins = begins + t.add_segments(segments)
    large = np.stack([first + starts[tiles], sizes[tiles], begins, each, part], 1)
    t.large.append(array(large, LARGE))


def _runs(t: Items, reader: Reader, reads: Ints, splits: Splits | None) -> Ints:
    """Segments [runs, 8] of what any of the queries reads; what all of them read is left open."""
    lo, hi, visual_lo, visual_hi = reads
    runs: list[tuple[int, ...]] = []
    reads_images = visual_lo < visual_hi
    if reads_images.any():
        least, most = int(visual_lo[reads_images].min()), int(visual_hi.max())
        for part in seen_of(reader.images, least, most):
            image = part.image
            pages, base = t.add_pages(image.pages), _base(image)
            spans = part.cuts if splits else [(part.lo, part.hi)]
            runs += [(VISION, pages, *span, 0, 0, base, image.first) for span in spans]
    pages = t.add_pages(reader.pages) - reader.first_page
    if reader.sink_tokens:
        sinks = min(reader.sink_tokens, int(lo.max()))
        runs.append((SINKS, pages, 0, sinks, 0, 0, OWN, reader.sink_tokens))
    ends = reader.ends
    reads_text = lo < ends
    least, most = (int(lo[reads_text].min()), int(ends.max())) if reads_text.any() else (0, 0)
    cuts = splits.cuts(least, most) if splits else range(least, most, max(most - least, 1))
    spans = [(max(at, least), min(at + cuts.step, most)) for at in cuts]
    runs += [(TEXT, pages, *span, 0, 0, OWN, 0) for span in spans or [(0, 0)]]
    return np.array(runs, np.int64)


def _bounds(runs: Ints, reads: Ints, ends: Ints, starts: Ints) -> Ints:
    """For every run and tile of queries [runs, tiles, 4]: [first, end) of the keys that some of the
    queries may read, of text up to their `ends`, and of those that all read (nothing if end is not
    above first)."""
    kind, first, last, offset = (runs[:, column, None] for column in (0, 2, 3, 7))
    lo = np.where(kind == VISION, reads[2] - offset, reads[0] * (kind == TEXT))
    hi = np.where(kind == VISION, reads[3] - offset, reads[1])
    if (kind == SINKS).any():
        hi = np.where(kind == SINKS, np.minimum(reads[0], offset), hi)
    some_lo, some_hi = _within(lo, np.where(kind == TEXT, ends, hi), first, last)
    all_lo, all_hi = _within(lo, hi, first, last)
    least, most = np.minimum.reduceat, np.maximum.reduceat
    some = least(some_lo, starts, 1), most(some_hi, starts, 1)
    return np.stack((*some, most(all_lo, starts, 1), least(all_hi, starts, 1)), 2)


def _within(lo: Ints, hi: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """What of [lo, hi) is in [first, last); where nothing is, `last` and `first`."""
    lo, hi = np.clip(lo, first, last), np.clip(hi, first, last)
    none = lo >= hi
    return np.where(none, last, lo), np.where(none, first, hi)
