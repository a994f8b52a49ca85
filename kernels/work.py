"""Which keys every query reads, as tables that a captured GPU launch can read.

Owns the cutting of a step's attention into work items. No torch and no Triton: numpy in, one int32
array out, which the runner uploads in a single copy. Knows nothing of sequences or scheduling.

The array begins with a header of eight: the number of *small* items and where they begin, the same
of *large* items, and where segments, entries and merges begin. Then comes what the caller puts
first (token ids, positions, slots: as many every step of one batch size, so that captured launches
find them), and the tables.

Every row has `merges`: (first slot, parts). A query whose keys are cut into several parts writes
each partial result into the slot of that part; with one part the item's result is the row's.

A small item is one query over one run of keys: (row, part, page ids at, first key, end, base); base
-1 means the sequence's own keys, else the position of an image in the vision pool.

A large item is many queries over several runs: (first entry, entries, first segment, segments,
part). An entry is (row, part, shift, hi): the query's row in the flat batch, what to add to the
item's part, its distance to an image that several sequences share, and how many text tokens of its
own it reads. A segment is (1 for the vision pool, page ids at, first key, end, base, threshold): an
image is read by the queries with threshold < hi.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

HEADER, SMALL, LARGE, ENTRY, SEGMENT = 8, 6, 5, 4, 6

# Rows (queries times query heads of a KV head) that share one reading of keys: in a small item, and
# in large ones of short steps and of long. Up to SHORT_ROWS a row's bits do not depend on the tile.
SMALL_ROWS, SHORT_ROWS, LONG_ROWS = 16, 32, 128

# Longer chunks have queries enough to fill the device unsplit; so have together those that would
# take more room for partial results.
SHORT_CHUNK, SHORT_PARTS = 256, 16_384

IMAGE_SPLIT = 256  # keys of one item of an image


class Splits(NamedTuple):
    """Keys of one item of a split context, by the query's own context, so that its bits do not
    depend on its batch mates: sizes[i] up to contexts[i] keys, the last beyond."""

    contexts: tuple[int, ...] = (640, 1280, 2560, 65_536)
    sizes: tuple[int, ...] = (64, 128, 256, 512, 4096)

    @property
    def fixed(self) -> bool:
        """One size always, and every chunk is cut: bits depend on nothing else."""
        return not self.contexts

    def of(self, contexts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = np.searchsorted(self.contexts, contexts)
        return np.array(self.sizes)[found]

    def cuts(self, context: int) -> range:
        return range(0, context, int(self.of(np.asarray(context))))


# Short contexts want many programs, long ones few partial results.
SPLITS = Splits()


@dataclass(frozen=True)
class ImagePart:
    """One image in front of a reader's queries; `pages` int32 [P] of the vision pool."""

    key: Hashable
    pages: Int32s
    num_tokens: int
    base: int  # position of its first token
    threshold: int  # text index before which it stands


@dataclass(frozen=True)
class Reader:
    """`count` queries of one sequence, rows first_row.. of the flat batch.

    Query j reads the text tokens [0, hi + j) through `pages` int32 [P], or [0, hi) if `whole`.
    """

    first_row: int
    count: int
    hi: int
    pages: Int32s
    images: Sequence[ImagePart] = ()
    whole: bool = False

    @property
    def last_hi(self) -> int:
        return self.hi if self.whole else self.hi + self.count - 1


@dataclass
class WorkTables:
    """`array` int32; `small`, `large`: items of either kind; `num_slots`: partial results;
    `tile_rows` of large items."""

    array: Int32s
    small: int
    large: int
    num_slots: int
    tile_rows: int


@dataclass
class _Tables:
    """Items in the making. Page ids are found by their place among `pages`."""

    group: int
    tile_rows: int
    small: list[tuple[int, ...]] = field(default_factory=list)
    large: list[tuple[int, ...]] = field(default_factory=list)
    segments: list[tuple[int, ...]] = field(default_factory=list)
    entries: list[tuple[int, ...]] = field(default_factory=list)
    parts: dict[int, int] = field(default_factory=dict)  # by row
    pages: list[Int32s] = field(default_factory=list)
    num_pages: int = 0

    def table(self, pages: Int32s) -> int:
        at = self.num_pages
        self.pages.append(pages)
        self.num_pages += len(pages)
        return at

    def add_large(self, first: int, count: int, segments: tuple[int, int], part: int) -> None:
        """Entries [first, first + count) over the segments, in tiles."""
        most = max(self.tile_rows // self.group, 1)
        for at in range(first, first + count, most):
            self.large.append((at, min(most, first + count - at), *segments, part))

    def add_entries(self, reader: Reader) -> int:
        step = 0 if reader.whole else 1
        first = len(self.entries)
        self.entries += [
            (reader.first_row + j, 0, 0, reader.hi + j * step) for j in range(reader.count)
        ]
        return first


class WorkBuilder:
    """Builds the tables of one step after another; what a batch of decoding sequences reads of
    images stays from step to step and is kept."""

    def __init__(self, group: int, splits: Splits = SPLITS) -> None:
        """`group`: query heads per KV head."""
        assert group <= LONG_ROWS, "more query heads per KV head than a tile has rows"
        self.group, self.splits = group, splits
        self.short_rows = SHORT_ROWS if group <= SHORT_ROWS else LONG_ROWS
        self._known: tuple[_Seen, tuple[bool, int], _Tables] | None = None

    def build(
        self,
        readers: Sequence[Reader],
        num_rows: int,
        *,
        rows: Int32s | None = None,
        share: bool = True,
        long: bool = False,
    ) -> WorkTables:
        """The tables of one step of `num_rows` rows; `long`: large items have LONG_ROWS, else
        `short_rows`.

        `rows` int32 [N]: what stands after the header. `share` False reads an image once for each
        of its readers.
        """
        single = [r for r in readers if r.count == 1 and self.group <= SMALL_ROWS]
        chunks = [r for r in readers if r.count > 1 or self.group > SMALL_ROWS]
        tables = _Tables(self.group, LONG_ROWS if long else self.short_rows)
        room = SHORT_PARTS
        for reader in chunks:
            parts = len(self.splits.cuts(reader.last_hi)) + len(reader.images)
            room -= reader.count * parts
            if self.splits.fixed or (reader.count <= SHORT_CHUNK and room >= 0):
                _add_short(tables, reader, self.splits)
            else:
                _add_long(tables, reader)
        images = self._images(single, share, tables.tile_rows)
        own = _own_items(single, images, self.splits)
        return _pack(tables, images, single, own, num_rows, rows)

    def _images(self, single: list[Reader], share: bool, tile_rows: int) -> _Tables:
        seen = tuple(
            (
                r.first_row,
                r.images if not r.images or r.images[-1].threshold < r.hi else _visible(r),
            )
            for r in single
        )
        how = (share, tile_rows)
        if self._known is not None and self._known[1] == how and _same(self._known[0], seen):
            return self._known[2]
        tables = _image_tables(_Tables(self.group, tile_rows), seen, share)
        self._known = (seen, how, tables)
        return tables


_Seen = tuple[tuple[int, Sequence[ImagePart]], ...]


def _visible(reader: Reader) -> Sequence[ImagePart]:
    return tuple(image for image in reader.images if image.threshold < reader.last_hi)


def _same(a: _Seen, b: _Seen) -> bool:
    return len(a) == len(b) and all(
        x[0] == y[0] and x[1] is y[1] for x, y in zip(a, b, strict=True)
    )


def _image_tables(tables: _Tables, seen: _Seen, share: bool) -> _Tables:
    """What single queries read of images: those of several queries once for all of them."""
    holders: dict[Hashable, int] = {}
    for _, images in seen:
        for image in images:
            holders[image.key] = holders.get(image.key, 0) + 1
    shared: dict[Hashable, tuple[ImagePart, list[tuple[int, ...]]]] = {}
    for row, images in seen:
        part = 0
        for image in images:
            cuts = range(0, image.num_tokens, IMAGE_SPLIT)
            if share and holders[image.key] > 1:
                shared.setdefault(image.key, (image, []))[1].append((row, part, image.base, 1))
            else:
                at = tables.table(image.pages)
                for p, cut in enumerate(cuts, part):
                    stop = min(cut + cuts.step, image.num_tokens)
                    tables.small.append((row, p, at, cut, stop, image.base))
            part += len(cuts)
        tables.parts[row] = part
    for image, entries in shared.values():
        first, pages = len(tables.entries), tables.table(image.pages)
        tables.entries += entries
        for part, cut in enumerate(range(0, image.num_tokens, IMAGE_SPLIT)):
            stop = min(cut + IMAGE_SPLIT, image.num_tokens)
            tables.segments.append((1, pages, cut, stop, 0, -1))
            tables.add_large(first, len(entries), (len(tables.segments) - 1, 1), part)
    return tables


def _add_short(t: _Tables, reader: Reader, splits: Splits) -> None:
    """Items of some queries over a split context; images first, as for single queries."""
    first = t.add_entries(reader)
    runs = []
    for image in _visible(reader):
        pages = t.table(image.pages)
        for at in range(0, image.num_tokens, IMAGE_SPLIT):
            stop = min(at + IMAGE_SPLIT, image.num_tokens)
            runs.append((1, pages, at, stop, image.base, image.threshold))
    table, cuts = t.table(reader.pages), splits.cuts(reader.last_hi)
    runs += [(0, table, at, min(at + cuts.step, reader.last_hi), 0, 0) for at in cuts]
    for part, run in enumerate(runs):
        t.segments.append(run)
        t.add_large(first, reader.count, (len(t.segments) - 1, 1), part)
    t.parts.update({reader.first_row + j: len(runs) for j in range(reader.count)})


def _add_long(t: _Tables, reader: Reader) -> None:
    """Items of a tile of queries each, over everything they read; the longest first."""
    step = 0 if reader.whole else 1
    table = t.table(reader.pages)
    images = [(image, t.table(image.pages)) for image in reader.images]
    most = max(t.tile_rows // t.group, 1)
    start = t.add_entries(reader)
    for at in reversed(range(0, reader.count, most)):
        size = min(most, reader.count - at)
        last = reader.hi + (at + size - 1) * step
        first = len(t.segments)
        t.segments.append((0, table, 0, last, 0, 0))
        for image, pages in images:
            if image.threshold < last:
                t.segments.append((1, pages, 0, image.num_tokens, image.base, image.threshold))
        t.large.append((start + at, size, first, len(t.segments) - first, 0))


def _own_items(single: list[Reader], images: _Tables, splits: Splits) -> tuple[Int32s, Int32s]:
    """Small items over the sequences' own keys [n, 6], page ids counted from the first reader's,
    and how many each reader has."""
    if not single:
        return np.zeros((0, SMALL), np.int32), np.zeros(0, np.int32)
    context = np.array([r.hi for r in single])
    size = splits.of(context)
    count = -(-context // size)
    reader = np.repeat(np.arange(len(single)), count)
    part = np.arange(len(reader)) - np.repeat(np.cumsum(count) - count, count)
    pages = np.cumsum([0, *(len(r.pages) for r in single[:-1])])
    before = np.array([images.parts[r.first_row] for r in single])
    rows = np.array([r.first_row for r in single])
    first = part * size[reader]
    items = np.stack(
        [
            rows[reader],
            before[reader] + part,
            pages[reader],
            first,
            np.minimum(first + size[reader], context[reader]),
            np.full(len(reader), -1),
        ],
        1,
    )
    return items.astype(np.int32), count.astype(np.int32)


def _array(rows: list[tuple[int, ...]], width: int) -> Int32s:
    return np.asarray(rows, np.int32).reshape(-1, width)


def _pack(
    chunks: _Tables,
    images: _Tables,
    single: list[Reader],
    own_items: tuple[Int32s, Int32s],
    num_rows: int,
    rows: Int32s | None,
) -> WorkTables:
    own, own_parts = own_items
    parts = np.zeros(num_rows, np.int32)
    for row, count in chunks.parts.items():
        parts[row] = count
    for reader, count in zip(single, own_parts.tolist(), strict=True):
        parts[reader.first_row] = count + images.parts[reader.first_row]
    slots = np.where(parts > 1, parts, 0)
    merges = np.stack([np.cumsum(slots) - slots, parts], 1).astype(np.int32)
    image_small, image_segments = _array(images.small, SMALL), _array(images.segments, SEGMENT)
    image_large = _array(images.large, LARGE)
    image_large[:, 0] += len(chunks.entries)
    image_large[:, 2] += len(chunks.segments)
    first = np.zeros(0, np.int32) if rows is None else rows.reshape(-1)
    sizes = [
        HEADER + len(first) + merges.size,
        image_small.size + own.size,
        (len(chunks.large) + len(image_large)) * LARGE,
        (len(chunks.segments) + len(image_segments)) * SEGMENT,
        (len(chunks.entries) + len(images.entries)) * ENTRY,
    ]
    small_at, large_at, segments_at, entries_at, pages = np.cumsum(sizes).tolist()
    image_small[:, 2] += pages + chunks.num_pages
    image_segments[:, 1] += pages + chunks.num_pages
    own[:, 2] += pages + chunks.num_pages + images.num_pages
    chunk_segments = _array(chunks.segments, SEGMENT)
    chunk_segments[:, 1] += pages
    num_small, num_large = len(image_small) + len(own), sizes[2] // LARGE
    header = (num_small, small_at, num_large, large_at, segments_at, entries_at)
    merges_at = HEADER + len(first)
    array = np.concatenate(
        [
            np.asarray((*header, merges_at, 0), np.int32),
            first,
            merges.reshape(-1),
            image_small.reshape(-1),
            own.reshape(-1),
            _array(chunks.large, LARGE).reshape(-1),
            image_large.reshape(-1),
            chunk_segments.reshape(-1),
            image_segments.reshape(-1),
            _array(chunks.entries, ENTRY).reshape(-1),
            _array(images.entries, ENTRY).reshape(-1),
            *chunks.pages,
            *images.pages,
            *(r.pages for r in single),
        ]
    )
    return WorkTables(array, num_small, num_large, int(slots.sum()), chunks.tile_rows)
