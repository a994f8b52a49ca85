"""From a batch's chunks to the index tensors of one forward pass.

Owns the order of tokens in the flat batch: first all chunks of a single row (decoding) as one
group, then each longer chunk as a group of its own, an image's rows before the text token that it
stands before. Owns who reads what. Knows nothing of weights or pools' contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmserve.cache.layer_group import LayerGroup
from mmserve.engine.transfer import resolve_pending
from mmserve.kernels.reference import NOWHERE, AttentionPlan, QueryGroup, vision_slot
from mmserve.model.adapter import CAUSAL, Sight
from mmserve.model.rope import Block
from mmserve.request import PlacedImage
from mmserve.request import Sequence as Seq
from mmserve.scheduler.batch import Chunk, ContextImage

Ints = npt.NDArray[np.int64]


class ImageRows(NamedTuple):
    """The rows [first, first + num_tokens) of the flat batch are this image's."""

    first: int
    placed: PlacedImage


class StepInput(NamedTuple):
    """`token_ids` [T] int64 (0 in an image without tokens of its own), `positions` [T] or
    [axes, T] int64, or the table's rows for them where the plan's angles are used; `regimes` [T]
    int64 (None: all 0); `order`: the chunks as laid out; `last` [C] int64: the flat row of each
    chunk's last token, in that order; `plans`: by layer group."""

    token_ids: Tensor
    positions: Tensor
    regimes: Tensor | None
    order: list[Chunk]
    last: Tensor
    plans: tuple[AttentionPlan, ...]
    images: list[ImageRows]


@dataclass
class _Rows:
    """A chunk's rows: int64 [R] each, positions [axes, R]. `text`, `visual`: how many tokens of
    either kind stand before the row's token; `image`: the number of its image, -1 for text."""

    ids: Ints
    positions: Ints
    text: Ints
    visual: Ints
    image: Ints

    @classmethod
    def of(cls, chunk: Chunk, axes: int) -> _Rows:
        parts = []
        at, end = chunk.start, chunk.start + chunk.count
        for context in chunk.images:
            border = min(max(context.placed.text_index, at), end)
            if border > at:
                parts.append(_text_rows(chunk.seq, at, border, axes))
            parts.append(_image_rows(chunk.seq, context, axes))
            at = border
        if at < end:
            parts.append(_text_rows(chunk.seq, at, end, axes))
        if len(parts) == 1:
            return parts[0]
        return cls(
            *(
                np.concatenate([getattr(p, name) for p in parts], -1)
                for name in ("ids", "positions", "text", "visual", "image")
            )
        )

    def __len__(self) -> int:
        return len(self.ids)


def _text_rows(seq: Seq, start: int, end: int, axes: int) -> _Rows:
    if end - start == 1:
        visual, position = np.array([seq.visual_before(start)]), np.array([seq.position(start)])
        text = np.array([start])
    else:
        text = np.arange(start, end)
        before = np.searchsorted([p.text_index for p in seq.images], text, "right")
        visual = np.cumsum([0, *(p.image.num_tokens for p in seq.images)])[before]
        position = text + np.cumsum([0, *(p.image.width for p in seq.images)])[before]
    ids = np.array(seq.token_ids[start:end], np.int64)
    rows = np.broadcast_to(position, (axes, len(ids)))
    return _Rows(ids, rows, text, visual, np.full(len(ids), -1))


def _image_rows(seq: Seq, context: ContextImage, axes: int) -> _Rows:
    placed, image = context.placed, context.placed.image
    count = np.arange(image.num_tokens)
    ids = count * 0 if image.token_ids is None else np.array(image.token_ids, np.int64)
    local = count if image.positions is None else np.asarray(image.positions)
    return _Rows(
        ids,
        placed.base + np.broadcast_to(local, (axes, len(count))),
        np.full(len(count), placed.text_index),
        placed.visual_index + count,
        np.full(len(count), seq.images.index(placed)),
    )


def _regimes(seq: Seq, rows: _Rows) -> Ints:
    """[R]: each row's."""
    course, positions = seq.course, rows.positions[0]
    regimes = np.full(len(rows), course.regime)
    if not course.regimes.whole:
        for row in np.flatnonzero(positions >= course.prompt):
            regimes[row] = course.at(int(positions[row]))
    return regimes


def _reads(seq: Seq, rows: _Rows, group: LayerGroup, sight: Sight) -> tuple[Ints, Ints, Ints, Ints]:
    """[lo, hi) of text and of visual tokens that each row reads."""
    own_image = rows.image >= 0
    hi = rows.text + ~own_image
    visual_hi = rows.visual + own_image
    lo, visual_lo = np.zeros_like(hi), np.zeros_like(hi)
    if group.window is not None:
        first = np.maximum(rows.text + rows.visual + 1 - group.window, 0)
        starts = np.array([p.text_index + p.visual_index for p in seq.images], np.int64)
        before = np.searchsorted(starts, first, "left")
        ends = np.cumsum([0, *(p.image.num_tokens for p in seq.images)])
        texts = np.array([0, *(p.text_index for p in seq.images)])
        # Inside the last image that begins before `first`, or in the text behind it.
        lo = np.maximum(first - ends[before], texts[before])
        visual_lo = first - lo
    if sight.whole_images:
        spans = [(p.visual_index, p.visual_index + p.image.num_tokens) for p in seq.images]
        begin, end = np.array([*spans, (0, 0)]).T[:, rows.image]
        visual_lo = np.where(own_image, np.minimum(visual_lo, begin), visual_lo)
        visual_hi = np.where(own_image, end, visual_hi)
    if sight.whole_prompt and seq.images:
        prompt = own_image | (rows.text < seq.num_prompt_tokens)
        lo, visual_lo = np.where(prompt, 0, lo), np.where(prompt, 0, visual_lo)
        hi = np.where(prompt, seq.num_prompt_tokens, hi)
        visual_hi = np.where(prompt, seq.num_image_tokens, visual_hi)
    if not group.text:
        visual_lo, lo, hi = _latest_images(seq, rows.visual), hi * 0, hi * 0
    if not group.images:
        visual_lo, visual_hi = visual_hi * 0, visual_hi * 0
    return lo, hi, visual_lo, visual_hi


def _latest_images(seq: Seq, visual: Ints) -> Ints:
    """Where the images begin that each row sees by cross attention: the latest, and those directly
    before it, with nothing between but the placeholder that every such image has in the text."""
    begins = [
        p.visual_index
        for n, p in enumerate(seq.images)
        if not n or p.text_index > seq.images[n - 1].text_index + 1
    ]
    latest = np.searchsorted(begins, visual, "left") - 1
    found: Ints = np.array(begins or [0])[np.maximum(latest, 0)]
    return found


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
        self.slots: list[Ints] = []
        self.groups: list[QueryGroup] = []

    def add(self, chunks: list[Chunk], rows: list[_Rows], start: int) -> None:
        """Chunks of equally many rows, the first at row `start` of the flat batch."""
        pages: list[list[int]] = []
        images: list[tuple[int, PlacedImage]] = []
        counts: list[int] = []
        reads = []
        for row, (chunk, part) in enumerate(zip(chunks, rows, strict=True)):
            lo, hi, visual_lo, visual_hi = _reads(chunk.seq, part, self.group, self.sight)
            reads.append((lo, hi, visual_lo, visual_hi))
            table = chunk.seq.tables[self.number] if self.group.text else []
            covered = -(-int(hi.max()) // self.page_size)
            pages.append([max(page, 0) for page in table[:covered]])  # some may be given back
            self.slots.append(self._slots(chunk, part, table))
            first, last = int(visual_lo.min()), int(visual_hi.max())
            seen = [
                p
                for p in chunk.seq.images
                if p.visual_index < last and p.visual_index + p.image.num_tokens > first
            ]
            images += [(row, p) for p in seen]
            counts.append(len(seen))
        self.groups.append(self._query_group(start, chunks, pages, reads, images, counts))

    def _slots(self, chunk: Chunk, rows: _Rows, table: list[int]) -> Ints:
        """Where each row is stored."""
        size = self.page_size
        slots = np.full(len(rows), NOWHERE)
        text = rows.image < 0
        if self.group.text:
            index = rows.text[text]
            slots[text] = np.array(table, np.int64)[index // size] * size + index % size
        for context in chunk.images:
            pages = context.placed.pages and context.placed.pages[self.number]
            if not context.writes[self.number] or not pages:
                continue
            mine = rows.image == chunk.seq.images.index(context.placed)
            local = np.arange(context.placed.image.num_tokens)
            held = np.array(pages)[local // size] * size + local % size
            slots[mine] = vision_slot(held)
        return slots

    def _query_group(
        self,
        start: int,
        chunks: list[Chunk],
        pages: list[list[int]],
        reads: list[tuple[Ints, Ints, Ints, Ints]],
        images: list[tuple[int, PlacedImage]],
        counts: list[int],
    ) -> QueryGroup:
        most = max(counts)
        places = [n for count in counts for n in range(count)]
        device = self.table.device
        bases = [self._base(chunks[row].seq, placed) for row, placed in images]
        cos, sin = angles(self.table, torch.tensor(bases, dtype=torch.long, device=device))
        lo, hi, visual_lo, visual_hi = (
            torch.from_numpy(np.stack(part)).to(device) for part in zip(*reads, strict=True)
        )

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        stored = [(p.pages or [])[self.number][p.skip // self.page_size :] for _, p in images]
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

    def _base(self, seq: Seq, placed: PlacedImage) -> int:
        """How far its keys, as they are stored, are from where the sequence has them."""
        if placed.in_context or not self.group.text:
            return 0
        return placed.base + self.blocks[seq.course.regime].turning

    def plan(self, positions: Tensor) -> AttentionPlan:
        slots = torch.from_numpy(np.concatenate(self.slots)).to(self.table.device)
        cos, sin = angles(self.table, positions)
        return AttentionPlan(slots=slots, cos=cos, sin=sin, groups=tuple(self.groups))


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
        ids: list[Ints] = []
        positions: list[Ints] = []
        regimes: list[Ints] = []
        last: list[int] = []
        images: list[ImageRows] = []
        total = 0
        for members in layout:
            rows = [_Rows.of(chunk, max(self.axes, 1)) for chunk in members]
            for builder in builders:
                builder.add(members, rows, total)
            for chunk, part in zip(members, rows, strict=True):
                ids.append(part.ids)
                positions.append(part.positions)
                regimes.append(_regimes(chunk.seq, part))
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
            torch.tensor(last).to(device),
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
        slots = pages[index // self.page_size] * self.page_size + index % self.page_size
        count, zero = len(index), index[:1] * 0
        still = angles(self.table, zero)
        lo, hi = index * 0, index * 0 + count
        if not self.sight.whole_images:
            hi = index + 1
            lo = lo if layers.window is None else (hi - layers.window).clamp_min(0)
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
