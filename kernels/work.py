"""Which keys every query reads, as tables that a captured GPU launch can read.

Owns the form of the tables, and what they are made from; mmserve.kernels.work_builder cuts. No
torch and no Triton: numpy in, one int32 array out, which the runner uploads in a single copy. Knows
nothing of sequences or scheduling.

Layers that read alike share tables; a step has a set of tables for each kind of layer. The array
begins with a header of twelve for each set: the number of *small* items and where they begin, the
same of *large* items, where segments, entries, merges and trees begin, and from OF_NEWEST the same
of small items over text in its residual; two are spare, so that each begins at 16 bytes. Then comes
what the caller puts first (token ids, positions, slots: as many every step of one batch size, so
that captured launches find them), and the sets.

Every row has `merges`: (first slot, parts). A query whose keys are cut into several parts writes
each partial result into the slot of that part; with one part the item's result is the row's.

A small item is one query over one run of keys, all of which it reads: (row, part, page ids at,
first key, end, base). `base`: OWN for text, NEWEST for text in its residual, else of an image in
the vision pool: the position that the query is turned back by, or STILL.

A large item is many queries over several runs: (first entry, entries, first segment, segments,
part). An entry is (row, part, shift, lo, hi, visual lo, visual hi): the query's row in the flat
batch, what to add to the item's part, its distance to an image that several sequences share, and
the text and the visual tokens that it reads. A segment is (kind, page ids at, first key, end, first
and end of the keys that all queries of the item read, base, offset). Of TEXT a query reads [lo,
hi), of VISION [visual lo, visual hi) less `offset`, the visual index of the image's first token, of
SINKS the text tokens before both `offset` and lo; a SHARED image all read whole. Queries are turned
back by base + shift, unless base is negative; before a SHARED image by the shifts of the entries
that stand `offset` behind the item's.

Where there are draft trees, each row has a mask of 64 bits among the `trees`, as two numbers, the
lower half first: of TEXT its query reads key hi + j, too, for every bit j. Else trees begin at 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

HEADER, SMALL, LARGE, ENTRY, SEGMENT = 12, 6, 5, 7, 8
OF_NEWEST = 8

OWN, STILL, NEWEST = -1, -2, -3  # bases of what needs no turning: text, images, the residual
TEXT, VISION, SINKS, SHARED = 0, 1, 2, 3  # kinds of segments

# Rows (queries times query heads of a KV head) that share one reading of keys: in a small item, and
# in large ones of short steps and of long; where images have many readers, of short steps with more
# than SHORT_ROWS. Up to SHORT_ROWS a row's bits do not depend on the tile.
SMALL_ROWS, SHORT_ROWS, LONG_ROWS = 16, 32, 128

# Longer chunks have queries enough to fill the device unsplit; so have together those that would
# take more room for partial results.
SHORT_CHUNK, SHORT_PARTS = 256, 16_384

IMAGE_SPLIT = 256  # keys of one item of an image


class Splits(NamedTuple):
    """Keys of one item of what a chunk reads: sizes[i] up to contexts[i] keys, the last beyond.
    Cuts lie at multiples of the size, wherever a context begins."""

    contexts: tuple[int, ...] = (640, 1280, 2560, 65_536)
    sizes: tuple[int, ...] = (64, 128, 256, 512, 4096)

    @property
    def fixed(self) -> bool:
        """One size always, for single queries and every chunk: bits depend on nothing else."""
        return not self.contexts

    def cuts(self, lo: int, hi: int) -> range:
        """Where the items of the keys [lo, hi) begin, the first at or before lo."""
        size = self.sizes[bisect_left(self.contexts, hi - lo)]
        return range(lo // size * size, hi, size)

    def even(self, lo: Ints, hi: Ints, abreast: int) -> tuple[Ints, Ints]:
        """Single queries' contexts [lo, hi) [N] cut evenly: where the first item of each begins,
        and its items' keys. All together are about FULL times `abreast` items, if none would be
        shorter than a block or much longer than MOST_KEYS: many items keep a device busy to the
        end, few leave little to merge."""
        if self.fixed:
            size = np.full_like(lo, self.sizes[0])
            return lo // size * size, size
        start = lo // BLOCK * BLOCK
        contexts = hi - start
        wanted = max(contexts.sum() / (FULL * abreast), BLOCK)
        count = np.rint(
            contexts / np.minimum(wanted, np.maximum(MOST_KEYS, contexts // MOST_ITEMS))
        )
        blocks: Ints = -(-contexts // BLOCK)
        each: Ints = -(-blocks // np.maximum(count, 1).astype(np.int64))
        return start, np.maximum(each, 1) * BLOCK


# Of a query's text, by measurement on an H200.
BLOCK = 64  # keys: items begin at multiples
FULL, MOST_KEYS, MOST_ITEMS = 8, 512, 128

# Short contexts want many programs, long ones few partial results.
SPLITS = Splits()


@dataclass(frozen=True)
class ImagePart:
    """One image of a reader's sequence; `pages` int32 [P] of the vision pool."""

    key: Hashable
    pages: Int32s
    num_tokens: int
    first: int  # visual index of its first token
    base: int | None  # position of its first token; None: its keys are rotated as text's are

    @property
    def turning(self) -> int:
        """The base as tables have it."""
        return STILL if self.base is None else self.base


class Reader(NamedTuple):
    """Some queries of one sequence, rows first_row.. of the flat batch.

    `reads`: text lo, hi and visual lo, hi of each query, ints where all read alike, else integer
    arrays [Q].
    Text stands in `pages` int32 [P], the first of them its page number `first_page`; `images` in
    order, at least those that are read. `sink_tokens`: how many of the first text tokens are read,
    too, where they are before lo. `tree` int64 [Q] (None: 0): of several queries, each reads text
    token hi + j, too, for every bit j of its own. From text token `border` on text is read in the
    residual (None: nowhere), where it is a page whose number is in `pages` in the other's place.
    """

    first_row: int
    num_queries: int
    reads: tuple[Any, Any, Any, Any]
    pages: Int32s
    images: Sequence[ImagePart] = ()
    sink_tokens: int = 0
    first_page: int = 0
    tree: Any = None
    border: int | None = None

    @property
    def matrix(self) -> Ints:
        """`reads` as [4, Q]."""
        reads = np.array(self.reads, np.int64).reshape(4, -1)
        return np.broadcast_to(reads, (4, self.num_queries))

    @property
    def ends(self) -> Ints:
        """[Q]: behind the last text token that each query may read."""
        ends: Ints = self.matrix[1].copy()
        if self.tree is not None:
            bits = self.tree[:, None] >> np.arange(64) & 1
            ends += (bits * np.arange(1, 65)).max(1)
        return ends


def causal(first: int, count: int) -> tuple[Ints, Ints, Ints, Ints]:
    """What `count` text tokens from `first` on read of text alone."""
    none = np.zeros(count, np.int64)
    return none, np.arange(first + 1, first + count + 1), none, none


@dataclass(frozen=True)
class WorkTables:
    """One set: its header and what follows it; `small`, `large`, `newest`: items of each kind, the
    last those small ones that read the residual; `num_slots`: partial results; `tile_rows` of large
    items; `trees`: whether there are any."""

    header: Int32s
    body: Int32s
    small: int
    large: int
    newest: int
    num_slots: int
    tile_rows: int
    trees: bool


def join(sets: Sequence[WorkTables], rows: Int32s | None = None) -> Int32s:
    """The array of all sets, each built for its place in it. `rows`: what stands after the
    headers."""
    first = [] if rows is None else [rows.reshape(-1)]
    return np.concatenate([*(s.header for s in sets), *first, *(s.body for s in sets)])


@dataclass
class Items:
    """Items in the making. What they refer to, page ids among them, is found by its number here."""

    group: int
    tile_rows: int
    small: list[Int32s] = field(default_factory=list)
    large: list[Int32s] = field(default_factory=list)
    newest: list[Int32s] = field(default_factory=list)
    segments: list[Int32s] = field(default_factory=list)
    entries: list[Int32s] = field(default_factory=list)
    parts: list[tuple[Ints, Ints]] = field(default_factory=list)  # rows, and how many each has
    pages: list[Int32s] = field(default_factory=list)
    trees: list[tuple[int, Ints]] = field(default_factory=list)  # first rows, and masks
    num_segments: int = 0
    num_entries: int = 0
    num_pages: int = 0

    @property
    def queries(self) -> int:
        """Of one large item, at most."""
        return max(self.tile_rows // self.group, 1)

    def add_pages(self, pages: Int32s) -> int:
        self.pages.append(pages)
        self.num_pages += len(pages)
        return self.num_pages - len(pages)

    def add_entries(self, entries: Any) -> int:
        self.entries.append(array(entries, ENTRY))
        self.num_entries += len(entries)
        return self.num_entries - len(entries)

    def add_segments(self, segments: Any) -> int:
        self.segments.append(array(segments, SEGMENT))
        self.num_segments += len(segments)
        return self.num_segments - len(segments)


def array(rows: Any, width: int) -> Int32s:
    return np.asarray(rows, np.int32).reshape(-1, width)


_EMPTY = {
    "small": array((), SMALL),
    "large": array((), LARGE),
    "segments": array((), SEGMENT),
    "entries": array((), ENTRY),
    "newest": array((), SMALL),
}


def pack(every: Sequence[Items], num_rows: int, at: int) -> WorkTables:
    """All items of a step of `num_rows` rows as one set whose body begins at `at`."""
    parts = np.zeros(num_rows, np.int64)
    small, large, segments, entries, newest = blocks = [
        np.concatenate([x for items in every for x in getattr(items, name)] or [empty])
        for name, empty in _EMPTY.items()
    ]
    has_trees = any(items.trees for items in every)
    trees = np.zeros(num_rows if has_trees else 0, np.int64)
    for items in every:
        for first, masks in items.trees:
            trees[first:][: len(masks)] = masks
    blocks.append(trees.view(np.int32))
    sizes = (2 * num_rows, *(block.size for block in blocks))
    merges_at, *places, newest_at, trees_at, pages_at = accumulate(sizes, initial=at)
    first_small = first_large = first_segment = first_entry = first_newest = 0
    for items in every:
        for rows, counts in items.parts:
            parts[rows] += counts
        # What was counted from its own kind's beginning here is counted from the array's there.
        end_small = first_small + sum(map(len, items.small))
        end_large = first_large + sum(map(len, items.large))
        end_segment = first_segment + items.num_segments
        small[first_small:end_small, 2] += pages_at
        large[first_large:end_large, 0] += first_entry
        large[first_large:end_large, 2] += first_segment
        segments[first_segment:end_segment, 1] += pages_at
        end_newest = first_newest + sum(map(len, items.newest))
        newest[first_newest:end_newest, 2] += pages_at
        first_small, first_large, first_segment = end_small, end_large, end_segment
        first_entry, first_newest = first_entry + items.num_entries, end_newest
        pages_at += items.num_pages
    slots = np.where(parts > 1, parts, 0)
    ends = slots.cumsum()
    merges = np.empty((num_rows, 2), np.int32)
    merges[:, 0], merges[:, 1] = ends - slots, parts
    header = (len(small), places[0], len(large), *places[1:], merges_at, trees_at * has_trees)
    header += (len(newest), newest_at, 0, 0)
    body = [merges.reshape(-1), *(block.reshape(-1) for block in blocks)]
    for items in every:
        body += items.pages
    tile_rows, num_slots = every[0].tile_rows, int(ends[-1]) if num_rows else 0
    return WorkTables(
        np.array(header, np.int32),
        np.concatenate(body),
        len(small),
        len(large),
        len(newest),
        num_slots,
        tile_rows,
        has_trees,
    )
