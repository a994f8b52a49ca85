"""The kernels of segment attention over two paged pools, in Triton.

Owns what runs on the device; mmserve.kernels.attention launches it. What is computed is
mmserve.kernels.reference's `paged_attention`; which keys every query reads comes as the tables of
mmserve.kernels.work. Knows nothing of sequences or scheduling.

A *task* is one work item and one KV head: some queries (all query heads of the KV head together)
over some keys, read once for all of them. Long contexts are cut into items, whose partial results
are merged in a fixed order: the bits of a query's result depend on its own segments only. An item
that holds everything its queries read writes the result itself.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mmserve.kernels import work as tables
from mmserve.kernels.pool_keys import read, stored

OWN, NEWEST = tl.constexpr(tables.OWN), tl.constexpr(tables.NEWEST)
OF_NEWEST = tl.constexpr(tables.OF_NEWEST)
TEXT, VISION, SINKS, SHARED = (
    tl.constexpr(code) for code in (tables.TEXT, tables.VISION, tables.SINKS, tables.SHARED)
)


@triton.jit
def store_item(
    acc, state_m, state_l, ok, at, place, target, query_head, out, parts, lses, sinks,
    D: tl.constexpr, WIDE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Rows ok [M] of a finished item: whole results where target [M] < 0, else partial ones."""
    wide = tl.arange(0, WIDE)
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(target < 0, tl.maximum(state_m, sink), state_m)
        fade = tl.exp2(state_m - top)
        state_l = state_l * fade + tl.where(target < 0, tl.exp2(sink - top), 0.0)
        acc = acc * fade[:, None]
        state_m = top
    acc = acc / tl.maximum(state_l, 1e-30)[:, None]
    store = ok[:, None] & (wide < D)[None, :]
    direct = store & (target < 0)[:, None]
    tl.store(out + at[:, None] + wide[None, :], acc.to(out.dtype.element_ty), mask=direct)
    partly = store & (target >= 0)[:, None]
    tl.store(parts + place[:, None] * D + wide[None, :], acc, mask=partly)
    lse = tl.where(state_l > 0, state_m + tl.log2(tl.maximum(state_l, 1e-30)), -1e30)
    tl.store(lses + place, lse, mask=ok & (target >= 0))


@triton.jit
def _query(q, at, ok, scale, D: tl.constexpr, HALF: tl.constexpr):
    """Both halves [M, HALF] of rows ok [M] of q, float32, scaled for exp2."""
    half = tl.arange(0, HALF)
    mask = ok[:, None] & (half < D // 2)[None, :]
    a = tl.load(q + at[:, None] + half[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(q + at[:, None] + D // 2 + half[None, :], mask=mask, other=0.0).to(tl.float32)
    return a * (scale * 1.4426950408889634), b * (scale * 1.4426950408889634)


@triton.jit
def turn_back(a, b, rope, base, ok, D: tl.constexpr, HALF: tl.constexpr):
    """The halves a, b [M, HALF] rotated by the angles of -base [M]."""
    half = tl.arange(0, HALF)
    mask = ok[:, None] & (half < D // 2)[None, :]
    angle = rope + base[:, None].to(tl.int64) * D + half[None, :]
    cos = tl.load(angle, mask=mask, other=1.0)
    sin = tl.load(angle + D // 2, mask=mask, other=0.0)
    return a * cos + b * sin, b * cos - a * sin


@triton.jit
def attend_one(
    work, header, q, out, parts, lses, k_own, v_own, k_vision, v_vision,
    own_head, vision_head, rope, scale, sinks,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SMALL: tl.constexpr, CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    OWN_FORM: tl.constexpr, VISION_FORM: tl.constexpr, ASSEMBLY: tl.constexpr,
    RESIDUAL: tl.constexpr, LATE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """All small items of the set with this header: if RESIDUAL those over text's residual, which is
    the own pool then, else the others, for registers hold one format. q [T, H, D] rotated at
    absolute positions, out [T, H, D]; parts [slots, H, D], lses [slots, H] float32; pools: one
    layer's, a head's pages contiguous; rope [positions, 2, D / 2] float32; sinks [H]. LATE: other
    items were launched before, and run at the same time."""
    GROUP: tl.constexpr = H // KV_HEADS
    kind = header + (OF_NEWEST if RESIDUAL else 0)
    tasks = tl.load(kind) * KV_HEADS
    items = work + tl.load(kind + 1)
    merges = work + tl.load(header + 6)
    g = tl.arange(0, BLOCK_M)
    ok = g < GROUP
    none = tl.zeros([BLOCK_M], tl.int32)
    all_keys = tl.full([BLOCK_M], 2147483647, tl.int32)
    if CHAINED:
        if RESIDUAL and not LATE:  # the other small items begin when this launch lets them
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        if not (RESIDUAL or LATE):  # else those before have waited before they let this one begin
            tl.extra.cuda.gdc_wait()
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        item = items + task // KV_HEADS * SMALL
        head = tl.cast(task % KV_HEADS, tl.int64)
        row = tl.load(item).to(tl.int64)
        table = work + tl.load(item + 2)
        first = tl.load(item + 3)
        last = tl.load(item + 4)
        base = tl.load(item + 5)
        slot = tl.load(merges + 2 * row) + tl.load(item + 1)
        query_head = head * GROUP + g
        at = (row * H + query_head) * D
        q_a, q_b = _query(q, at, ok, scale, D, HALF)
        if base >= 0:
            q_a, q_b = turn_back(q_a, q_b, rope, base + none, ok, D, HALF)
        state_m = tl.full([BLOCK_M], -1e30, tl.float32)
        state_l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
        state_m, state_l, acc = stored(
            state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base + none, base >= 0,
            (base != OWN) & (base != NEWEST), k_own + head * own_head, v_own + head * own_head,
            k_vision + head * vision_head, v_vision + head * vision_head,
            table, first, last, first, last, none, all_keys, none,
            OWN_FORM, VISION_FORM, D, HALF, WIDE, BLOCK_N, False, CAP, PRECISION, ASSEMBLY,
        )  # fmt: skip
        target = tl.where(tl.load(merges + 2 * row + 1) > 1, slot, -1) + tl.zeros_like(at)
        store_item(
            acc, state_m, state_l, ok, at, target * H + query_head, target, query_head,
            out, parts, lses, sinks, D, WIDE, HAS_SINKS,
        )  # fmt: skip
    if CHAINED and LATE:
        tl.extra.cuda.gdc_wait()  # whoever waits for this launch waits for those before, too


@triton.jit
def _segment(
    state_m, state_l, acc, wide_a, wide_b, work, segment, entry, shift,
    lo, hi, visual_lo, visual_hi, tree, q, at, ok, scale, k_own, v_own, k_vision, v_vision,
    k_rest, v_rest, rope, OWN_FORM: tl.constexpr, VISION_FORM: tl.constexpr,
    REST_FORM: tl.constexpr, ENTRY: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_N: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """All keys of one segment for the queries wide_a, wide_b of a large item, which stand `at` [M]
    in q and whose entries stand at `entry` [M]."""
    kind = tl.load(segment)
    table = work + tl.load(segment + 1)
    first = tl.load(segment + 2)
    last = tl.load(segment + 3)
    base = tl.load(segment + 6)
    offset = tl.load(segment + 7)
    q_a = wide_a
    q_b = wide_b
    visual = (kind == VISION) | (kind == SHARED)
    if visual:
        lo = visual_lo - offset
        hi = visual_hi - offset
    if kind == SHARED:
        lo = lo * 0
        hi = lo + last
        shift = tl.load(entry + offset * ENTRY + 2, mask=ok, other=0)
    if TREES:
        tree = tl.where(kind == TEXT, tree, 0)
    if kind == SINKS:
        hi = tl.minimum(lo, offset)
        lo = lo * 0
    if base >= 0:
        q_a, q_b = turn_back(wide_a, wide_b, rope, base + shift, ok, D, HALF)
    return read(
        state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base + shift, base >= 0, visual,
        base == NEWEST, k_own, v_own, k_vision, v_vision, k_rest, v_rest, table, first, last,
        tl.load(segment + 4), tl.load(segment + 5), lo, hi, tree,
        OWN_FORM, VISION_FORM, REST_FORM, D, HALF, WIDE, BLOCK_N, TREES, CAP, PRECISION, ASSEMBLY,
    )  # fmt: skip


@triton.jit
def _tree(work, trees, row, ok):
    """The masks of rows [M], int64; 0 where there are none."""
    halves = work + trees + 2 * row
    low = tl.load(halves, mask=ok & (trees > 0), other=0).to(tl.int64)
    high = tl.load(halves + 1, mask=ok & (trees > 0), other=0).to(tl.int64)
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit
def attend_many(
    work, header, q, out, parts, lses, k_own, v_own, k_vision, v_vision, k_rest, v_rest,
    own_head, vision_head, rest_head, rope, scale, sinks,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LARGE: tl.constexpr, ENTRY: tl.constexpr, SEGMENT: tl.constexpr, TREES: tl.constexpr,
    CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, OWN_FORM: tl.constexpr,
    VISION_FORM: tl.constexpr, REST_FORM: tl.constexpr, ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """All large items; arguments as `attend_one`'s."""
    GROUP: tl.constexpr = H // KV_HEADS
    tasks = tl.load(header + 2) * KV_HEADS
    items = work + tl.load(header + 3)
    segments = work + tl.load(header + 4)
    entries = work + tl.load(header + 5)
    merges = work + tl.load(header + 6)
    m = tl.arange(0, BLOCK_M)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        item = items + task // KV_HEADS * LARGE
        head = tl.cast(task % KV_HEADS, tl.int64)
        entry = entries + (tl.load(item) + m // GROUP) * ENTRY
        ok = m // GROUP < tl.load(item + 1)
        row = tl.load(entry, mask=ok, other=0).to(tl.int64)
        slot = tl.load(merges + 2 * row, mask=ok, other=0)
        slot += tl.load(entry + 1, mask=ok, other=0) + tl.load(item + 4)
        parts_of = tl.load(merges + 2 * row + 1, mask=ok, other=0)
        target = tl.where(parts_of > 1, slot, -1).to(tl.int64)
        shift = tl.load(entry + 2, mask=ok, other=0)
        lo = tl.load(entry + 3, mask=ok, other=0)
        hi = tl.load(entry + 4, mask=ok, other=0)
        visual_lo = tl.load(entry + 5, mask=ok, other=0)
        visual_hi = tl.load(entry + 6, mask=ok, other=0)
        tree = tl.zeros([BLOCK_M], tl.int64)
        if TREES:
            tree = _tree(work, tl.load(header + 7), row, ok)
        query_head = head * GROUP + m % GROUP
        at = (row * H + query_head) * D
        wide_a, wide_b = _query(q, at, ok, scale, D, HALF)
        state_m = tl.full([BLOCK_M], -1e30, tl.float32)
        state_l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
        begin = tl.load(item + 2)
        for index in range(begin, begin + tl.load(item + 3)):
            state_m, state_l, acc = _segment(
                state_m, state_l, acc, wide_a, wide_b, work, segments + index * SEGMENT, entry,
                shift, lo, hi, visual_lo, visual_hi, tree, q, at, ok, scale,
                k_own + head * own_head, v_own + head * own_head, k_vision + head * vision_head,
                v_vision + head * vision_head, k_rest + head * rest_head, v_rest + head * rest_head,
                rope, OWN_FORM, VISION_FORM, REST_FORM, ENTRY, D, HALF, WIDE, BLOCK_N, TREES, CAP,
                PRECISION, ASSEMBLY,
            )  # fmt: skip
        store_item(
            acc, state_m, state_l, ok, at, target * H + query_head, target, query_head,
            out, parts, lses, sinks, D, WIDE, HAS_SINKS,
        )  # fmt: skip


@triton.jit
def joined(
    first, count, head, parts, lses, sinks,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """What a query head's partial results [first, first + count) come to, in order of slots;
    float32 [WIDE]."""
    wide = tl.arange(0, WIDE)
    top = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([WIDE], tl.float32)
    for at in tl.range(0, count, BLOCK_P):
        p = at + tl.arange(0, BLOCK_P)
        place = (first + p).to(tl.int64) * H + head
        # Other programs of the same launch may have written them.
        lse = tl.load(lses + place, mask=p < count, other=-1e30, cache_modifier=".cg")
        mask = (p < count)[:, None] & (wide < D)[None, :]
        each = parts + place[:, None] * D + wide[None, :]
        part = tl.load(each, mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.where(lse > -1e29, tl.exp2(lse - new_top), 0.0)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(part * weight[:, None], 0)
        top = new_top
    return acc / tl.maximum(total, 1e-30)


@triton.jit
def merge(
    work, header, out, parts, lses, sinks,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Join the partial results of row program_id(0), head program_id(1)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    merges = work + tl.load(header + 6)
    first = tl.load(merges + 2 * row)
    count = tl.load(merges + 2 * row + 1)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count > 1:
        result = joined(first, count, head, parts, lses, sinks, H, D, WIDE, BLOCK_P, HAS_SINKS)
        wide = tl.arange(0, WIDE)
        at_out = (row.to(tl.int64) * H + head) * D + wide
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=wide < D)
