"""Segment attention over two paged pools in plain PyTorch: the specification and the CPU path.

Owns the meaning of `AttentionPlan`: which keys every query reads and how its rotation is adjusted.
Knows nothing of sequences, models or scheduling.

A query reads an interval of its sequence's text tokens, from pages of the text pool, and an
interval of its sequence's visual tokens (counted through all its images), from pages of the vision
pool. Causal attention, sliding windows, an image that reads itself alone or its context too, and
cross attention differ in nothing but these two intervals. A token of a draft tree reads its
ancestors, too, who stand behind the interval of text with others between them: a mask tells them.

Keys of text are rotated as the sequence counts positions. An image's are, too, or at its *local*
positions 0..n-1: then, for an image at base position b, the query is rotated by a further -b,
because R(p-b) q . R(l) k = R(p) q . R(b+l) k: the stored bytes never change. Each part yields an
output and a log-sum-exp; parts are merged in a fixed order, text first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmserve.kernels.kv_formats import (
    KVFormat,
    Pages,
    Part,
    decode_pages,
    encode_pages,
    encode_tokens,
    token_views,
)

PARTS: tuple[Part, Part] = ("k", "v")
NOWHERE = -1  # the slot of a row that is stored in neither pool


def vision_slot(slot: Any) -> Any:
    """How a plan names a slot of the vision pool; slots of the text pool are named by themselves.

    It is its own inverse.
    """
    return -2 - slot


def open_page(page: Any) -> Any:
    """How tables name a page of the residual, text's being named as they are. Its own inverse."""
    return -1 - page


@dataclass(frozen=True)
class QueryGroup:
    """B sequences with Q queries each, consecutive in the flat batch; all tensors on one device.

    `start`: first flat query. `pages` [B, P] int64 (padded with 0): the sequences' text pages, an
    `open_page` where tokens are read as they stand in the residual.
    `lo`, `hi` [B, Q] int64: the text tokens that each query reads, and `visual_lo`, `visual_hi`
    [B, Q] the visual ones. Images, N of them over all B sequences, in logical order:
    `image_pages` [N, V] int64 (padded with 0), `image_len` [N] int64 tokens, `image_first` [N] the
    visual index of the first one, `image_row` [N] the sequence, `image_slot` [N] its place among
    the B * max_images slots, `cos`, `sin` [N, D/2] float32 of the angle -base (0 where keys are
    rotated as the sequence counts). `sink_tokens` [B] int64 (None: 0): how many of the first text
    tokens every query reads, too, where they are before its lo. `tree` [B, Q] int64 (None: 0): a
    query reads the text token hi + j, too, for every bit j of its own, the sign's being bit 63.
    """

    start: int
    num_seqs: int
    num_queries: int
    pages: Tensor
    lo: Tensor
    hi: Tensor
    visual_lo: Tensor
    visual_hi: Tensor
    image_pages: Tensor
    image_len: Tensor
    image_first: Tensor
    image_row: Tensor
    image_slot: Tensor
    cos: Tensor
    sin: Tensor
    max_images: int
    sink_tokens: Tensor | None = None
    tree: Tensor | None = None

    @cached_property
    def image_lo(self) -> Tensor:
        """[N, Q] int64: the first token of each image that each query of its sequence reads."""
        return (self.visual_lo[self.image_row] - self.image_first[:, None]).clamp_min(0)

    @cached_property
    def image_hi(self) -> Tensor:
        """[N, Q] int64: where what it reads ends; not above `image_lo` where it reads nothing."""
        end = self.visual_hi[self.image_row] - self.image_first[:, None]
        return torch.minimum(end, self.image_len[:, None])

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """What `cpu.row_attention` reads between the pools and the scale, as numpy views."""
        assert self.sink_tokens is None or not self.sink_tokens.any(), "it reads intervals alone"
        row = torch.arange(self.num_seqs).repeat_interleave(self.num_queries)
        query = torch.arange(self.num_queries).repeat(self.num_seqs)
        tree = torch.zeros_like(self.hi) if self.tree is None else self.tree
        reads = torch.stack((self.lo.flatten(), self.hi.flatten(), tree.flatten()), 1)
        borders = (torch.searchsorted(self.image_row, row, right=right) for right in (False, True))
        of_images = (torch.stack(tuple(borders), 1), self.image_pages)
        image_hi = torch.maximum(self.image_lo, self.image_hi)
        image_reads = torch.stack((self.image_lo, image_hi), 2)
        parts = (self.pages, row, query, reads, *of_images, image_reads, self.cos, self.sin)
        return tuple(x.contiguous().numpy() for x in parts)


@dataclass(frozen=True)
class AttentionPlan:
    """One step's reading and writing, shared by all layers that read the same keys.

    `slots` [T] int64: where each new token is stored, page * page_size + offset in the text pool,
    or a `vision_slot`, or NOWHERE; `cos`, `sin` [T, D/2] float32 of its rotary position. Where text
    has a residual, a token's slot is there, and `filled` [T] int64 says which page of the text pool
    holds its page from now on, if it is the last of it (else -1).
    """

    slots: Tensor
    cos: Tensor
    sin: Tensor
    groups: tuple[QueryGroup, ...]
    filled: Tensor | None = None

    @cached_property
    def alone(self) -> tuple[Tensor, Tensor, tuple[QueryGroup, ...]]:
        """The numbers of the text pages and the image pages that are read, and the groups as they
        would be if these were all pages that there are."""
        (pages, own), (images, seen) = (
            _numbered([getattr(group, name) for group in self.groups])
            for name in ("pages", "image_pages")
        )
        parts = zip(self.groups, own, seen, strict=True)
        groups = (replace(group, pages=text, image_pages=image) for group, text, image in parts)
        return pages, images, tuple(groups)

    @cached_property
    def writes(self) -> tuple[tuple[Tensor | None, Tensor] | None, ...]:
        """For the text and the vision pool: the flat rows (None: all) and their slots there."""
        text = self.slots >= 0
        found: list[tuple[Tensor | None, Tensor] | None] = []
        for rows, slots in ((text, self.slots), (self.slots < NOWHERE, vision_slot(self.slots))):
            if rows.all():
                found.append((None, slots))
            else:
                found.append((rows.nonzero()[:, 0], slots[rows]) if rows.any() else None)
        return tuple(found)


def _numbered(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """All numbers among the parts, each once; the parts with each number's place among them."""
    flat = torch.cat([part.flatten() for part in parts])
    numbers, places = torch.unique(flat, return_inverse=True)
    split = places.split([part.numel() for part in parts])
    return numbers, [mine.view(part.shape) for mine, part in zip(split, parts, strict=True)]


def rope_table(max_position: int, head_dim: int, theta: float) -> Tensor:
    """cos and sin of every integer position, [max_position, 2, head_dim / 2] float32.

    Angles are formed in float64: in float32 they are off by about 0.06 rad near position 1e6.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return angle_table(max_position, inverse)


def angle_table(max_position: int, inverse: Tensor) -> Tensor:
    """The same for these angles between neighbours, [head_dim / 2]."""
    angle = torch.arange(max_position, dtype=torch.float64)[:, None] * inverse.double().cpu()
    return torch.stack((angle.cos(), angle.sin()), 1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout: x [..., D], cos and sin [..., D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def write_kv(pages: Pages, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [T, Hkv, D] at the slots int64 [T] of pages, in place.

    Where a format takes whole pages, the slots of a page's tokens follow each other, from its first
    one on: what else it held is forgotten.
    """
    kind, parts = pages.kind, zip(PARTS, pages[:2], (k, v), strict=True)
    for part, pool, tensor in parts:
        new = tensor.transpose(0, 1)  # [Hkv, T, D]
        if kind.plain:
            pool.view(pool.shape[0], -1, pool.shape[3])[:, slots] = new.to(pool.dtype)
        elif kind.whole_pages:
            _write_pages(pool, slots, new, pages, part)
        else:
            page, at = slots // pages.page_size, slots % pages.page_size
            views = token_views(pool, kind, pages.page_size, pages.dim)
            for view, encoded in zip(views, encode_tokens(new, kind), strict=True):
                view[:, page, at] = encoded


def _write_pages(pool: Tensor, slots: Tensor, new: Tensor, pages: Pages, part: Part) -> None:
    """Pages of tiles [Hkv, pages, tile] as a whole, from new [Hkv, T, D]."""
    size = pages.page_size
    firsts = (slots % size == 0).nonzero()[:, 0]
    ends = torch.cat((firsts[1:], firsts.new_tensor([len(slots)])))
    rows = firsts[:, None] + torch.arange(size, device=slots.device)  # [pages, size]
    filled = new[:, rows.clamp_max(len(slots) - 1)]
    counts = (ends - firsts).expand(len(new), -1)
    pool[:, slots[firsts] // size] = encode_pages(filled, counts, pages.kind, part)


def move_kv(pools: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy what stands at the slots `sources` int64 [N] of pools [..., pages, page_size, D] to
    `destinations`, in place. All is read before anything is written."""
    slots = pools.view(*pools.shape[:-3], -1, pools.shape[-1])
    slots.index_copy_(-2, destinations, slots.index_select(-2, sources))


def move_tokens(
    tiles: Tensor, kind: KVFormat, page_size: int, dim: int, sources: Tensor, destinations: Tensor
) -> None:
    """The same in tiles [..., pages, tile] of a format whose tokens are stored one by one."""
    for view in token_views(tiles, kind, page_size, dim):
        held = view.flatten(0, tiles.dim() - 3)
        page, at = destinations // page_size, destinations % page_size
        held[:, page, at] = held[:, sources // page_size, sources % page_size]


def write_step(plan: AttentionPlan, text: Pages, vision: Pages, k: Tensor, v: Tensor) -> None:
    """Store a step's keys and values, each [T, Hkv, D], in the pools that the plan names."""
    own = text if text.residual is None else text.residual
    for pages, write in zip((own, vision), plan.writes, strict=True):
        if write is not None:
            rows, slots = write
            write_kv(pages, slots, *((k, v) if rows is None else (k[rows], v[rows])))
    if text.residual is not None and plan.filled is not None:
        fill_pages(text, plan.slots, plan.filled)


def fill_pages(text: Pages, slots: Tensor, filled: Tensor) -> None:
    """Store the pages of the residual that are full now: those in which `slots` [T] stand where
    `filled` [T], the page to be stored, is not below 0.

    Each by itself, in one shape always: its bytes do not depend on which others are full.
    """
    assert text.residual is not None
    for row in (filled >= 0).nonzero()[:, 0].tolist():
        source, target = int(slots[row]) // text.page_size, int(filled[row])
        for part, pool, held in zip(PARTS, text[:2], text.residual[:2], strict=True):
            page = held[:, source]
            count = torch.full(page.shape[:1], text.page_size, device=page.device)
            pool[:, target] = encode_pages(page, count, text.kind, part)


def read_pages(pages: Pages, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the pages with these numbers [B, P]: each [B, Hkv, P * page_size, D]."""
    k, v = (_read(pages, part, numbers) for part in PARTS)
    return k, v


def read_slots(pages: Pages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the tokens at the slots int64 [N]: each [Hkv, N, D]."""
    if pages.kind.plain:
        k, v = (pool.flatten(1, 2).index_select(1, slots) for pool in pages[:2])
        return k, v
    numbers, which = torch.unique(slots // pages.size, return_inverse=True)
    at = which * pages.size + slots % pages.size
    k, v = (found[0].index_select(1, at) for found in read_pages(pages, numbers[None]))
    return k, v


def _read(pages: Pages, part: Part, numbers: Tensor) -> Tensor:
    if pages.residual is not None and bool((is_open := numbers < 0).any()):
        found = _read(pages._replace(residual=None), part, numbers.clamp_min(0))
        raw = _read(pages.residual, part, open_page(numbers[is_open])[:, None])
        batch, heads, _, dim = found.shape
        by_page = found.view(batch, heads, -1, pages.size, dim).transpose(1, 2)
        by_page[is_open] = raw.to(found.dtype)
        return found
    pool = pages.k if part == "k" else pages.v
    heads, found = pool.shape[0], pool.flatten(2).index_select(1, numbers.flatten())
    if not pages.kind.plain:
        found = decode_pages(found, pages.kind, part, pages.page_size, pages.dim)
    dim = pool.shape[3] if pages.kind.plain else pages.dim
    rows = found.reshape(heads, numbers.shape[0], numbers.shape[1] * pages.size, dim)
    return rows.transpose(0, 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention with grouped heads, and its log-sum-exp.

    q [B, Q, H, D], k and v [B, Hkv, L, D], mask [B, Q, L] bool (True: read) ->
    out [B, Q, H, D], lse [B, Q, H]; a query that reads nothing gives 0 and -inf. `softcap` c:
    scores s become c tanh(s / c) (Gemma 2).
    """
    num_seqs, num_queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(num_seqs, num_queries, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    rows = grouped.reshape(num_seqs, kv_heads, -1, dim)  # [B, Hkv, G * Q, D]
    scores = torch.matmul(rows * scale, k.to(q.dtype).transpose(2, 3))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_seqs, kv_heads, -1, num_queries, k.shape[2])
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp_min(-1e30)  # finite even where nothing is read
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    weights = (weights / total.clamp_min(1e-30)).view(num_seqs, kv_heads, -1, k.shape[2])
    out = torch.matmul(weights, v.to(q.dtype)).view(num_seqs, kv_heads, -1, num_queries, dim)
    out = out.permute(0, 3, 1, 2, 4).reshape(num_seqs, num_queries, heads, dim)
    return out, lse.permute(0, 3, 1, 2).reshape(num_seqs, num_queries, heads)


def merge(outs: Tensor, lses: Tensor) -> Tensor:
    """Join parts by log-sum-exp: outs [B, S, Q, H, D], lses [B, S, Q, H] -> [B, Q, H, D].

    A query that reads nothing in any part gives 0.
    """
    weights = torch.softmax(lses.clamp_min(-1e30), 1)
    return (outs * weights.unsqueeze(-1)).sum(1)


def group_attention(
    q: Tensor,
    group: QueryGroup,
    text: Pages,
    vision: Pages,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one group. q [B, Q, H, D] rotated at absolute positions -> [B, Q, H, D]."""
    parts: list[tuple[Tensor, Tensor]] = []
    if group.pages.shape[1]:
        k, v = read_pages(text, group.pages)
        index = torch.arange(k.shape[2], device=q.device)
        mask = (index >= group.lo[..., None]) & (index < group.hi[..., None])
        if group.sink_tokens is not None:
            mask |= (index < group.lo[..., None]) & (index < group.sink_tokens[:, None, None])
        if group.tree is not None:
            bit = index - group.hi[..., None]
            drawn = group.tree[..., None] >> bit.clamp(0, 63) & 1 > 0
            mask |= drawn & (bit >= 0) & (bit < 64)
        out, lse = attend(q, k, v, mask, scale, softcap)
        parts.append((out[:, None], lse[:, None]))
    if len(group.image_row):
        k, v = read_pages(vision, group.image_pages)
        index = torch.arange(k.shape[2], device=q.device)
        mask = (index >= group.image_lo[..., None]) & (index < group.image_hi[..., None])
        turned = rotate(q[group.image_row], group.cos[:, None, None], group.sin[:, None, None])
        image_out, image_lse = attend(turned, k, v, mask, scale, softcap)
        shape = (group.num_seqs * group.max_images, *q.shape[1:])
        outs, lses = q.new_zeros(shape), q.new_full(shape[:-1], float("-inf"))
        outs[group.image_slot], lses[group.image_slot] = image_out, image_lse
        by_seq = (group.num_seqs, group.max_images)
        parts.append((outs.view(*by_seq, *q.shape[1:]), lses.view(*by_seq, *q.shape[1:-1])))
    if sinks is not None:
        lse = sinks.to(q.dtype).expand(group.num_seqs, 1, group.num_queries, -1)
        parts.append((torch.zeros_like(q)[:, None], lse))
    if not parts:
        return torch.zeros_like(q)
    if len(parts) == 1 and parts[0][0].shape[1] == 1:
        return parts[0][0][:, 0]
    return merge(torch.cat([o for o, _ in parts], 1), torch.cat([x for _, x in parts], 1))


def paged_attention(
    q: Tensor,
    plan: AttentionPlan,
    text: Pages,
    vision: Pages,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a whole step over one layer's pools.

    q [T, H, D] -> the same. `sinks` [H]: scores that a model learned for a key without value, which
    every query reads. The step's own keys and values must already be written (`write_step`).
    """
    outs = []
    for group in plan.groups:
        count = group.num_seqs * group.num_queries
        rows = q[group.start : group.start + count]
        rows = rows.view(group.num_seqs, group.num_queries, *q.shape[1:])
        out = group_attention(rows, group, text, vision, scale, softcap, sinks)
        outs.append(out.flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]
