"""From a batch's chunks to the index tensors of one forward pass.

Owns the order of tokens in the flat batch: first all chunks of a single row (decoding) as one
group, then each longer chunk as a group of its own, an image's rows before the text token that it
stands before. Knows nothing of weights or pools' contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmserve.cache.layer_group import LayerGroup
from mmserve.engine.rows import (
    Ints,
    Rows,
    filled_by,
    masks_of,
    num_pages,
    pages_of,
    read_through,
    reads_of,
    regimes_of,
    runs_by_page,
    seen_alone,
    slots_in,
    slots_of,
    turning_row,
)
from mmserve.engine.transfer import resolve_pending
from mmserve.kernels.reference import AttentionPlan, QueryGroup, vision_slot
from mmserve.model.adapter import CAUSAL, Sight
from mmserve.model.rope import Block
from mmserve.placed import PlacedImage
from mmserve.scheduler.batch import Chunk


class ImageRows(NamedTuple):
    """The rows [first, first + num_tokens) of the flat batch are this image's."""

    first: int
    placed: PlacedImage


def chosen_rows(chunks: Sequence[Chunk], last: Sequence[int]) -> list[int]:
    """The flat rows whose successor is chosen, chunk by chunk. `last`: each chunk's last row."""
    return [
        row
        for chunk, end in zip(chunks, last, strict=True)
        for row in range(end + 1 - chunk.num_chosen, end + 1)
    ]


class StepInput(NamedTuple):
    """`token_ids` [T] int64 (0 in an image without tokens of its own), `positions` [T] or
    [axes, T] int64, or the table's rows for them where the plan's angles are used; `regimes` [T]
    int64 (None: all 0); `order`: the chunks as laid out; `last`: the flat row of each chunk's last
    token, in that order; `plans`: by layer group."""

    token_ids: Tensor
    positions: Tensor
    regimes: Tensor | None
    order: list[Chunk]
    last: list[int]
    plans: tuple[AttentionPlan, ...]
    images: list[ImageRows]


# Text [lo, hi) and visual [lo, hi) of each row, or of the only one.
Reads = tuple[Any, Any, Any, Any]


class _GroupBuilder:
    """One layer group's plan in the making."""

    def __init__(
        self,
        number: int,
        group: LayerGroup,
        sight: Sight,
        table: Tensor,
        page_size: int,
        blocks: Sequence[Block],
    ) -> None:
        self.number, self.group, self.sight = number, group, sight
        self.table, self.page_size, self.blocks = table, page_size, blocks
        self.slots: list[Any] = []
        self.filled: list[Ints] = []
        self.groups: list[QueryGroup] = []

    def add(self, chunks: list[Chunk], rows: list[Rows | None], start: int) -> None:
        """Single rows, or one chunk of several, the first at row `start` of the flat batch; None:
        the row is one text token, as nearly all are while decoding."""
        reads: list[Reads] = []
        masks: Ints | None = None
        for chunk, part in zip(chunks, rows, strict=True):
            read, slots = self._token(chunk) if part is None else self._chunk(chunk, part)
            reads.append(read)
            self.slots.append(slots)
            if part is not None:
                masks = masks_of(part, self.group)
        if not self.group.residual:
            return self._add(chunks, reads, start, masks)
        parts = [
            Rows.of(chunk, 1) if part is None else part
            for chunk, part in zip(chunks, rows, strict=True)
        ]
        for chunk, part in zip(chunks, parts, strict=True):
            self.filled.append(filled_by(chunk, part, self.number, self.page_size))
        runs = [runs_by_page(part, self.page_size) for part in parts]
        if len(chunks) > 1:
            return self._add(chunks, reads, start, None, [of[0].page for of in runs])
        for run in runs[0]:
            some = tuple(np.atleast_1d(x)[run.first : run.end] for x in reads[0])
            self._add(chunks, [some], start + run.first, None, [run.page])

    def _add(
        self,
        chunks: list[Chunk],
        reads: list[Any],
        start: int,
        masks: Ints | None,
        newest: list[int] | None = None,
    ) -> None:
        """Rows from `start` on, by chunk what they read; `newest`: by chunk the number of the page
        that is read from the residual."""
        pages: list[list[int]] = []
        images: list[tuple[int, PlacedImage]] = []
        counts: list[int] = []
        for row, (chunk, read) in enumerate(zip(chunks, reads, strict=True)):
            _, _, visual_lo, visual_hi = read
            table = chunk.seq.tables[self.number] if self.group.text else []
            covered = table[: num_pages(read, masks, self.page_size)]
            if self.group.window is not None:
                covered = [max(page, 0) for page in covered]  # some may be given back
            if newest is not None:
                covered = read_through(chunk.seq, covered, newest[row])
            pages.append(covered)
            first, last = int(np.min(visual_lo)), int(np.max(visual_hi))
            seen = [
                p
                for p in chunk.seq.images
                if p.visual_index < last and p.visual_index + p.image.num_tokens > first
            ]
            images += [(row, p) for p in seen]
            counts.append(len(seen))
        made = self._query_group(start, chunks, pages, reads, images, counts)
        if masks is not None:  # then the chunk is alone
            made = replace(made, tree=torch.from_numpy(masks).to(made.hi)[None])
        self.groups.append(made)

    def _chunk(self, chunk: Chunk, rows: Rows) -> tuple[Reads, Any]:
        """What its rows read, and the slots that they are stored in."""
        reads = reads_of(chunk.seq, rows, self.group, self.sight)
        return reads, slots_of(chunk, rows, self.number, self.group, self.page_size)

    def _token(self, chunk: Chunk) -> tuple[Reads, Any]:
        """The same of a text token; without arrays where it reads all that is before it."""
        group, seq, index = self.group, chunk.seq, chunk.start
        narrow = group.window is not None or not (group.text and group.images)
        narrow = narrow or group.residual
        if narrow or self.sight.whole_prompt:
            return self._chunk(chunk, Rows.of(chunk, 1))
        slot = slots_in(seq.tables[self.number], index, self.page_size)
        return (0, index + 1, 0, seq.visual_before(index)), [slot]

    def _query_group(
        self,
        start: int,
        chunks: list[Chunk],
        pages: list[list[int]],
        reads: list[Reads],
        images: list[tuple[int, PlacedImage]],
        counts: list[int],
    ) -> QueryGroup:
        most = max(counts)
        places = [n for count in counts for n in range(count)]
        device = self.table.device
        bases = [
            turning_row(chunks[row].seq, placed, self.group, self.blocks) or 0
            for row, placed in images
        ]
        cos, sin = angles(self.table, torch.tensor(bases, dtype=torch.long, device=device))
        lo, hi, visual_lo, visual_hi = (
            torch.from_numpy(np.array(part, np.int64).reshape(len(chunks), -1)).to(device)
            for part in zip(*reads, strict=True)
        )

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        stored = [pages_of(p, self.number, self.page_size) for _, p in images]
        return QueryGroup(
            start=start,
            num_seqs=len(chunks),
            num_queries=lo.shape[1],
            pages=_pad(pages, device),
            lo=lo,
            hi=hi,
            visual_lo=visual_lo,
            visual_hi=visual_hi,
            image_pages=_pad(stored, device),
            image_len=ints([p.image.num_tokens for _, p in images]),
            image_first=ints([p.visual_index for _, p in images]),
            image_row=ints([row for row, _ in images]),
            image_slot=ints([r * most + n for (r, _), n in zip(images, places, strict=True)]),
            cos=cos,
            sin=-sin,  # the angle is -base
            max_images=most,
        )

    def plan(self, positions: Tensor) -> AttentionPlan:
        slots = torch.from_numpy(np.concatenate(self.slots)).to(self.table.device)
        cos, sin = angles(self.table, positions)
        filled = torch.from_numpy(np.concatenate(self.filled)).to(slots) if self.filled else None
        return AttentionPlan(slots, cos, sin, tuple(self.groups), filled)


def _lone(chunk: Chunk) -> bool:
    return chunk.count == 1 and not chunk.images and chunk.draft is None


def angles(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D / 2] of positions [T], each contiguous, as the compiled kernels want."""
    cos, sin = table[positions].transpose(0, 1).contiguous().unbind(0)
    return cos, sin


def _pad(rows: list[list[int]], device: torch.device) -> Tensor:
    """Rows of page ids as one [rows, longest] int64 tensor, filled up with 0."""
    width = max((len(r) for r in rows), default=0)
    filled = [r + [0] * (width - len(r)) for r in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)


class Planner:
    """Lays steps out. `table` [rows, 2, D / 2] float32 is `rope_table`'s, or of several regimes,
    which begin at `blocks`; one row is enough where images are read as they are stored. `axes` of
    positions that the model rotates by itself; 0 where the plan's angles do it."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        table: Tensor,
        page_size: int,
        *,
        sight: Sight = CAUSAL,
        axes: int = 0,
        blocks: Sequence[Block] = (Block(),),
    ) -> None:
        self.groups, self.table, self.page_size = groups, table, page_size
        self.sight, self.axes, self.blocks = sight, axes, blocks
        self._first_rows = np.array([block.rotating for block in blocks])

    def step(self, chunks: list[Chunk], previous: Tensor | None = None) -> StepInput:
        """`previous` [C] int64: the tokens of the step before, for those that are pending."""
        decode = [c for c in chunks if c.num_rows == 1]
        prefill = [c for c in chunks if c.num_rows > 1]
        layout = ([decode] if decode else []) + [[c] for c in prefill]
        builders = [
            _GroupBuilder(number, group, self.sight, self.table, self.page_size, self.blocks)
            for number, group in enumerate(self.groups)
        ]
        ids: list[Any] = []
        positions: list[Any] = []
        regimes: list[Any] = []
        last: list[int] = []
        images: list[ImageRows] = []
        total = 0
        axes = max(self.axes, 1)
        for members in layout:
            rows = [None if _lone(chunk) else Rows.of(chunk, axes) for chunk in members]
            for builder in builders:
                builder.add(members, rows, total)
            for chunk, part in zip(members, rows, strict=True):
                if part is None:
                    seq, position = chunk.seq, chunk.seq.position(chunk.start)
                    ids.append([seq.token_ids[chunk.start]])
                    positions.append([[position]] * axes)
                    regimes.append([seq.course.at(position)])
                    last.append(total)
                    total += 1
                    continue
                ids.append(part.ids)
                positions.append(part.positions)
                regimes.append(regimes_of(chunk.seq, part))
                for context in chunk.images:
                    mine = part.image == chunk.seq.images.index(context.placed)
                    images.append(ImageRows(total + int(mine.argmax()), context.placed))
                total += len(part)
                last.append(total - 1)
        device = self.table.device
        flat = torch.from_numpy(np.concatenate(ids)).to(device)
        of_rows, places = np.concatenate(regimes), np.concatenate(positions, -1)
        if not self.axes:
            places = places + self._first_rows[of_rows]
        where = torch.from_numpy(places).to(device)
        rotated = where[0] * 0 if self.axes else where[0]
        plans = tuple(builder.plan(rotated) for builder in builders)
        return StepInput(
            resolve_pending(flat, previous),
            where if self.axes > 1 else where[0],
            torch.from_numpy(of_rows).to(device) if of_rows.any() else None,
            decode + prefill,
            last,
            plans,
            images,
        )

    def image_rows(self, num_tokens: int, regime: int) -> Tensor:
        """[T] int64: the table's rows of an image's positions, which count from 0."""
        first = int(self._first_rows[regime])
        return torch.arange(first, first + num_tokens, device=self.table.device)

    def image(
        self, pages: list[list[int]], num_tokens: int, regime: int = 0
    ) -> tuple[AttentionPlan, ...]:
        """The plans of one image alone, at positions from 0: it reads nothing but itself.

        `pages`: its vision pages by layer group.
        """
        index = torch.arange(num_tokens, device=self.table.device)
        where = index * 0 if self.axes else self.image_rows(num_tokens, regime)
        cos, sin = angles(self.table, where)
        return tuple(
            self._image(group, torch.tensor(held).to(index), index, cos, sin)
            for group, held in zip(self.groups, pages, strict=True)
        )

    def _image(
        self, layers: LayerGroup, pages: Tensor, index: Tensor, cos: Tensor, sin: Tensor
    ) -> AttentionPlan:
        slots = slots_in(pages, index, self.page_size)
        count, zero = len(index), index[:1] * 0
        still = angles(self.table, zero)
        lo, hi = (torch.from_numpy(x).to(index) for x in seen_alone(count, layers, self.sight))
        group = QueryGroup(
            start=0,
            num_seqs=1,
            num_queries=count,
            pages=zero.view(1, 1)[:, :0],
            lo=(index * 0)[None],
            hi=(index * 0)[None],
            visual_lo=lo[None],
            visual_hi=hi[None],
            image_pages=pages[None],
            image_len=zero + count,
            image_first=zero,
            image_row=zero,
            image_slot=zero,
            cos=still[0],
            sin=still[1],
            max_images=1,
        )
        return AttentionPlan(slots=vision_slot(slots), cos=cos, sin=sin, groups=(group,))


def seen_rows(plan: AttentionPlan, num_rows: int) -> Tensor | None:
    """[T] bool: which rows read anything of an image; None where none does."""
    seen = torch.zeros(num_rows, dtype=torch.bool, device=plan.slots.device)
    for group in plan.groups:
        reads = (group.visual_hi > group.visual_lo).flatten()
        seen[group.start : group.start + len(reads)] = reads
    return seen if bool(seen.any()) else None
