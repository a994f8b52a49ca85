"""What the rows of draft trees read, as large items: the few that they are, without arrays.

Owns the cutting where a tree's rows read alike but for who of themselves they see. Other chunks are
mmserve.kernels.work_chunks's, which takes these, too, ten times as slowly: a step with drafts waits
for it. Knows nothing of who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmserve.kernels.work import (
    ENTRY,
    LARGE,
    OWN,
    SEGMENT,
    SHORT_PARTS,
    TEXT,
    VISION,
    Items,
    Reader,
    Splits,
    array,
)
from mmserve.kernels.work_crowds import seen_of

Run = tuple[int, ...]  # a segment


def add_drafts(t: Items, readers: Sequence[Reader], splits: Splits) -> Sequence[Reader]:
    """Items of those of the `readers` that are trees of alike rows, each run of keys an item of its
    own, images first; the others are given back. All are where these would take much room."""
    if splits.fixed:
        return readers
    trees = [reader for reader in readers if _fits(reader)]
    if not trees:
        return readers
    mine = [_runs(t, reader, splits) for reader in trees]
    if sum(r.num_queries * len(runs) for r, runs in zip(trees, mine, strict=True)) > SHORT_PARTS:
        return readers
    entries = np.zeros((sum(reader.num_queries for reader in trees), ENTRY), np.int32)
    first = t.add_entries(entries)
    entries, at = t.entries[-1], 0
    segments: list[Run] = []
    large: list[tuple[int, ...]] = []
    begin = t.num_segments
    for reader, runs in zip(trees, mine, strict=True):
        count = reader.num_queries
        rows = np.arange(reader.first_row, reader.first_row + count)
        own = entries[at : at + count]
        own[:, 0], own[:, 3:] = rows, reader.reads
        tiles = [(first + at + n, min(t.queries, count - n)) for n in range(0, count, t.queries)]
        for part, run in enumerate(runs):
            large += [(*tile, begin + len(segments), 1, part) for tile in tiles]
            segments.append(run)
        t.parts.append((rows, np.full(count, len(runs))))
        t.trees.append((reader.first_row, reader.tree))
        at += count
    t.add_segments(array(segments, SEGMENT))
    t.large.append(array(large, LARGE))
    return [reader for reader in readers if not _fits(reader)]


def _fits(reader: Reader) -> bool:
    alike = isinstance(reader.reads[1], int)
    return reader.tree is not None and alike and not reader.sink_tokens


def _runs(t: Items, reader: Reader, splits: Splits) -> list[Run]:
    """Segments of what any of its queries reads, and of it what all of them do."""
    lo, hi, visual_lo, visual_hi = reader.reads
    runs: list[Run] = []
    for seen in seen_of(reader.images, visual_lo, visual_hi):
        image = seen.image
        at, base = t.add_pages(image.pages), image.turning
        runs += [(VISION, at, *cut, *cut, base, image.first) for cut in seen.cuts]
    at = t.add_pages(reader.pages) - reader.first_page
    # The highest bit of any mask, of 64: as a signed number it is below 0.
    end = hi + (64 if reader.tree.min() < 0 else int(reader.tree.max()).bit_length())
    cuts = splits.cuts(lo, end)
    for start in cuts:
        first, last = max(start, lo), min(start + cuts.step, end)
        whole = (first, min(hi, last)) if first < hi else (last, first)
        runs.append((TEXT, at, first, last, *whole, OWN, 0))
    return runs
