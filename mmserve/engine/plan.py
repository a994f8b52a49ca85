"""From a batch's chunks to the index tensors of one forward pass.

Owns the order of tokens in the flat batch: first all single-token chunks (decoding) as one group,
then each longer chunk as a group of its own. Knows nothing of weights or pools' contents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmserve.engine.transfer import resolve_pending
from mmserve.kernels.reference import AttentionPlan, QueryGroup
from mmserve.scheduler.batch import Chunk


class StepInput(NamedTuple):
    """`token_ids`, `positions` [T] int64; `order`: the chunks as laid out; `last` [C] int64: the
    flat row of each chunk's last token, in that order."""

    token_ids: Tensor
    positions: Tensor
    order: list[Chunk]
    last: Tensor
    plan: AttentionPlan


def _angles(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D / 2] of positions [T], each contiguous, as the compiled kernels want."""
    cos, sin = table[positions].transpose(0, 1).contiguous().unbind(0)
    return cos, sin


def _pad(rows: list[list[int]], device: torch.device) -> Tensor:
    """Rows of page ids as one [rows, longest] int64 tensor, filled up with 0."""
    width = max((len(r) for r in rows), default=0)
    filled = [r + [0] * (width - len(r)) for r in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)


def _group(chunks: list[Chunk], start: int, table: Tensor, page_size: int) -> QueryGroup:
    """One group of chunks of equal length. `table`: cos and sin by position (`rope_table`)."""
    device = table.device
    num_queries = chunks[0].count
    pages, hi = [], []
    image_pages, lengths, rows, slots, bases, seen = [], [], [], [], [], []
    max_images = 0
    for row, chunk in enumerate(chunks):
        end = chunk.start + chunk.count
        pages.append(chunk.seq.pages[: -(-end // page_size)])
        hi.append(range(chunk.start + 1, end + 1))
        visible = [p for p in chunk.seq.images if p.text_index < end]
        max_images = max(max_images, len(visible))
        for slot, placed in enumerate(visible):
            assert placed.pages is not None
            image_pages.append(placed.pages)
            lengths.append(placed.image.num_tokens)
            rows.append(row)
            slots.append(slot)
            bases.append(placed.base)
            seen.append([placed.text_index <= i for i in range(chunk.start, end)])
    base = torch.tensor(bases, dtype=torch.long, device=device)
    cos, sin = _angles(table, base)
    return QueryGroup(
        start=start,
        num_seqs=len(chunks),
        num_queries=num_queries,
        pages=_pad(pages, device),
        hi=torch.tensor([list(r) for r in hi], device=device),
        image_pages=_pad(image_pages, device),
        image_len=torch.tensor(lengths, dtype=torch.long, device=device),
        image_row=torch.tensor(rows, dtype=torch.long, device=device),
        image_slot=torch.tensor(
            [r * max_images + s for r, s in zip(rows, slots, strict=True)],
            dtype=torch.long,
            device=device,
        ),
        image_seen=torch.tensor(seen, dtype=torch.bool, device=device).view(-1, num_queries),
        cos=cos,
        sin=-sin,  # the angle is -base
        max_images=max_images,
    )


def build_step(
    chunks: list[Chunk], table: Tensor, page_size: int, previous: Tensor | None = None
) -> StepInput:
    """Lay the chunks out flat. `table` [positions, 2, D / 2] float32 is `rope_table`'s;
    `previous` [C] int64: the tokens of the step before, for those that are pending."""
    decode = [c for c in chunks if c.count == 1]
    prefill = [c for c in chunks if c.count > 1]
    layout = ([decode] if decode else []) + [[c] for c in prefill]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    groups = []
    for members in layout:
        groups.append(_group(members, len(token_ids), table, page_size))
        for chunk in members:
            seq = chunk.seq
            for index in range(chunk.start, chunk.start + chunk.count):
                token_ids.append(seq.token_ids[index])
                positions.append(seq.position(index))
                slots.append(seq.pages[index // page_size] * page_size + index % page_size)
            last.append(len(token_ids) - 1)
    device = table.device
    flat = torch.tensor([token_ids, positions, slots], dtype=torch.long).to(device)
    cos, sin = _angles(table, flat[1])
    plan = AttentionPlan(slots=flat[2], cos=cos, sin=sin, groups=tuple(groups))
    known = resolve_pending(flat[0], previous)
    return StepInput(known, flat[1], decode + prefill, torch.tensor(last).to(device), plan)


def build_image(pages: list[int], num_tokens: int, table: Tensor, page_size: int) -> AttentionPlan:
    """The plan of one image alone in its vision pages: all of it reads all of it."""
    device = table.device
    slots = [page * page_size + offset for page in pages for offset in range(page_size)]
    none = torch.zeros(0, dtype=torch.long, device=device)
    cos, sin = _angles(table, torch.arange(num_tokens, device=device))
    group = QueryGroup(
        start=0,
        num_seqs=1,
        num_queries=num_tokens,
        pages=torch.tensor([pages], device=device),
        hi=torch.full((1, num_tokens), num_tokens, device=device),
        image_pages=none.view(0, 0),
        image_len=none,
        image_row=none,
        image_slot=none,
        image_seen=none.bool().view(0, num_tokens),
        cos=cos[:0],
        sin=sin[:0],
        max_images=0,
    )
    flat = torch.tensor(slots[:num_tokens], device=device)
    return AttentionPlan(slots=flat, cos=cos, sin=sin, groups=(group,))
