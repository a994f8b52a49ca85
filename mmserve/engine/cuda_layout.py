"""From a batch's chunks to a step's rows and who reads what, in arrays.

Owns the host side of a GPU step: token ids, positions and slots by row, and a `Reader` for each
chunk and layer group. What is read is mmserve.engine.plan's rule; a decoding token, which is nearly
all there ever is, is laid out by a shorter way to the same. Knows nothing of devices or weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mmserve.cache.layer_group import LayerGroup
from mmserve.engine import plan
from mmserve.engine.plan import ImageRows
from mmserve.kernels import work
from mmserve.kernels.reference import NOWHERE, vision_slot
from mmserve.model.adapter import Sight
from mmserve.model.rope import Block
from mmserve.request import PlacedImage, Sequence
from mmserve.scheduler.batch import Chunk

NO_PAGES = np.zeros(0, np.int32)


class Layout(NamedTuple):
    """`rows` int32 [lines, T]: token ids, positions by axis, regimes where there are several, slots
    by group. `readers` by group; `last`: each chunk's last row; `images`: the rows that are
    images'."""

    rows: Any
    readers: list[list[work.Reader]]
    last: list[int]
    images: list[ImageRows]


@dataclass
class _Lane:
    """A sequence's page ids in one group as an array; `source` is the list that it copies `count`
    of. `images`: those of `shown` that hold pages; `settled`: no other will be read."""

    source: list[int]
    pages: Any
    count: int
    shown: list[PlacedImage]
    images: tuple[work.ImagePart, ...]
    settled: bool

    def cover(self, num_pages: int) -> Any:
        """int32 [num_pages]."""
        if num_pages > len(self.pages):
            self.pages = np.concatenate([self.pages, np.zeros(num_pages, np.int32)])
        if num_pages > self.count:
            self.pages[self.count : num_pages] = self.source[self.count : num_pages]
            self.count = num_pages
        return self.pages[:num_pages]


class CUDALayout:
    """Lays out steps of a model with these layer groups."""

    def __init__(
        self,
        groups: List[LayerGroup],
        page_size: int,
        *,
        sight: Sight,
        axes: int = 1,
        blocks: List[Block] = (),
        scaled: bool = False,
    ) -> None:
        """`blocks`: where each regime begins in the table that rotates rows and turns queries back
        before images; none where the model rotates by itself, and images with it, by `axes` of
        positions and, if `scaled`, by regimes.
        """
        self.groups, self.page_size, self.sight = groups, page_size, sight
        self.axes, self.blocks, self.scaled = axes, blocks, scaled
        self._lanes: weakref.WeakKeyDictionary[Sequence, list[_Lane]] = weakref.WeakKeyDictionary()

    @property
    def num_lines(self) -> int:
        """Of `Layout.rows`."""
        return 1 + self.axes + self.scaled + len(self.groups)

    def step(self, chunks: list[Chunk]) -> Layout:
        """Chunks of a single row come first."""
        decoding: list[tuple[int, ...]] = []
        longer: list[Any] = []
        readers: list[list[work.Reader]] = [[] for _ in self.groups]
        last: list[int] = []
        images: list[ImageRows] = []
        total = 0
        for chunk in chunks:
            if not longer and self._is_decoding(chunk):
                decoding.append(self._token(chunk.seq, chunk.start, total, readers))
                total += 1
            else:
                rows, found = self._chunk(chunk, total, readers)
                longer.append(rows)
                images += found
                total += rows.shape[1]
            last.append(total - 1)
        first = np.array(decoding, np.int32).reshape(-1, self.num_lines).T
        rows = np.concatenate([first, *longer], 1) if longer else first
        return Layout(rows, readers, last, images)

    def image(self, key: bytes, pages: list[list[int]], num_tokens: int, regime: int = 0) -> Layout:
        """An image alone, at positions from 0: all of it reads all of it. `pages`: its vision pages
        by group."""
        index = np.arange(num_tokens)
        still = index * 0
        positions = index + self.blocks[regime].rotating
        reads = (still, still, still, still + num_tokens)
        held = [np.array(mine, np.int32) for mine in pages]
        slots = [vision_slot(_slots(mine, index, self.page_size)) for mine in held]
        readers = [
            [work.Reader(0, num_tokens, reads, NO_PAGES, (part,))]
            for part in (work.ImagePart(key, mine, num_tokens, 0, None) for mine in held)
        ]
        rows = np.array([still, positions, *slots], np.int32)
        return Layout(rows, readers, [num_tokens - 1], [])

    # -- decoding -------------------------------------------------------------------------------

    def _is_decoding(self, chunk: Chunk) -> bool:
        prompt = self.sight.whole_prompt and chunk.start < chunk.seq.num_prompt_tokens
        return chunk.count == 1 and not chunk.images and not prompt

    def _token(
        self, seq: Sequence, index: int, row: int, readers: list[list[work.Reader]]
    ) -> tuple[int, ...]:
        """A text token's column of the rows; its readers are added."""
        lanes, size = self._lanes_of(seq), self.page_size
        visual = seq.visual_before(index)
        position = seq.position(index)
        regime = seq.course.at(position)
        if self.blocks:
            position += self.blocks[regime].rotating
        place = [seq.token_ids[index], *[position] * self.axes, *[regime] * self.scaled]
        for number, (group, lane) in enumerate(zip(self.groups, lanes, strict=True)):
            if not group.text:
                reads, pages = self._crossed(seq, index, group), NO_PAGES
                place.append(NOWHERE)
            else:
                reads, pages = (0, index + 1, 0, visual), lane.cover(index // size + 1)
                place.append(seq.tables[number][index // size] * size + index % size)
                if group.window is not None:
                    lo, visual_lo = seq.window_start(index, visual, group.window)
                    reads = (lo, index + 1, visual_lo, visual)
                if not group.images:
                    reads = (reads[0], index + 1, 0, 0)
            readers[number].append(work.Reader(row, 1, reads, pages, lane.images))
        return tuple(place)

    def _crossed(self, seq: Sequence, index: int, group: LayerGroup) -> tuple[int, int, int, int]:
        rows = plan._Rows.of(Chunk(seq, index, 1, False), 1)
        lo, hi, visual_lo, visual_hi = (
            int(part[0]) for part in plan._reads(seq, rows, group, self.sight)
        )
        return lo, hi, visual_lo, visual_hi

    # -- chunks ---------------------------------------------------------------------------------

    def _chunk(
        self, chunk: Chunk, first: int, readers: list[list[work.Reader]]
    ) -> tuple[Any, list[ImageRows]]:
        """A chunk's rows from the flat row `first` on; its readers are added."""
        seq, rows = chunk.seq, plan._Rows.of(chunk, self.axes)
        lines = np.empty((self.num_lines, len(rows)), np.int32)
        regimes, first_slots = plan._regimes(seq, rows), self.num_lines - len(self.groups)
        lines[0], lines[1 : 1 + self.axes] = rows.ids, rows.positions
        if self.blocks:
            lines[1] += np.array([block.rotating for block in self.blocks])[regimes]
        if self.scaled:
            lines[1 + self.axes] = regimes
        for number, (group, lane) in enumerate(
            zip(self.groups, self._lanes_of(seq, anew=True), strict=True)
        ):
            reads: Any = plan._reads(seq, rows, group, self.sight)
            pages = lane.cover(-(-int(reads[1].max()) // self.page_size))
            lines[first_slots + number] = self._slots(chunk, rows, number)
            if len(rows) == 1:
                reads = tuple(int(part[0]) for part in reads)
            reader = work.Reader(first, len(rows), reads, pages, lane.images)
            readers[number].append(reader)
        images = []
        for context in chunk.images:
            mine = rows.image == seq.images.index(context.placed)
            images.append(ImageRows(first + int(mine.argmax()), context.placed))
        return lines, images

    def _slots(self, chunk: Chunk, rows: Any, number: int) -> Any:
        """Where each row is stored in a group's pools."""
        slots, group, size = np.full(len(rows), NOWHERE), self.groups[number], self.page_size
        if group.text:
            text = rows.image < 0
            table = np.array(chunk.seq.tables[number], np.int64)
            slots[text] = _slots(table, rows.text[text], size)
        for context in chunk.images:
            pages = context.placed.pages and context.placed.pages[number]
            if context.writes[number] and pages:
                mine = rows.image == chunk.seq.images.index(context.placed)
                local = np.arange(context.placed.image.num_tokens)
                slots[mine] = vision_slot(_slots(np.array(pages), local, size))
        return slots

    # -- what is kept from step to step ---------------------------------------------------------

    def _lanes_of(self, seq: Sequence, *, anew: bool = False) -> list[_Lane]:
        """By group. Decoding changes nothing but the number of pages; `anew`: more may have."""
        lanes = None if anew else self._lanes.get(seq)
        if lanes is None or not all(
            lane.settled and lane.source is table and lane.shown is seq.images
            for lane, table in zip(lanes, seq.tables, strict=True)
        ):
            lanes = [self._lane(seq, number) for number in range(len(self.groups))]
            self._lanes[seq] = lanes
        return lanes

    def _lane(self, seq: Sequence, number: int) -> _Lane:
        group = self.groups[number]
        shown = seq.images if group.images else []
        passed = 0 if group.window is None else seq.split(max(seq.length - group.window, 0))[1]
        first = self.blocks[seq.course.regime].turning if self.blocks else None
        images, settled = [], True
        for placed in shown:
            if placed.pages and placed.pages[number]:
                images.append(_part(placed, number, first))
            elif placed.visual_index + placed.image.num_tokens > passed:
                settled = False
        pages = np.zeros(64, np.int32)
        return _Lane(seq.tables[number], pages, 0, seq.images, tuple(images), settled)


def _part(placed: PlacedImage, number: int, first: int | None) -> work.ImagePart:
    """An image in a group. `first`: the row of position 0 in the table that turns queries back
    before it; None: they are not turned."""
    assert placed.pages is not None
    pages = np.array(placed.pages[number], np.int32)
    base = None if first is None else first + placed.base
    return work.ImagePart(placed.key, pages, placed.image.num_tokens, placed.visual_index, base)


def _slots(pages: Any, index: Any, page_size: int) -> Any:
    """Where the tokens `index` [T] of a sequence with these pages stand in its pool."""
    return pages[index // page_size] * page_size + index % page_size
