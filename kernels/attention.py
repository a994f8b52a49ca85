"""Segment attention over two paged pools on a GPU, in Triton.

Owns the kernels. What they compute is mmserve.kernels.reference's `paged_attention`; which keys
every query reads comes as the tables of mmserve.kernels.work, so one captured launch serves any
step. Knows nothing of sequences or scheduling.

A *task* is one work item and one KV head: some queries (all query heads of the KV head together)
over some keys, read once for all of them. Long contexts are cut into items, whose partial results
are merged in a fixed order: the bits of a query's result depend on its own segments only. An item
that holds everything its queries read writes the result itself.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained
from mmserve.kernels.work import ENTRY, HEADER, LARGE, LARGE_ROWS, SEGMENT, SMALL, SMALL_ROWS


@triton.jit
def _tiles(
    state_m, state_l, acc, q_a, q_b, keys, values, table, first, last, hi, seen,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [first, last) of one segment, BLOCK_N at a time.

    state_m, state_l [M], acc [M, WIDE]; q_a, q_b [M, HALF] the rotated halves, scaled for exp2;
    keys, values: a head's first element; table: the segment's page ids; hi [M], seen [M]: a row
    reads keys below hi, if seen. Without MASKED every row reads every key.
    """
    half = tl.arange(0, HALF)
    wide = tl.arange(0, WIDE)
    half_ok = half < D // 2
    wide_ok = wide < D
    for at in tl.range(first, last, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        valid = n < last
        if MASKED:
            page = tl.load(table + n // PAGE, mask=valid, other=0)
        else:
            page = tl.load(table + n // PAGE)
        slot = page.to(tl.int64) * PAGE + n % PAGE
        if MASKED or HALF * 2 != D:
            k_mask = half_ok[:, None] & valid[None, :]
            k_a = tl.load(keys + slot[None, :] * D + half[:, None], mask=k_mask, other=0.0)
            k_b = tl.load(keys + slot[None, :] * D + D // 2 + half[:, None], mask=k_mask, other=0.0)
        else:
            k_a = tl.load(keys + slot[None, :] * D + half[:, None])
            k_b = tl.load(keys + slot[None, :] * D + D // 2 + half[:, None])
        s = tl.dot(q_a, k_a, input_precision=PRECISION)
        s = tl.dot(q_b, k_b, s, input_precision=PRECISION)
        if MASKED:
            s = tl.where((n[None, :] < hi[:, None]) & seen[:, None] & valid[None, :], s, -1e30)
        new_m = tl.maximum(state_m, tl.max(s, 1))
        p = tl.exp2(s - new_m[:, None])
        if MASKED:
            p = tl.where(s > -1e29, p, 0.0)
        fade = tl.exp2(state_m - new_m)
        state_l = state_l * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        if MASKED or WIDE != D:
            v_mask = valid[:, None] & wide_ok[None, :]
            v = tl.load(values + slot[:, None] * D + wide[None, :], mask=v_mask, other=0.0)
        else:
            v = tl.load(values + slot[:, None] * D + wide[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        state_m = new_m
    return state_m, state_l, acc


@triton.jit
def _store(
    acc, state_m, state_l, ok, at, place, target, out, parts, lses,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows ok [M] of a finished item: whole results where target [M] < 0, else partial ones."""
    wide = tl.arange(0, WIDE)
    acc = acc / tl.maximum(state_l, 1e-30)[:, None]
    store = ok[:, None] & (wide < D)[None, :]
    direct = store & (target < 0)[:, None]
    tl.store(out + at[:, None] + wide[None, :], acc.to(out.dtype.element_ty), mask=direct)
    partly = store & (target >= 0)[:, None]
    tl.store(parts + place[:, None] * D + wide[None, :], acc, mask=partly)
    lse = tl.where(state_l > 0, state_m + tl.log2(tl.maximum(state_l, 1e-30)), -1e30)
    tl.store(lses + place, lse, mask=ok & (target >= 0))


@triton.jit
def _attend_one(
    work, items_at, q, out, parts, lses, k_own, v_own, k_vision, v_vision,
    own_head, vision_head, rope, scale,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SMALL: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """All small items. q [T, H, D] rotated at absolute positions, out [T, H, D]; parts [slots, H,
    D] and lses [slots, H] float32; pools: one layer's, a head's pages contiguous; rope [positions,
    2, D / 2] float32."""
    GROUP: tl.constexpr = H // KV_HEADS
    tasks = tl.load(work) * KV_HEADS
    g = tl.arange(0, BLOCK_M)
    half = tl.arange(0, HALF)
    ok = g < GROUP
    q_mask = ok[:, None] & (half < D // 2)[None, :]
    all_keys = tl.full([BLOCK_M], 2147483647, tl.int32)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        item = work + items_at + task // KV_HEADS * SMALL
        head = task % KV_HEADS
        row = tl.load(item).to(tl.int64)
        slot = tl.load(item + 1).to(tl.int64)
        table = work + tl.load(item + 2)
        first = tl.load(item + 3)
        last = tl.load(item + 4)
        base = tl.load(item + 5)
        at = (row * H + head * GROUP + g) * D
        raw_a = tl.load(q + at[:, None] + half[None, :], mask=q_mask, other=0.0)
        raw_b = tl.load(q + at[:, None] + D // 2 + half[None, :], mask=q_mask, other=0.0)
        q_a = raw_a.to(tl.float32) * (scale * 1.4426950408889634)
        q_b = raw_b.to(tl.float32) * (scale * 1.4426950408889634)
        keys = k_own + head * own_head
        values = v_own + head * own_head
        if base >= 0:
            angle = rope + base.to(tl.int64) * D + half
            cos = tl.load(angle, mask=half < D // 2, other=1.0)[None, :]
            sin = tl.load(angle + D // 2, mask=half < D // 2, other=0.0)[None, :]
            turned = q_a * cos + q_b * sin
            q_b = q_b * cos - q_a * sin
            q_a = turned
            keys = k_vision + head * vision_head
            values = v_vision + head * vision_head
        state_m = tl.full([BLOCK_M], -1e30, tl.float32)
        state_l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
        full = last - (last - first) % BLOCK_N
        rounded_a = q_a.to(raw_a.dtype)
        rounded_b = q_b.to(raw_a.dtype)
        state_m, state_l, acc = _tiles(
            state_m, state_l, acc, rounded_a, rounded_b, keys, values, table, first, full,
            all_keys, ok, D, HALF, WIDE, PAGE, BLOCK_N, False, PRECISION,
        )  # fmt: skip
        if full < last:
            state_m, state_l, acc = _tiles(
                state_m, state_l, acc, rounded_a, rounded_b, keys, values, table, full, last,
                all_keys, ok, D, HALF, WIDE, PAGE, BLOCK_N, True, PRECISION,
            )  # fmt: skip
        target = slot + tl.zeros([BLOCK_M], tl.int64)
        place = slot * H + head * GROUP + g
        _store(acc, state_m, state_l, ok, at, place, target, out, parts, lses, D, WIDE)


@triton.jit
def _attend_many(
    work, q, out, parts, lses, k_own, v_own, k_vision, v_vision,
    own_head, vision_head, rope, scale,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LARGE: tl.constexpr, ENTRY: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """All large items; arguments as `_attend_one`'s."""
    GROUP: tl.constexpr = H // KV_HEADS
    items = work + tl.load(work + 2)
    segments = work + tl.load(work + 3)
    entries = work + tl.load(work + 4)
    tasks = tl.load(work + 1) * KV_HEADS
    m = tl.arange(0, BLOCK_M)
    half = tl.arange(0, HALF)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        item = items + task // KV_HEADS * LARGE
        head = task % KV_HEADS
        entry = entries + (tl.load(item) + m // GROUP) * ENTRY
        ok = m // GROUP < tl.load(item + 1)
        row = tl.load(entry, mask=ok, other=0).to(tl.int64)
        target = tl.load(entry + 1, mask=ok, other=-1).to(tl.int64)
        target = tl.where(target < 0, target, target + tl.load(item + 4))
        shift = tl.load(entry + 2, mask=ok, other=0)
        hi = tl.load(entry + 3, mask=ok, other=2147483647)
        least = tl.min(hi, 0)
        query_head = head * GROUP + m % GROUP
        at = (row * H + query_head) * D
        q_mask = ok[:, None] & (half < D // 2)[None, :]
        raw_a = tl.load(q + at[:, None] + half[None, :], mask=q_mask, other=0.0)
        raw_b = tl.load(q + at[:, None] + D // 2 + half[None, :], mask=q_mask, other=0.0)
        wide_a = raw_a.to(tl.float32) * (scale * 1.4426950408889634)
        wide_b = raw_b.to(tl.float32) * (scale * 1.4426950408889634)
        state_m = tl.full([BLOCK_M], -1e30, tl.float32)
        state_l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
        first_segment = tl.load(item + 2)
        for index in range(first_segment, first_segment + tl.load(item + 3)):
            segment = segments + index * SEGMENT
            in_vision = tl.load(segment)
            table = work + tl.load(segment + 1)
            first = tl.load(segment + 2)
            last = tl.load(segment + 3)
            if in_vision != 0:
                base = tl.load(segment + 4) + shift
                angle = rope + base[:, None].to(tl.int64) * D + half[None, :]
                cos = tl.load(angle, mask=q_mask, other=1.0)
                sin = tl.load(angle + D // 2, mask=q_mask, other=0.0)
                turned_a = (wide_a * cos + wide_b * sin).to(raw_a.dtype)
                turned_b = (wide_b * cos - wide_a * sin).to(raw_a.dtype)
                keys = k_vision + head * vision_head
                values = v_vision + head * vision_head
                threshold = tl.load(segment + 5)
                seen = threshold < hi
                bound = hi * 0 + 2147483647
                full = tl.where(threshold < least, last - (last - first) % BLOCK_N, first)
            else:
                turned_a = wide_a.to(raw_a.dtype)
                turned_b = wide_b.to(raw_a.dtype)
                keys = k_own + head * own_head
                values = v_own + head * own_head
                seen = hi > 0
                bound = hi
                end = tl.minimum(last, tl.maximum(least, first))
                full = end - (end - first) % BLOCK_N
                last = tl.minimum(last, tl.max(tl.where(ok, hi, 0), 0))
            state_m, state_l, acc = _tiles(
                state_m, state_l, acc, turned_a, turned_b, keys, values, table, first, full,
                bound, seen, D, HALF, WIDE, PAGE, BLOCK_N, False, PRECISION,
            )  # fmt: skip
            state_m, state_l, acc = _tiles(
                state_m, state_l, acc, turned_a, turned_b, keys, values, table, full, last,
                bound, seen, D, HALF, WIDE, PAGE, BLOCK_N, True, PRECISION,
            )  # fmt: skip
        place = target * H + query_head
        _store(acc, state_m, state_l, ok, at, place, target, out, parts, lses, D, WIDE)


@triton.jit
def _merge(
    work, out, parts, lses,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Join the partial results of row program_id(0), head program_id(1), in order of slots."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    merges = work + tl.load(work + 5)
    first = tl.load(merges + 2 * row)
    count = tl.load(merges + 2 * row + 1)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count > 0:
        wide = tl.arange(0, WIDE)
        top = tl.full([], -1e30, tl.float32)
        total = tl.zeros([], tl.float32)
        acc = tl.zeros([WIDE], tl.float32)
        for at in tl.range(0, count, BLOCK_P):
            p = at + tl.arange(0, BLOCK_P)
            place = (first + p).to(tl.int64) * H + head
            lse = tl.load(lses + place, mask=p < count, other=-1e30)
            mask = (p < count)[:, None] & (wide < D)[None, :]
            part = tl.load(parts + place[:, None] * D + wide[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(lse, 0))
            weight = tl.where(lse > -1e29, tl.exp2(lse - new_top), 0.0)
            fade = tl.exp2(top - new_top)
            total = total * fade + tl.sum(weight, 0)
            acc = acc * fade + tl.sum(part * weight[:, None], 0)
            top = new_top
        result = acc / tl.maximum(total, 1e-30)
        at_out = (row.to(tl.int64) * H + head) * D + wide
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=wide < D)


class Launch(NamedTuple):
    """How a step's tables are run: programs for small and for large items (0: there are none of
    the kind), whether any row has partial results, and where the small items begin."""

    small: int
    large: int
    merge: bool
    items_at: int = HEADER


class Scratch:
    """Room for partial results, shared by all layers: `slots` of them."""

    def __init__(self, slots: int, heads: int, dim: int, device: torch.device) -> None:
        self.parts = torch.empty(slots, heads, dim, dtype=torch.float32, device=device)
        self.lses = torch.empty(slots, heads, dtype=torch.float32, device=device)


def _tuning(many: bool, dim: int, itemsize: int) -> dict[str, int]:
    """Block sizes by measurement on an H200."""
    if not many:
        return {"BLOCK_N": 32, "num_warps": 1 if dim <= 128 else 2, "num_stages": 3}
    narrow = dim > 128 or itemsize > 2
    return {"BLOCK_N": 32 if narrow else 64, "num_warps": 8 if dim > 64 else 4, "num_stages": 2}


def paged_attention(
    q: Tensor,
    work: Tensor,
    own: tuple[Tensor, Tensor],
    vision: tuple[Tensor, Tensor],
    rope: Tensor,
    scale: float,
    scratch: Scratch,
    out: Tensor,
    launch: Launch,
) -> None:
    """A step's attention over one layer's pools; no allocation, no synchronisation.

    q, out [T, H, D]; work: `work.build`'s array on the device; own, vision: (K, V), each [Hkv,
    pages, page, D] with a head's pages contiguous; rope [positions, 2, D / 2] float32.
    """
    heads, dim = q.shape[1:]
    kv_heads, page = own[0].shape[0], own[0].shape[2]
    half = max(triton.next_power_of_2(dim // 2), 16)
    wide = max(triton.next_power_of_2(dim), 16)
    shape: dict[str, Any] = {"H": heads, "KV_HEADS": kv_heads, "D": dim, "HALF": half}
    shape |= {"WIDE": wide, "PAGE": page, **chained(q.device)}
    shape["PRECISION"] = "ieee" if q.dtype == torch.float32 else "tf32"
    pools = (*own, *vision, own[0].stride(0), vision[0].stride(0))
    results = (out, scratch.parts, scratch.lses)
    if launch.small:
        _attend_one[(launch.small,)](
            work, launch.items_at, q, *results, *pools, rope, scale, BLOCK_M=SMALL_ROWS,
            SMALL=SMALL, **shape, **_tuning(False, dim, q.element_size()),
        )  # fmt: skip
    if launch.large:
        _attend_many[(launch.large,)](
            work, q, *results, *pools, rope, scale, BLOCK_M=LARGE_ROWS, LARGE=LARGE, ENTRY=ENTRY,
            SEGMENT=SEGMENT, **shape, **_tuning(True, dim, q.element_size()),
        )  # fmt: skip
    if launch.merge:
        _merge[(len(q), heads)](
            work, *results, H=heads, D=dim, WIDE=wide, BLOCK_P=16,
            num_warps=1 if wide <= 128 else 2, **chained(q.device),
        )  # fmt: skip
