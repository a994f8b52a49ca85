"""Segment attention over two paged pools in plain PyTorch: the specification and the CPU path.

Owns the meaning of `AttentionPlan`: which keys every query reads and how its rotation is adjusted.
Knows nothing of sequences, models or scheduling.

A query at position p reads (1) the tokens [0, hi) of its own sequence, from pages of its own pool,
whose keys are rotated as the sequence counts positions, and (2) every image placed before it, from
vision pages, whose keys are rotated at the image's *local* positions 0..n-1. For an image at base
position b the query is rotated by a further -b, because R(p-b) q . R(l) k = R(p) q . R(b+l) k: the
stored bytes never change. Each part yields an output and a log-sum-exp; parts are merged in logical
order.

Text is a sequence in the text pool. An image being computed is a sequence in the vision pool whose
every query reads all of it and no image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryGroup:
    """B sequences with Q queries each, consecutive in the flat batch; all tensors on one device.

    `start`: first flat query. `pages` [B, P] int64 (padded with 0): pages of the sequences' own
    pool. `hi` [B, Q] int64: how many of their tokens each query reads. Image parts, N of them over
    all B sequences, in logical order: `image_pages` [N, V] int64 (padded with 0), `image_len` [N]
    int64 tokens, `image_row` [N] int64 the sequence, `image_slot` [N] int64 its place among the
    B * max_images slots, `image_seen` [N, Q] bool, `cos`, `sin` [N, D/2] float32 of the angle
    -base.
    """

    start: int
    num_seqs: int
    num_queries: int
    pages: Tensor
    hi: Tensor
    image_pages: Tensor
    image_len: Tensor
    image_row: Tensor
    image_slot: Tensor
    image_seen: Tensor
    cos: Tensor
    sin: Tensor
    max_images: int

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """What `cpu.row_attention` reads between the pools and the scale, as numpy views."""
        row = torch.arange(self.num_seqs).repeat_interleave(self.num_queries)
        seen = torch.zeros(self.num_seqs, self.num_queries, dtype=torch.long)
        seen.index_add_(0, self.image_row, self.image_seen.long())
        first = torch.searchsorted(self.image_row, row)
        reads = (self.hi.flatten(), first, first + seen.flatten())
        parts = (self.pages, row, *reads, self.image_pages, self.image_len, self.cos, self.sin)
        return tuple(x.contiguous().numpy() for x in parts)


@dataclass(frozen=True)
class AttentionPlan:
    """One step's reading and writing, shared by all layers.

    `slots` [T] int64: page * page_size + offset in the own pool of each new token; `cos`, `sin`
    [T, D/2] float32 of its rotary position.
    """

    slots: Tensor
    cos: Tensor
    sin: Tensor
    groups: tuple[QueryGroup, ...]


def rope_table(max_position: int, head_dim: int, theta: float) -> Tensor:
    """cos and sin of every integer position, [max_position, 2, head_dim / 2] float32.

    Angles are formed in float64: in float32 they are off by about 0.06 rad near position 1e6.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(max_position, dtype=torch.float64)[:, None] * inverse
    return torch.stack((angle.cos(), angle.sin()), 1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout: x [..., D], cos and sin [..., D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def write_kv(pool: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store new [T, Hkv, D] at the slots of pool [Hkv, pages, page_size, D], in place."""
    pool.view(pool.shape[0], -1, pool.shape[3])[:, slots] = new.transpose(0, 1).to(pool.dtype)


def read_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """Gather pages [B, P] of pool [Hkv, pages, page_size, D] -> [B, Hkv, P * page_size, D]."""
    heads, _, size, dim = pool.shape
    rows = pool.view(heads, -1, size * dim).index_select(1, pages.flatten())
    return rows.view(heads, pages.shape[0], pages.shape[1] * size, dim).transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention with grouped heads, and its log-sum-exp.

    q [B, Q, H, D], k and v [B, Hkv, L, D], mask [B, Q, L] bool (True: read) ->
    out [B, Q, H, D], lse [B, Q, H]; a query that reads nothing gives 0 and -inf.
    """
    num_seqs, num_queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(num_seqs, num_queries, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    rows = grouped.reshape(num_seqs, kv_heads, -1, dim)  # [B, Hkv, G * Q, D]
    scores = torch.matmul(rows * scale, k.to(q.dtype).transpose(2, 3))
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
    own: tuple[Tensor, Tensor],
    vision: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Attention of one group. q [B, Q, H, D] rotated at absolute positions -> [B, Q, H, D]."""
    k, v = (read_pages(pool, group.pages) for pool in own)
    index = torch.arange(k.shape[2], device=q.device)
    out, lse = attend(q, k, v, index < group.hi[..., None], scale)
    if not len(group.image_row):
        return out
    k, v = (read_pages(pool, group.image_pages) for pool in vision)
    local = torch.arange(k.shape[2], device=q.device)
    seen = (local < group.image_len[:, None])[:, None] & group.image_seen[..., None]
    turned = rotate(q[group.image_row], group.cos[:, None, None], group.sin[:, None, None])
    image_out, image_lse = attend(turned, k, v, seen, scale)
    shape = (group.num_seqs * group.max_images, *out.shape[1:])
    outs, lses = out.new_zeros(shape), lse.new_full(shape[:-1], float("-inf"))
    outs[group.image_slot], lses[group.image_slot] = image_out, image_lse
    parts = (group.num_seqs, group.max_images)
    return merge(
        torch.cat((out.unsqueeze(1), outs.view(*parts, *out.shape[1:])), 1),
        torch.cat((lse.unsqueeze(1), lses.view(*parts, *lse.shape[1:])), 1),
    )


def paged_attention(
    q: Tensor,
    plan: AttentionPlan,
    own: tuple[Tensor, Tensor],
    vision: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Attention of a whole step over one layer's pools.

    q [T, H, D]; own and vision: (K, V), each [Hkv, pages, page_size, D]; -> [T, H, D].
    The step's own keys and values must already be written (`write_kv`).
    """
    outs = []
    for group in plan.groups:
        count = group.num_seqs * group.num_queries
        rows = q[group.start : group.start + count]
        rows = rows.view(group.num_seqs, group.num_queries, *q.shape[1:])
        outs.append(group_attention(rows, group, own, vision, scale).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]
