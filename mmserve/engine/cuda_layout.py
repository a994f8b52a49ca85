"""From a batch's chunks to a step's rows and who reads what, in arrays.

Owns the host side of a GPU step: token ids, positions and slots by row, and a `Reader` for each
chunk and layer group. What is read is mmserve.engine.rows's rule; decoding tokens, nearly all there
are, are laid out by a shorter way to the same. Knows nothing of devices or weights.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mmserve.cache.layer_group import LayerGroup
from mmserve.engine import plan
from mmserve.engine.plan import ImageRows
from mmserve.engine.rows import (
    Rows,
    filled_by,
    masks_of,
    num_pages,
    pages_of,
    reads_of,
    regimes_of,
    runs_by_page,
    seen_alone,
    slots_in,
    slots_of,
    turning_row,
)
from mmserve.kernels import work
from mmserve.kernels.reference import NOWHERE, vision_slot
from mmserve.placed import PlacedImage
from mmserve.scheduler.batch import Chunk
from mmserve.sequence import Sequence
from mmserve.spec.draft import Unread

NO_PAGES = np.zeros(0, np.int32)

# A row's id for the first token that a device has grown: below those of what a step has chosen.
GROWN = -1 - 65_536


class Layout(NamedTuple):
    """`rows` int32 [lines, T]: token ids, positions by axis, regimes where there are several, by
    group `filled`, where one has a residual, and slots. `readers` by group; `last`: each chunk's
    last row; `images`: the rows that are images'; `apart`: no row reads what another one fills."""

    rows: Any
    readers: list[list[work.Reader]]
    last: list[int]
    images: list[ImageRows]
    apart: bool = False


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
    """Lays steps out as `planner` does, by the same rules."""

    def __init__(self, planner: plan.Planner, *, scaled: bool = False) -> None:
        """`scaled`: rows are told their regimes, because the model rotates by itself."""
        self.groups, self.page_size, self.sight = planner.groups, planner.page_size, planner.sight
        self.axes, self.scaled, self.blocks = max(planner.axes, 1), scaled, planner.blocks
        self._by_table = not planner.axes
        self._several = scaled or len(self.blocks) > 1  # regimes
        whole = all(g.text and g.images and g.window is None for g in self.groups)
        self._fills = any(group.residual for group in self.groups)
        self._simple = whole and not (self._several or self._fills)  # all is read where it lies
        self._lanes: weakref.WeakKeyDictionary[Sequence, list[_Lane]] = weakref.WeakKeyDictionary()

    @property
    def takes_grown(self) -> bool:
        """Whether a draft may be laid out that only the device has seen."""
        return self._simple and not self.sight.whole_prompt

    @property
    def num_lines(self) -> int:
        """Of `Layout.rows`."""
        return 1 + self.axes + self.scaled + (1 + self._fills) * len(self.groups)

    def blank(self, count: int) -> Any:
        """int32 [lines, count]: rows that nobody asked for, and that are stored nowhere."""
        rows = np.zeros((self.num_lines, count), np.int32)
        rows[1 + self.axes + self.scaled :] = NOWHERE
        return rows

    def step(self, chunks: list[Chunk]) -> Layout:
        """Chunks of a single row come first."""
        num_decoding = next((n for n, c in enumerate(chunks) if not self._decodes(c)), len(chunks))
        readers: list[list[work.Reader]] = [[] for _ in self.groups]
        parts = [self._tokens(chunks[:num_decoding], readers)] if num_decoding else []
        total, last, images = num_decoding, list(range(num_decoding)), list[ImageRows]()
        for chunk in chunks[num_decoding:]:
            if self._guesses(chunk):
                rows = self._draft(chunk, total, readers)
            else:
                rows, found = self._chunk(chunk, total, readers)
                images += found
            parts.append(rows)
            total += rows.shape[1]
            last.append(total - 1)
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        return Layout(rows, readers, last, images, num_decoding == len(chunks))

    def image(
        self,
        key: bytes,
        pages: list[list[int]],
        num_tokens: int,
        *,
        regime: int = 0,
        positions: Any = None,
    ) -> Layout:
        """An image alone, at positions from 0: it reads nothing but itself. `pages`: its vision
        pages by group; `positions` [axes, num_tokens] where they are not simply 0, 1, 2 ..."""
        index = np.arange(num_tokens)
        rows = self.blank(num_tokens)
        where = rows[1 : 1 + self.axes]
        where[:] = index if positions is None else np.asarray(positions)
        where += self._first_row(regime)
        if self.scaled:
            rows[1 + self.axes] = regime
        readers = []
        for number, (group, held) in enumerate(zip(self.groups, pages, strict=True)):
            mine = np.array(held, np.int32)
            rows[number - len(self.groups)] = vision_slot(slots_in(mine, index, self.page_size))
            part = work.ImagePart(key, mine, num_tokens, 0, None)
            reads = (index * 0, index * 0, *seen_alone(num_tokens, group, self.sight))
            readers.append([work.Reader(0, num_tokens, reads, NO_PAGES, (part,))])
        return Layout(rows, readers, [num_tokens - 1], [])

    # -- decoding -------------------------------------------------------------------------------

    def _decodes(self, chunk: Chunk) -> bool:
        if chunk.count != 1 or chunk.images or chunk.draft is not None:
            return False
        return not self.sight.whole_prompt or chunk.start >= chunk.seq.num_prompt_tokens

    def _tokens(self, chunks: list[Chunk], readers: list[list[work.Reader]]) -> Any:
        """The rows of text tokens, one a chunk; their readers are added."""
        seqs, index = [c.seq for c in chunks], [c.start for c in chunks]
        visual = [seq.visual_before(i) for seq, i in zip(seqs, index, strict=True)]
        position = [seq.position(i) for seq, i in zip(seqs, index, strict=True)]
        lanes = [self._lanes_of(seq) for seq in seqs]
        rows = self.blank(len(chunks))
        rows[0] = [seq.token_ids[i] for seq, i in zip(seqs, index, strict=True)]
        if self._several:
            regimes = [seq.course.at(p) for seq, p in zip(seqs, position, strict=True)]
            rows[1 + self.axes] = regimes  # or slots, below
            position = [p + self._first_row(r) for p, r in zip(position, regimes, strict=True)]
        rows[1 : 1 + self.axes] = position
        size = self.page_size
        pages = [i // size for i in index]
        offset = np.array(index, np.int32) % size
        for number, group in enumerate(self.groups):
            mine = [lane[number] for lane in lanes]
            slots = rows[number - len(self.groups)]
            if group.text:
                slots[:] = [lane.source[p] for lane, p in zip(mine, pages, strict=True)]
                held = [lane.cover(p + 1) for lane, p in zip(mine, pages, strict=True)]
                if group.residual:
                    last = offset == size - 1
                    rows[number - 2 * len(self.groups)] = np.where(last, slots, NOWHERE)
                    slots[:] = [seq.open_pages[p] for seq, p in zip(seqs, pages, strict=True)]
                    held = [_with(had, p, n) for had, p, n in zip(held, pages, slots, strict=True)]
                slots *= size
                slots += offset
            else:
                slots[:] = NOWHERE
                held = [NO_PAGES] * len(chunks)
            if group.text and group.images and group.window is None:
                reads = [(0, i + 1, 0, v) for i, v in zip(index, visual, strict=True)]
            else:
                reads = [self._reads(c, v, group) for c, v in zip(chunks, visual, strict=True)]
            readers[number] += [
                _reader(row, 1, read, page, lane.images, group, size)
                for row, (read, page, lane) in enumerate(zip(reads, held, mine, strict=True))
            ]
            if group.residual:
                newest = zip(readers[number], pages, strict=True)
                readers[number][:] = [r._replace(border=page * size) for r, page in newest]
        return rows

    def _first_row(self, regime: int) -> int:
        """The table's row of position 0, where rows are rotated by it."""
        return self.blocks[regime].rotating if self._by_table else 0

    def _reads(self, chunk: Chunk, visual: int, group: LayerGroup) -> tuple[int, int, int, int]:
        """What a text token reads, by the rules that layers differ in."""
        seq, index = chunk.seq, chunk.start
        if not group.text:
            rows = Rows.of(chunk, 1)
            found = reads_of(seq, rows, group, self.sight)
            lo, hi, visual_lo, visual_hi = (int(part[0]) for part in found)
            return lo, hi, visual_lo, visual_hi
        lo, visual_lo = 0, 0
        if group.window is not None:
            lo, visual_lo = seq.window_start(index, visual, group.window)
        return (lo, index + 1, visual_lo, visual) if group.images else (lo, index + 1, 0, 0)

    # -- decoding with a draft ------------------------------------------------------------------

    def _guesses(self, chunk: Chunk) -> bool:
        if chunk.draft is None or not self._simple:
            return False
        return not self.sight.whole_prompt or chunk.start >= chunk.seq.num_prompt_tokens

    def _draft(self, chunk: Chunk, first: int, readers: list[list[work.Reader]]) -> Any:
        """The rows of the last known token and of a draft, from the flat row `first` on; their
        readers are added."""
        seq, start, draft, size = chunk.seq, chunk.start, chunk.draft, self.page_size
        assert draft is not None
        count, known = 1 + len(draft), start + 1
        position, visual = seq.position(known) - 1, seq.num_image_tokens
        reads: Any = (0, known, 0, visual)  # of all rows, but for whom of themselves they see
        if draft.is_chain or seq.visual_before(start) != visual:
            none, seen = np.zeros(count, np.int64), np.full(count, visual)
            seen[0] = seq.visual_before(start)
            reads = (none, known + none, none, seen)
        masks: Any = None
        rows = np.empty((self.num_lines, count), np.int32)
        ids, positions = rows[0], rows[1 : 1 + self.axes]
        ids[0], positions[:, 0] = seq.token_ids[start], seq.position(start)
        if isinstance(draft, Unread):  # the device tells who of them is seen by whom
            first_id = GROWN - draft.place
            ids[1:], positions[:, 1:] = np.arange(first_id, first_id - len(draft), -1), position
            masks = np.full(count, (1 << len(draft)) - 1)
            masks[0] = 0
        else:
            ids[1:], positions[:, 1:] = draft.tokens, draft.depths
            positions[:, 1:] += position
            if draft.is_chain:
                reads[1][:] += np.arange(count)
            else:
                masks = np.array([0, *draft.masks], np.int64)
        rows[1] += self._first_row(0)
        at = np.arange(start, start + count)
        page, offset = at // size, at % size
        for number, lane in enumerate(self._lanes_of(seq)):
            pages = lane.cover(-(-(start + count) // size))
            rows[number - len(self.groups)] = pages[page] * size + offset
            readers[number].append(work.Reader(first, count, reads, pages, lane.images, tree=masks))
        return rows

    # -- chunks ---------------------------------------------------------------------------------

    def _chunk(
        self, chunk: Chunk, first: int, readers: list[list[work.Reader]]
    ) -> tuple[Any, list[ImageRows]]:
        """A chunk's rows from the flat row `first` on; its readers are added."""
        seq, rows = chunk.seq, Rows.of(chunk, self.axes)
        lines = self.blank(len(rows))
        regimes, first_slots = regimes_of(seq, rows), self.num_lines - len(self.groups)
        lines[0], lines[1 : 1 + self.axes] = rows.ids, rows.positions
        if self._by_table:
            lines[1] += np.array([block.rotating for block in self.blocks], np.int32)[regimes]
        if self.scaled:
            lines[1 + self.axes] = regimes
        for number, (group, lane) in enumerate(
            zip(self.groups, self._lanes_of(seq, anew=not chunk.decodes), strict=True)
        ):
            reads: Any = reads_of(seq, rows, group, self.sight)
            masks = masks_of(rows, group)
            pages = lane.cover(num_pages(reads, masks, self.page_size))
            lines[first_slots + number] = slots_of(chunk, rows, number, group, self.page_size)
            if group.residual:
                filled = filled_by(chunk, rows, number, self.page_size)
                lines[first_slots - len(self.groups) + number] = filled
                readers[number] += self._by_page(chunk, rows, reads, first, lane, group)
                continue
            if len(rows) == 1:
                reads = tuple(int(part[0]) for part in reads)
            reader = _reader(first, len(rows), reads, pages, lane.images, group, self.page_size)
            readers[number].append(reader._replace(tree=masks))
        images = []
        for context in chunk.images:
            mine = rows.image == seq.images.index(context.placed)
            images.append(ImageRows(first + int(mine.argmax()), context.placed))
        return lines, images

    def _by_page(
        self, chunk: Chunk, rows: Rows, reads: Any, first: int, lane: _Lane, group: LayerGroup
    ) -> list[work.Reader]:
        """A chunk's readers, of each page its own, where that is read in the residual."""
        found, size = list[work.Reader](), self.page_size
        for begin, end, page in runs_by_page(rows, size):
            some: Any = tuple(part[begin:end] for part in reads)
            pages = lane.cover(num_pages(some, None, size))
            pages = _with(pages, page, chunk.seq.open_pages.get(page, 0))
            if end - begin == 1:
                some = tuple(int(part[0]) for part in some)
            made = _reader(first + begin, end - begin, some, pages, lane.images, group, size)
            found.append(made._replace(border=page * size))
        return found

    # -- what is kept from step to step ---------------------------------------------------------

    def _lanes_of(self, seq: Sequence, *, anew: bool = False) -> list[_Lane]:
        """By group. Decoding changes nothing but the number of pages; `anew`: more may have."""
        lanes = None if anew else self._lanes.get(seq)
        if lanes is not None:
            for lane, table in zip(lanes, seq.tables, strict=True):
                if lane.source is not table or lane.shown is not seq.images or not lane.settled:
                    break
            else:
                return lanes
        lanes = [self._lane(seq, number) for number in range(len(self.groups))]
        self._lanes[seq] = lanes
        return lanes

    def _lane(self, seq: Sequence, number: int) -> _Lane:
        group = self.groups[number]
        shown = seq.images if group.images else []
        passed = 0 if group.window is None else seq.split(max(seq.length - group.window, 0))[1]
        images, settled = [], True
        for placed in shown:
            if placed.pages and placed.pages[number]:
                images.append(self._part(seq, placed, number))
            elif placed.visual_index + placed.image.num_tokens > passed:
                settled = False
        pages = np.zeros(64, np.int32)
        return _Lane(seq.tables[number], pages, 0, seq.images, tuple(images), settled)

    def _part(self, seq: Sequence, placed: PlacedImage, number: int) -> work.ImagePart:
        pages = np.array(pages_of(placed, number, self.page_size), np.int32)
        base = turning_row(seq, placed, self.groups[number], self.blocks)
        key = (placed.key, placed.skip)
        return work.ImagePart(key, pages, placed.image.num_tokens, placed.visual_index, base)


def slices(chunks: list[Chunk], size: int) -> list[list[Chunk]]:
    """The same rows in steps of `size`, the last of what is left; a draft is not cut."""
    assert not any(chunk.images for chunk in chunks), "an image in its context is never cut"
    made: list[list[Chunk]] = [[]]
    room = size
    for chunk in chunks:
        if chunk.draft is not None:
            assert chunk.num_rows <= size
            if chunk.num_rows > room:
                made.append([])
                room = size
            made[-1].append(chunk)
            room -= chunk.num_rows
            continue
        start, end = chunk.start, chunk.start + chunk.count
        while start < end:
            if not room:
                made.append([])
                room = size
            count = min(end - start, room)
            samples = chunk.samples and start + count == end
            made[-1].append(Chunk(chunk.seq, start, count, samples))
            start, room = start + count, room - count
    return [part for part in made if part]


def _with(pages: Any, number: int, page: int) -> Any:
    """A copy in which a page stands under this number, if that is read at all."""
    pages = pages.copy()
    pages[number : number + 1] = page
    return pages


def _reader(
    row: int,
    count: int,
    reads: Any,
    pages: Any,
    images: tuple[work.ImagePart, ...],
    group: LayerGroup,
    size: int,
) -> work.Reader:
    """Without the pages that a window has passed."""
    if group.window is None:
        return work.Reader(row, count, reads, pages, images)
    passed = (reads[0] if count == 1 else int(reads[0].min())) // size
    return work.Reader(row, count, reads, pages[passed:], images, first_page=passed)
