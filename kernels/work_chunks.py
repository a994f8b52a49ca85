"""What several queries of a sequence read, as large items: tiles of queries over runs of keys.

Owns which keys of a run each tile reads. All chunks of a step are cut together, since with drafts a
step has one for each sequence. Knows nothing of single queries or of the array's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmserve.kernels.work import (
    ENTRY,
    LARGE,
    NEWEST,
    OWN,
    SHORT_CHUNK,
    SHORT_PARTS,
    SINKS,
    TEXT,
    VISION,
    Ints,
    Items,
    Reader,
    Splits,
    array,
)
from mmserve.kernels.work_crowds import seen_of

Run = tuple[int, ...]  # a segment; what all queries of an item read of it is left open


class Extent(NamedTuple):
    """What any query of a reader reads: text [lo, hi), visual tokens [visual_lo, visual_hi) (lo is
    FAR where nothing is read), and the highest of the queries' lo."""

    lo: int
    hi: int
    visual_lo: int
    visual_hi: int
    last_lo: int


FAR = np.iinfo(np.int64).max


class Chunks(NamedTuple):
    """Readers of several queries, by column. `reads` [4, Q] as a `Reader` has them, `ends` [Q] of
    the text that each query may read: hi, except in `trees`."""

    readers: Sequence[Reader]
    reads: Ints
    ends: Ints
    trees: bool
    extents: list[Extent]

    @classmethod
    def of(cls, readers: Sequence[Reader]) -> Chunks:
        reads = np.concatenate([reader.matrix for reader in readers], 1)
        counts = np.array([reader.num_queries for reader in readers])
        lo, hi, visual_lo, visual_hi = reads
        trees = any(reader.tree is not None for reader in readers)
        ends = np.concatenate([reader.ends for reader in readers]) if trees else hi
        firsts = np.cumsum(counts) - counts
        text, visual = lo < ends, visual_lo < visual_hi
        least, most = np.minimum.reduceat, np.maximum.reduceat
        columns = (
            least(np.where(text, lo, FAR), firsts),
            most(np.where(text, ends, 0), firsts),
            least(np.where(visual, visual_lo, FAR), firsts),
            most(np.where(visual, visual_hi, 0), firsts),
            most(lo, firsts),
        )
        extents = [Extent(*row) for row in np.stack(columns, 1).tolist()]
        return cls(readers, reads, ends, trees, extents)


def add_chunks(t: Items, readers: Sequence[Reader], splits: Splits) -> None:
    """Items of all `readers`, of whom long ones, or all together too many, are not split."""
    chunks = Chunks.of(readers)
    room, short, long = SHORT_PARTS, list[Reader](), list[Reader]()
    for reader, extent in zip(readers, chunks.extents, strict=True):
        parts = len(splits.cuts(extent.lo, extent.hi)) if extent.lo < extent.hi else 0
        room -= reader.num_queries * (parts + len(reader.images))
        fits = splits.fixed or (reader.num_queries <= SHORT_CHUNK and room >= 0)
        (short if fits else long).append(reader)
    for some, how in ((long, None), (short, splits)):
        if some:
            _add(t, chunks if len(some) == len(readers) else Chunks.of(some), how)


def _add(t: Items, chunks: Chunks, splits: Splits | None) -> None:
    """With `splits` each run of keys is an item of its own, images first, as for single queries;
    without, a tile of queries reads all its runs in one item, and the longest go first."""
    runs, run, tile, starts, sizes = _pairs(t, chunks, splits)
    bounds = _bounds(runs[run], chunks, starts[tile], sizes[tile])
    used = bounds[:, 0] < bounds[:, 1]
    each = np.bincount(tile[used], minlength=len(starts))  # runs of every tile
    if not each.all():  # a tile that reads nothing has an item that says so
        last = np.empty_like(starts)
        last[tile] = np.arange(len(tile))
        used[last[each == 0]] = True
        each = np.maximum(each, 1)
    run, tile, bounds = run[used], tile[used], bounds[used]
    by_tile = np.argsort(tile if splits else -tile, kind="stable")
    if splits is None:
        run, bounds = run[by_tile], bounds[by_tile]
        tiles = np.arange(len(starts))[::-1]
        each = each[tiles]
        begins, part = np.cumsum(each) - each, each * 0
        counts = np.ones_like(chunks.ends)
    else:
        tiles, begins, part = tile, np.arange(len(tile)), np.empty_like(tile)
        part[by_tile] = begins - np.repeat(np.cumsum(each) - each, each)
        counts, each = np.repeat(each, sizes), np.ones_like(tile)
    first = _add_entries(t, chunks, counts)
    segments = runs[run]
    segments[:, 2:6] = bounds
    begins = begins + t.add_segments(segments)
    large = np.stack([first + starts[tiles], sizes[tiles], begins, each, part], 1)
    t.large.append(array(large, LARGE))


def _add_entries(t: Items, chunks: Chunks, counts: Ints) -> int:
    """All queries' entries; `counts`: how many parts each has. The first one's number."""
    rows = np.concatenate([r.first_row + np.arange(r.num_queries) for r in chunks.readers])
    t.parts.append((rows, counts))
    entries = np.zeros((len(rows), ENTRY), np.int32)
    entries[:, 0] = rows
    entries[:, 3:] = chunks.reads.T
    t.trees += [(r.first_row, r.tree) for r in chunks.readers if r.tree is not None]
    return t.add_entries(entries)


def _pairs(t: Items, chunks: Chunks, splits: Splits | None) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """All runs [R, 8], and which run meets which tile [P, P] of the same reader; the tiles' first
    queries, and how many they have [tiles]."""
    runs: list[Run] = []
    run: list[int] = []
    tile: list[int] = []
    starts: list[int] = []
    sizes: list[int] = []
    first = 0
    for reader, extent in zip(chunks.readers, chunks.extents, strict=True):
        mine, end = _runs(t, reader, extent, splits), first + reader.num_queries
        at = range(first, end, t.queries)
        tiles = range(len(starts), len(starts) + len(at))
        starts += at
        sizes += [min(t.queries, end - start) for start in at]
        for number in range(len(runs), len(runs) + len(mine)):
            run += [number] * len(at)
            tile += tiles
        runs += mine
        first = end
    made = (np.array(x, np.int64) for x in (runs, run, tile, starts, sizes))
    return next(made), next(made), next(made), next(made), next(made)


def _runs(t: Items, reader: Reader, extent: Extent, splits: Splits | None) -> list[Run]:
    """Segments of what any of the queries reads."""
    runs: list[Run] = []
    if extent.visual_lo < extent.visual_hi:
        for part in seen_of(reader.images, extent.visual_lo, extent.visual_hi):
            image = part.image
            pages, base = t.add_pages(image.pages), image.turning
            spans = part.cuts if splits else [(part.lo, part.hi)]
            runs += [(VISION, pages, *span, 0, 0, base, image.first) for span in spans]
    pages = t.add_pages(reader.pages) - reader.first_page
    if reader.sink_tokens:
        sinks = min(reader.sink_tokens, extent.last_lo)
        runs.append((SINKS, pages, 0, sinks, 0, 0, OWN, reader.sink_tokens))
    least, most = (extent.lo, extent.hi) if extent.lo < extent.hi else (0, 0)
    if reader.border is not None and reader.border < most:
        assert not reader.sink_tokens, "sinks are read where they are stored"
        runs.append((TEXT, pages, max(reader.border, least), most, 0, 0, NEWEST, 0))
        least, most = (least, reader.border) if least < reader.border else (0, 0)
    cuts = splits.cuts(least, most) if splits else range(least, most, max(most - least, 1))
    spans = [(max(at, least), min(at + cuts.step, most)) for at in cuts]
    return runs + [(TEXT, pages, *span, 0, 0, OWN, 0) for span in spans or [(0, 0)]]


def _bounds(runs: Ints, chunks: Chunks, starts: Ints, sizes: Ints) -> Ints:
    """For every pair of a run and a tile of queries [P, 4]: [first, end) of the keys that some of
    the queries may read, and of those that all read (nothing if end is not above first)."""
    begins = np.cumsum(sizes) - sizes
    query = np.arange(int(sizes.sum())) + np.repeat(starts - begins, sizes)
    kind, first, last, offset = np.repeat(runs[:, [0, 2, 3, 7]], sizes, 0).T
    text_lo, text_hi, visual_lo, visual_hi = chunks.reads[:, query]
    image = kind == VISION
    lo = np.where(image, visual_lo - offset, text_lo * (kind == TEXT))
    hi = np.where(image, visual_hi - offset, text_hi)
    if (kind == SINKS).any():
        hi = np.where(kind == SINKS, np.minimum(text_lo, offset), hi)
    all_lo, all_hi = some_lo, some_hi = _within(lo, hi, first, last)
    if chunks.trees:
        ends = np.where(kind == TEXT, chunks.ends[query], hi)
        some_lo, some_hi = _within(lo, ends, first, last)
    least, most = np.minimum.reduceat, np.maximum.reduceat
    some = least(some_lo, begins), most(some_hi, begins)
    return np.stack((*some, most(all_lo, begins), least(all_hi, begins)), 1)


def _within(lo: Ints, hi: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """What of [lo, hi) is in [first, last); where nothing is, `last` and `first`."""
    lo = np.minimum(np.maximum(lo, first), last)
    hi = np.minimum(np.maximum(hi, first), last)
    none = lo >= hi
    return np.where(none, last, lo), np.where(none, first, hi)
