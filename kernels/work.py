"""Which keys every query reads, as tables that a captured GPU launch can read.

Owns the cutting of a step's attention into work items. No torch and no Triton: numpy in, one int32
array out, which the runner uploads in a single copy. Knows nothing of sequences or scheduling.

The array begins with a header; every table is found through it, so its place may change from step
to step while the launches that read it stay the same:

    0, 1  number of small items, where they begin      4  segments
    2, 3  number of large items, where they begin      5  entries
    6     page ids                                     7  merges: per row (first slot, count)

An item is (first entry, entries, first segment, segments, part): its entries' queries read its
segments' keys. An entry is (row, slot, shift, hi): the query's row in the flat batch, where its
partial results go (-1: the item's result is the whole result), its distance to an image that
several sequences share, and how many text tokens of its own it reads. A segment is (1 for the
vision pool, its page ids, first key, end, base, threshold): an image is read by the queries with
threshold < hi.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

HEADER = 8
ITEM, ENTRY, SEGMENT = 5, 4, 6

# Rows (queries times query heads of a KV head) that share one reading of keys, per kind of item.
TILE_ROWS = (16, 128)

# Keys of one item of a split context. A constant, so that a query's bits depend on its own context.
SPLIT = 256

# Longer chunks have queries enough to fill the device unsplit.
SHORT_CHUNK = 64


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
    """`array` int32; `items`: how many of each kind; `num_slots`: partial results of the step."""

    array: Int32s
    items: tuple[int, int]
    num_slots: int


@dataclass
class _Builder:
    group: int
    num_rows: int
    items: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = field(
        default_factory=lambda: ([], [])
    )
    segments: list[tuple[int, ...]] = field(default_factory=list)
    entries: list[tuple[int, ...]] = field(default_factory=list)
    pages: list[Int32s] = field(default_factory=list)
    num_pages: int = 0
    num_slots: int = 0
    merges: list[tuple[int, int, int]] = field(default_factory=list)  # row, first slot, count

    def table(self, pages: Int32s) -> int:
        at = self.num_pages
        self.pages.append(pages)
        self.num_pages += len(pages)
        return at

    def add_items(self, first: int, count: int, segments: tuple[int, int], part: int) -> None:
        """Entries [first, first + count) over the segments, in tiles."""
        kind = 0 if count * self.group <= TILE_ROWS[0] else 1
        most = TILE_ROWS[kind] // self.group
        for at in range(first, first + count, most):
            size = min(most, first + count - at)
            self.items[kind].append((at, size, *segments, part))

    def image(self, image: ImagePart, first: int, stop: int, *, shared: bool = False) -> None:
        base, threshold = (0, -1) if shared else (image.base, image.threshold)
        self.segments.append((1, self.table(image.pages), first, stop, base, threshold))


def build(
    readers: Sequence[Reader], group: int, num_rows: int, *, share: bool = True
) -> WorkTables:
    """The tables of one step. `group`: query heads per KV head; `num_rows` of the flat batch.

    `share` False reads an image once for each of its readers.
    """
    assert group <= TILE_ROWS[1], "more query heads per KV head than a tile has rows"
    builder = _Builder(group, num_rows)
    short = [r for r in readers if r.count <= SHORT_CHUNK]
    shared = _shared(short) if share else set()
    wanted: dict[Hashable, list[tuple[int, int, int, int]]] = {key: [] for key in shared}
    known: dict[Hashable, ImagePart] = {}
    for reader in readers:
        if reader.count > SHORT_CHUNK:
            _add_long(builder, reader)
            continue
        for key, entry in _add_short(builder, reader, shared):
            wanted[key] += entry
        known.update({image.key: image for image in reader.images if image.key in shared})
    for key, image in known.items():
        _add_shared(builder, image, wanted[key])
    return _pack(builder)


def _shared(readers: Sequence[Reader]) -> set[Hashable]:
    """Images that stand before all queries of at least two readers."""
    seen: set[Hashable] = set()
    twice: set[Hashable] = set()
    for reader in readers:
        for image in reader.images:
            if image.threshold < reader.hi:
                (twice if image.key in seen else seen).add(image.key)
    return twice


def _add_short(
    b: _Builder, reader: Reader, shared: set[Hashable]
) -> list[tuple[Hashable, list[tuple[int, int, int, int]]]]:
    """Items of a few queries over a split context; returns the entries for shared images."""
    spans = [(at, min(at + SPLIT, reader.last_hi)) for at in range(0, reader.last_hi, SPLIT)]
    visible = [image for image in reader.images if image.threshold < reader.last_hi]
    cuts = [
        (image, at, min(at + SPLIT, image.num_tokens))
        for image in visible
        for at in range(0, image.num_tokens, SPLIT)
    ]
    parts = len(spans) + len(cuts)
    step = 0 if reader.whole else 1
    first = len(b.entries)
    slots = [-1 if parts == 1 else b.num_slots + j * parts for j in range(reader.count)]
    for j, slot in enumerate(slots):
        b.entries.append((reader.first_row + j, slot, 0, reader.hi + j * step))
    if parts > 1:
        b.merges += [(reader.first_row + j, slot, parts) for j, slot in enumerate(slots)]
        b.num_slots += reader.count * parts
    table = b.table(reader.pages)
    out: list[tuple[Hashable, list[tuple[int, int, int, int]]]] = []
    for part, span in enumerate(spans):
        b.segments.append((0, table, *span, 0, 0))
        b.add_items(first, reader.count, (len(b.segments) - 1, 1), part)
    for part, (image, at, stop) in enumerate(cuts, len(spans)):
        if parts > 1 and image.key in shared and image.threshold < reader.hi:
            if at == 0:
                place = [
                    (reader.first_row + j, slot + part, image.base, 1)
                    for j, slot in enumerate(slots)
                ]
                out.append((image.key, place))
            continue
        b.image(image, at, stop)
        b.add_items(first, reader.count, (len(b.segments) - 1, 1), part)
    return out


def _add_shared(b: _Builder, image: ImagePart, entries: list[tuple[int, int, int, int]]) -> None:
    """All queries that read one image, whoever's they are."""
    first = len(b.entries)
    b.entries += entries
    for part, at in enumerate(range(0, image.num_tokens, SPLIT)):
        b.image(image, at, min(at + SPLIT, image.num_tokens), shared=True)
        b.add_items(first, len(entries), (len(b.segments) - 1, 1), part)


def _add_long(b: _Builder, reader: Reader) -> None:
    """Items of a tile of queries each, over everything they read; the longest first."""
    step = 0 if reader.whole else 1
    table = b.table(reader.pages)
    images = [(image, b.table(image.pages)) for image in reader.images]
    most = TILE_ROWS[1] // b.group
    for at in reversed(range(0, reader.count, most)):
        size = min(most, reader.count - at)
        last = reader.hi + (at + size - 1) * step
        first = len(b.segments)
        b.segments.append((0, table, 0, last, 0, 0))
        for image, pages in images:
            if image.threshold < last:
                place = (0, image.num_tokens, image.base, image.threshold)
                b.segments.append((1, pages, *place))
        entry = len(b.entries)
        for j in range(at, at + size):
            b.entries.append((reader.first_row + j, -1, 0, reader.hi + j * step))
        b.items[1].append((entry, size, first, len(b.segments) - first, 0))


def _pack(b: _Builder) -> WorkTables:
    merges = np.zeros((b.num_rows, 2), np.int32)
    for row, slot, count in b.merges:
        merges[row] = slot, count
    tables = [
        np.asarray(b.items[0], np.int32).reshape(-1),
        np.asarray(b.items[1], np.int32).reshape(-1),
        np.asarray(b.segments, np.int32).reshape(-1),
        np.asarray(b.entries, np.int32).reshape(-1),
        merges.reshape(-1),
        np.concatenate([np.zeros(0, np.int32), *b.pages]),
    ]
    small, large, segments, entries, merged, pages = (
        HEADER + sum(len(t) for t in tables[:i]) for i in range(len(tables))
    )
    counts = len(b.items[0]), len(b.items[1])
    header = (counts[0], small, counts[1], large, segments, entries, pages, merged)
    array = np.concatenate([np.asarray(header, np.int32), *tables])
    return WorkTables(array, counts, b.num_slots)
