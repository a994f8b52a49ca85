"""Which keys every query reads, as tables that a captured GPU launch can read.

Owns the cutting of a step's attention into work items. No torch and no Triton: numpy in, one int32
array out, which the runner uploads in a single copy. Knows nothing of sequences or scheduling.

The array begins with a header of eight: the number of *small* items, of *large* items, and where
large items, segments, entries and merges begin. Then come what the caller puts first (token ids,
positions, slots: the same number every step of one batch size, so that captured launches find
them), the small items, and the rest.

A small item is one query over one run of keys: (row, slot, page ids at, first key, end, base, 0,
0); base -1 means the sequence's own keys, else the position of an image in the vision pool. `slot`
is where the partial result goes, -1 if it is the whole result.

A large item is many queries over several runs: (first entry, entries, first segment, segments,
part). An entry is (row, slot, shift, hi): the query's row in the flat batch, its first slot or -1,
its distance to an image that several sequences share, and how many text tokens of its own it reads.
A segment is (1 for the vision pool, page ids at, first key, end, base, threshold): an image is read
by the queries with threshold < hi. Merges: per row (first slot, count).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

HEADER, SMALL, LARGE, ENTRY, SEGMENT = 8, 8, 5, 4, 6

# Rows (queries times query heads of a KV head) that share one reading of keys.
SMALL_ROWS, LARGE_ROWS = 16, 128

# Longer chunks have queries enough to fill the device unsplit.
SHORT_CHUNK = 64


def split_size(context: int) -> int:
    """Keys of one item of a split context: a function of the query's own context, so that its
    bits do not depend on its batch mates. Short ones want many programs, long ones few slots."""
    return 64 if context <= 640 else 128 if context <= 1280 else 256 if context <= 2560 else 512


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
    """`array` int32; `small`, `large`: items of either kind; `num_slots`: partial results."""

    array: Int32s
    small: int
    large: int
    num_slots: int


@dataclass
class _Builder:
    group: int
    num_rows: int
    small: list[tuple[int, ...]] = field(default_factory=list)
    large: list[tuple[int, ...]] = field(default_factory=list)
    segments: list[tuple[int, ...]] = field(default_factory=list)
    entries: list[tuple[int, ...]] = field(default_factory=list)
    merges: list[tuple[int, int, int]] = field(default_factory=list)  # row, first slot, count
    pages: list[Int32s] = field(default_factory=list)
    num_pages: int = 0
    num_slots: int = 0

    def table(self, pages: Int32s) -> int:
        at = self.num_pages
        self.pages.append(pages)
        self.num_pages += len(pages)
        return at

    def add_large(self, first: int, count: int, segments: tuple[int, int], part: int) -> None:
        """Entries [first, first + count) over the segments, in tiles."""
        most = LARGE_ROWS // self.group
        for at in range(first, first + count, most):
            self.large.append((at, min(most, first + count - at), *segments, part))


_Entry = tuple[int, int, int, int]


def build(
    readers: Sequence[Reader],
    group: int,
    num_rows: int,
    *,
    rows: Int32s | None = None,
    share: bool = True,
) -> WorkTables:
    """The tables of one step. `group`: query heads per KV head; `num_rows` of the flat batch.

    `rows` int32 [N]: what stands between the header and the small items. `share` False reads an
    image once for each of its readers.
    """
    assert group <= LARGE_ROWS, "more query heads per KV head than a tile has rows"
    builder = _Builder(group, num_rows)
    short = [r for r in readers if r.count <= SHORT_CHUNK]
    wanted: dict[Hashable, list[_Entry]] = {}
    known: dict[Hashable, ImagePart] = {}
    if share:
        known = _shared(short)
        wanted = {key: [] for key in known}
    for reader in readers:
        if reader.count > SHORT_CHUNK:
            _add_long(builder, reader)
        else:
            _add_short(builder, reader, wanted)
    for key, image in known.items():
        _add_shared(builder, image, wanted[key])
    return _pack(builder, np.zeros(0, np.int32) if rows is None else rows)


def _shared(readers: Sequence[Reader]) -> dict[Hashable, ImagePart]:
    """Images that stand before all queries of at least two readers."""
    seen: set[Hashable] = set()
    twice: dict[Hashable, ImagePart] = {}
    for reader in readers:
        for image in reader.images:
            if image.threshold < reader.hi:
                if image.key in seen:
                    twice[image.key] = image
                seen.add(image.key)
    return twice


def _add_short(b: _Builder, reader: Reader, wanted: dict[Hashable, list[_Entry]]) -> None:
    """Items of a few queries over a split context; `wanted` gains the entries of shared images."""
    last = reader.last_hi
    size = split_size(last)
    visible = [image for image in reader.images if image.threshold < last]
    cuts = [
        (image, at, min(at + split_size(image.num_tokens), image.num_tokens))
        for image in visible
        for at in range(0, image.num_tokens, split_size(image.num_tokens))
    ]
    spans = range(0, last, size)
    parts = len(spans) + len(cuts)
    slot = b.num_slots if parts > 1 else -1
    if parts > 1:
        b.merges += [(reader.first_row + j, slot + j * parts, parts) for j in range(reader.count)]
        b.num_slots += reader.count * parts
    small = reader.count == 1 and b.group <= SMALL_ROWS
    first = len(b.entries)
    if not small:
        _add_entries(b, reader, slot, parts)
    table = b.table(reader.pages)
    for part, at in enumerate(spans):
        if small:
            place = slot + part if parts > 1 else -1
            b.small.append((reader.first_row, place, table, at, min(at + size, last), -1, 0, 0))
        else:
            b.segments.append((0, table, at, min(at + size, last), 0, 0))
            b.add_large(first, reader.count, (len(b.segments) - 1, 1), part)
    for part, (image, at, stop) in enumerate(cuts, len(spans)):
        if image.key in wanted and image.threshold < reader.hi and parts > 1:
            if at == 0:
                wanted[image.key] += [
                    (reader.first_row + j, slot + j * parts + part, image.base, 1)
                    for j in range(reader.count)
                ]
        elif small:
            place, pages = (slot + part if parts > 1 else -1), b.table(image.pages)
            b.small.append((reader.first_row, place, pages, at, stop, image.base, 0, 0))
        else:
            pages = b.table(image.pages)
            b.segments.append((1, pages, at, stop, image.base, image.threshold))
            b.add_large(first, reader.count, (len(b.segments) - 1, 1), part)


def _add_entries(b: _Builder, reader: Reader, slot: int, parts: int) -> None:
    step = 0 if reader.whole else 1
    for j in range(reader.count):
        place = slot + j * parts if parts > 1 else -1
        b.entries.append((reader.first_row + j, place, 0, reader.hi + j * step))


def _add_shared(b: _Builder, image: ImagePart, entries: list[_Entry]) -> None:
    """All queries that read one image, whoever's they are."""
    first = len(b.entries)
    b.entries += entries
    size, pages = split_size(image.num_tokens), b.table(image.pages)
    for part, at in enumerate(range(0, image.num_tokens, size)):
        b.segments.append((1, pages, at, min(at + size, image.num_tokens), 0, -1))
        b.add_large(first, len(entries), (len(b.segments) - 1, 1), part)


def _add_long(b: _Builder, reader: Reader) -> None:
    """Items of a tile of queries each, over everything they read; the longest first."""
    step = 0 if reader.whole else 1
    table = b.table(reader.pages)
    images = [(image, b.table(image.pages)) for image in reader.images]
    most = LARGE_ROWS // b.group
    start = len(b.entries)
    _add_entries(b, reader, -1, 1)
    for at in reversed(range(0, reader.count, most)):
        size = min(most, reader.count - at)
        last = reader.hi + (at + size - 1) * step
        first = len(b.segments)
        b.segments.append((0, table, 0, last, 0, 0))
        for image, pages in images:
            if image.threshold < last:
                b.segments.append((1, pages, 0, image.num_tokens, image.base, image.threshold))
        b.large.append((start + at, size, first, len(b.segments) - first, 0))


def _pack(b: _Builder, rows: Int32s) -> WorkTables:
    merges = np.zeros((b.num_rows, 2), np.int32)
    for row, slot, count in b.merges:
        merges[row] = slot, count
    tables = [
        rows,
        np.asarray(b.small, np.int32).reshape(-1, SMALL),
        np.asarray(b.large, np.int32).reshape(-1, LARGE),
        np.asarray(b.segments, np.int32).reshape(-1, SEGMENT),
        np.asarray(b.entries, np.int32).reshape(-1, ENTRY),
        merges,
    ]
    starts = [HEADER + sum(t.size for t in tables[:i]) for i in range(len(tables) + 1)]
    pages = starts[-1]  # page ids are found by their place in the whole array
    tables[1][:, 2] += pages
    tables[3][:, 1] += pages
    header = (len(b.small), len(b.large), *starts[2:6], 0, 0)
    flat = [np.asarray(header, np.int32), *(t.reshape(-1) for t in tables), *b.pages]
    return WorkTables(np.concatenate(flat), len(b.small), len(b.large), b.num_slots)
