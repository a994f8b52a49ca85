"""The rows of one chunk: which tokens they are, what each of them reads, and where it is stored.

Owns the rule of who sees whom, in text and visual indices, for every kind of layer group, and how
an image's keys lie. Knows nothing of pools' contents or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmserve.cache.layer_group import LayerGroup
from mmserve.kernels.reference import NOWHERE, open_page, vision_slot
from mmserve.model.adapter import Sight
from mmserve.model.rope import Block
from mmserve.placed import PlacedImage
from mmserve.scheduler.batch import Chunk, ContextImage
from mmserve.sequence import Sequence as Seq
from mmserve.spec.draft import AnyDraft

Ints = npt.NDArray[np.int64]


class Tree(NamedTuple):
    """The last rows are a draft's that is no chain. They stand in the text's slots from index
    `first` on, one behind the other; `masks`: of each, which of them it sees, bit by bit."""

    first: int
    masks: tuple[int, ...]


@dataclass
class Rows:
    """A chunk's rows: int64 [R] each, positions [axes, R]. `text`, `visual`: how many tokens of
    either kind stand before the row's token; `image`: the number of its image, -1 for text."""

    ids: Ints
    positions: Ints
    text: Ints
    visual: Ints
    image: Ints
    tree: Tree | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, chunk: Chunk, axes: int) -> Rows:
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
        if chunk.draft is not None:
            parts.append(_draft_rows(chunk.seq, end, chunk.draft, axes))
        if len(parts) == 1:
            return parts[0]
        return cls(
            *(
                np.concatenate([getattr(p, name) for p in parts], -1)
                for name in ("ids", "positions", "text", "visual", "image")
            ),
            tree=parts[-1].tree,
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def index(self) -> Ints:
        """[R]: in whose slot of the text each is stored, if it is text."""
        if self.tree is None:
            return self.text
        first, masks = self.tree
        return np.concatenate([self.text[: -len(masks)], first + np.arange(len(masks))])


def _text_rows(seq: Seq, start: int, end: int, axes: int) -> Rows:
    if end - start == 1:
        visual, position = np.array([seq.visual_before(start)]), np.array([seq.position(start)])
        text = np.array([start])
    else:
        text = np.arange(start, end)
        before = np.searchsorted([p.text_index for p in seq.images], text, "right")
        visual = np.cumsum([0, *(p.image.num_tokens for p in seq.images)])[before]
        position = text + np.cumsum([0, *(p.image.width for p in seq.images)])[before]
        if seq.gaps:
            passed = np.searchsorted([g.text_index for g in seq.gaps], text, "right")
            position = position + np.cumsum([0, *(g.image.width for g in seq.gaps)])[passed]
    ids = np.array(seq.token_ids[start:end], np.int64)
    rows = np.broadcast_to(position, (axes, len(ids)))
    return Rows(ids, rows, text, visual, np.full(len(ids), -1))


def _draft_rows(seq: Seq, start: int, draft: AnyDraft, axes: int) -> Rows:
    """As if each followed the last known token by its depth; text index `start` is the first
    behind that, and no image stands among them."""
    draft = draft.read()
    place = np.array(draft.depths, np.int64) - 1
    return Rows(
        np.array(draft.tokens, np.int64),
        np.broadcast_to(seq.position(start) + place, (axes, len(draft))),
        start + place,
        np.full(len(draft), seq.num_image_tokens),
        np.full(len(draft), -1),
        tree=None if draft.is_chain else Tree(start, draft.masks),
    )


def _image_rows(seq: Seq, context: ContextImage, axes: int) -> Rows:
    placed, image = context.placed, context.placed.image
    count = np.arange(image.num_tokens)
    ids = count * 0 if image.token_ids is None else np.array(image.token_ids, np.int64)
    local = count if image.positions is None else np.asarray(image.positions)
    return Rows(
        ids,
        placed.base + np.broadcast_to(local, (axes, len(count))),
        np.full(len(count), placed.text_index),
        placed.visual_index + count,
        np.full(len(count), seq.images.index(placed)),
    )


def regimes_of(seq: Seq, rows: Rows) -> Ints:
    """[R]: each row's."""
    course, positions = seq.course, rows.positions[0]
    regimes = np.full(len(rows), course.regime)
    if not course.regimes.whole:
        for row in np.flatnonzero(positions >= course.prompt):
            regimes[row] = course.at(int(positions[row]))
    return regimes


def reads_of(
    seq: Seq, rows: Rows, group: LayerGroup, sight: Sight
) -> tuple[Ints, Ints, Ints, Ints]:
    """[lo, hi) of text and of visual tokens that each row reads; those of a tree read what
    `masks_of` says, too."""
    own_image = rows.image >= 0
    hi = rows.text + ~own_image
    visual_hi = rows.visual + own_image
    lo, visual_lo = np.zeros_like(hi), np.zeros_like(hi)
    if group.window is not None:
        first = np.maximum(rows.text + rows.visual + 1 - group.window, 0)
        starts = np.array([p.start for p in seq.images], np.int64)
        before = np.searchsorted(starts, first, "left")
        visual = np.cumsum([0, *(p.image.num_tokens for p in seq.images)])
        texts = np.array([0, *(p.text_index for p in seq.images)])
        # Inside the last image that begins before `first`, or in the text behind it.
        lo = np.maximum(first - visual[before], texts[before])
        visual_lo = first - lo
    if rows.tree is not None:
        drawn = slice(-len(rows.tree.masks), None)
        hi[drawn], lo[drawn] = rows.tree.first, np.minimum(lo[drawn], rows.tree.first)
    if sight.whole_images:
        begins = [p.visual_index - p.skip for p in seq.images]
        ends = [b + p.image.whole.num_tokens for b, p in zip(begins, seq.images, strict=True)]
        begin, end = (np.array([*borders, 0])[rows.image] for borders in (begins, ends))
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


def masks_of(rows: Rows, group: LayerGroup) -> Ints | None:
    """[R]: which text tokens each row reads behind its hi, bit by bit; None where nobody does. Of a
    path, a window sees the end."""
    if rows.tree is None or not group.text:
        return None
    found = np.zeros(len(rows), np.int64)
    for row, mask in enumerate(rows.tree.masks, len(rows) - len(rows.tree.masks)):
        seen = mask
        while group.window is not None and seen.bit_count() > group.window:
            seen &= seen - 1  # without its first
        found[row] = seen
    return found


def num_pages(reads: Any, masks: Ints | None, page_size: int) -> int:
    """Of the text: those up to the last token that any row reads."""
    _, hi, *_ = reads
    behind = 0 if masks is None else int(masks.max()).bit_length()
    return -(-(int(np.max(hi)) + behind) // page_size)


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


def seen_alone(num_tokens: int, group: LayerGroup, sight: Sight) -> tuple[Ints, Ints]:
    """[lo, hi) of its own tokens that each row of an image reads that is computed by itself."""
    index = np.arange(num_tokens)
    if sight.whole_images:
        return index * 0, index * 0 + num_tokens
    hi = index + 1
    return index * 0 if group.window is None else np.maximum(hi - group.window, 0), hi


def slots_in(pages: Any, index: Any, page_size: int) -> Any:
    """Where the tokens `index` of whatever has these pages stand in its pool: arrays, tensors or
    a list and a number."""
    return pages[index // page_size] * page_size + index % page_size


def slots_of(chunk: Chunk, rows: Rows, number: int, group: LayerGroup, page_size: int) -> Ints:
    """[R]: where each row is stored in layer group `number`, as an `AttentionPlan` names it."""
    slots = np.full(len(rows), NOWHERE)
    text = rows.image < 0
    if group.text:
        index, table = rows.index[text], np.array(chunk.seq.tables[number], np.int64)
        if group.residual:
            table[list(chunk.seq.open_pages)] = list(chunk.seq.open_pages.values())
        slots[text] = slots_in(table, index, page_size)
    for context in chunk.images:
        pages = context.placed.pages and context.placed.pages[number]
        if not context.writes[number] or not pages:
            continue
        mine = rows.image == chunk.seq.images.index(context.placed)
        local = np.arange(context.placed.image.num_tokens)
        slots[mine] = vision_slot(slots_in(np.array(pages), local, page_size))
    return slots


def filled_by(chunk: Chunk, rows: Rows, number: int, page_size: int) -> Ints:
    """[R]: in layer group `number`, which has a residual, the page that each row is the last token
    of; -1 where it is not."""
    table = np.array(chunk.seq.tables[number], np.int64)
    last = (rows.image < 0) & (rows.text % page_size == page_size - 1)
    filled = np.full(len(rows), -1)
    filled[last] = table[rows.text[last] // page_size]
    return filled


class Run(NamedTuple):
    """Rows [first, end) of a chunk, whose tokens are of the same page: number `page` of the text.
    They read it as it stands in the residual, and those before it as they are stored."""

    first: int
    end: int
    page: int


def runs_by_page(rows: Rows, page_size: int) -> list[Run]:
    pages = rows.text // page_size
    borders = [0, *(np.flatnonzero(np.diff(pages)) + 1).tolist(), len(pages)]
    return [Run(a, b, int(pages[a])) for a, b in zip(borders, borders[1:], strict=False)]


def read_through(seq: Seq, pages: list[int], page: int) -> list[int]:
    """A sequence's pages as the rows of a `Run` read them."""
    if page >= len(pages):
        return pages
    return [*pages[:page], open_page(seq.open_pages[page])]


def pages_of(placed: PlacedImage, number: int, page_size: int) -> list[int]:
    """Where an image's own tokens begin among what is stored under its key."""
    assert placed.pages is not None
    return placed.pages[number][placed.skip // page_size :]


def turning_row(
    seq: Seq, placed: PlacedImage, group: LayerGroup, blocks: Sequence[Block]
) -> int | None:
    """The row of the rotary table by which queries are turned back to an image; None where its keys
    are stored as the sequence counts positions, or not rotated."""
    if placed.in_context or not group.text:
        return None
    block = blocks[seq.course.regime if len(blocks) > 1 else 0]
    return placed.base + block.turning
