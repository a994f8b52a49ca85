"""Storing whole pages in formats of groups, in Triton.

Owns how the tiles of mmserve.kernels.kv_formats that hold a page as a whole are written on a GPU:
by the same rule as `encode_pages`. Knows nothing of layers or steps.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained
from mmserve.kernels.kv_formats import CLIPS, Pages
from mmserve.kernels.packed_store import at_least, widened
from mmserve.kernels.unpacking import bits_of, form, has_outliers, value_groups

NUM_CLIPS = tl.constexpr(len(CLIPS))
MOST_PARTS = 16  # of a page of a head's keys or values
ROWS = 16  # of a step that a program looks through for pages


@triton.constexpr_function
def cut_of(index):
    """Of a group's range, twice what is left out at either end."""
    return 1 - CLIPS[index]


@triton.jit
def _across(x, AXIS: tl.constexpr):
    """One number a group, to be broadcast over the groups' members along AXIS."""
    if AXIS == 0:
        x = x[None, :]
    else:
        x = x[:, None]
    return x


@triton.jit
def _level(x, scale, least, MOST: tl.constexpr, AXIS: tl.constexpr):
    """float32, rounded to even by the addition."""
    step = _across(tl.maximum(scale, 1.1754943508222875e-38), AXIS)
    level = tl.minimum(tl.maximum((x - _across(least, AXIS)) / step, 0.0), MOST * 1.0)
    return (level + 12582912.0) - 12582912.0


@triton.jit
def _outlying(x, known, AXIS: tl.constexpr):
    """Each group's place that lies farthest out, the value there, and who is left."""
    number = _across(tl.arange(0, x.shape[AXIS]), 1 - AXIS)
    count = tl.sum(known.to(tl.int32), AXIS)
    total = tl.sum(tl.where(known, x, 0.0), AXIS)
    mean = total / tl.maximum(count, 1).to(tl.float32)
    far = tl.where(known, tl.abs(x - _across(mean, AXIS)), -1.0)
    place = tl.argmax(far, AXIS)
    there = number == _across(place, AXIS)
    value = tl.sum(tl.where(there, x, 0.0), AXIS)
    return place, value, known & (_across(count == 1, AXIS) | (there == 0))


@triton.jit
def _fit(x, kept, MOST: tl.constexpr, AXIS: tl.constexpr):
    """Scale and least value of each group along AXIS, float32 that bfloat16 holds: of the clips
    that whose squared error is least, the widest of those that are equal."""
    low = tl.min(tl.where(kept, x, float("inf")), AXIS)
    high = tl.max(tl.where(kept, x, float("-inf")), AXIS)
    some = low <= high
    low = tl.where(some, low, 0.0)
    high = tl.where(some, high, 0.0)
    best = low * 0.0 + float("inf")
    best_scale = low
    best_least = low
    for i in tl.static_range(NUM_CLIPS):
        cut = (high - low) * cut_of(i) / 2
        least = 0.0 - widened(at_least(cut - low))
        scale = widened(at_least((high - cut - least) / MOST))
        level = _level(x, scale, least, MOST, AXIS)
        error = level * _across(scale, AXIS) + _across(least, AXIS) - x
        error = tl.sum(tl.where(kept, error * error, 0.0), AXIS)
        better = error < best
        best = tl.where(better, error, best)
        best_scale = tl.where(better, scale, best_scale)
        best_least = tl.where(better, least, best_least)
    return best_scale, best_least


@triton.jit
def _note(tile, group, ok, scale, least, DATA: tl.constexpr, GROUPS: tl.constexpr):
    """Scales and least values of groups [N] behind the data."""
    scales = (tile + DATA).to(tl.pointer_type(tl.bfloat16)) + group
    tl.store(scales, scale.to(tl.bfloat16), mask=ok)
    tl.store(scales + GROUPS, least.to(tl.bfloat16), mask=ok)


@triton.jit
def _note_outliers(tile, group, ok, place, value, DATA: tl.constexpr, GROUPS: tl.constexpr):
    at = tile + DATA + 4 * GROUPS
    tl.store(at.to(tl.pointer_type(tl.bfloat16)) + group, value.to(tl.bfloat16), mask=ok)
    tl.store(at + 2 * GROUPS + group, place.to(tl.uint8), mask=ok)


@triton.jit
def _keys(
    rows, tile, held, part, C: tl.constexpr, PARTS: tl.constexpr, CODE: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """A part of a page of keys, whose rows begin at `rows` [P]: groups are channels, and a part has
    some of them. C: bytes of a token, padded."""
    PAGE: tl.constexpr = rows.shape[0]
    BITS: tl.constexpr = bits_of(CODE)
    EACH: tl.constexpr = D * BITS // 8
    column = part * (C // PARTS) + tl.arange(0, C // PARTS)
    ok = column < EACH
    known = held[:, None] & ok[None, :]
    data = tl.zeros([PAGE, C // PARTS], tl.int32)
    for j in tl.static_range(8 // BITS):
        dim = j * EACH + column
        x = tl.load(rows[:, None] + dim[None, :], mask=known, other=0.0).to(tl.float32)
        kept = known
        if has_outliers(CODE):
            place, value, kept = _outlying(x, known, 0)
            _note_outliers(tile, dim, ok, place, value, PAGE * EACH, D)
        scale, least = _fit(x, kept, 2**BITS - 1, 0)
        _note(tile, dim, ok, scale, least, PAGE * EACH, D)
        data |= _level(x, scale, least, 2**BITS - 1, 0).to(tl.int32) << (j * BITS)
    at = tl.arange(0, PAGE)[:, None] * EACH + column[None, :]
    tl.store(tile + at, data.to(tl.uint8), mask=ok[None, :])


@triton.jit
def _values(
    rows, tile, held, token, C: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    CODE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The same of values of the tokens [N] of a page, with rows and held of each: groups are a
    token's, or its halves. WIDE: a group, padded."""
    BITS: tl.constexpr = bits_of(CODE)
    EACH: tl.constexpr = D * BITS // 8
    GROUPS: tl.constexpr = value_groups(CODE, D)
    column = tl.arange(0, C)
    ok = column < EACH
    whole = tl.arange(0, WIDE)
    known = held[:, None] & (whole < D // GROUPS)[None, :]
    data = tl.zeros([rows.shape[0], C], tl.int32)
    for g in tl.static_range(GROUPS):
        at = rows[:, None] + g * (D // GROUPS) + whole[None, :]
        x = tl.load(at, mask=known, other=0.0).to(tl.float32)
        kept = known
        group = token * GROUPS + g
        if has_outliers(CODE):
            place, value, kept = _outlying(x, known, 1)
            _note_outliers(tile, group, token < PAGE, place, value, PAGE * EACH, GROUPS * PAGE)
        scale, least = _fit(x, kept, 2**BITS - 1, 1)
        _note(tile, group, token < PAGE, scale, least, PAGE * EACH, GROUPS * PAGE)
        for i in tl.static_range(8 // BITS // GROUPS):
            j = g * (8 // BITS // GROUPS) + i
            mask = held[:, None] & ok[None, :]
            elements = tl.load(rows[:, None] + j * EACH + column[None, :], mask=mask, other=0.0)
            level = _level(elements.to(tl.float32), scale, least, 2**BITS - 1, 1)
            data |= level.to(tl.int32) << (j * BITS)
    tl.store(tile + token[:, None] * EACH + column[None, :], data.to(tl.uint8), mask=ok[None, :])


@triton.jit
def _rows(slots, first, token, slot, num_tokens, stride):
    """Where the rows of these tokens of a page begin, and which belong to it."""
    row = (first + token).to(tl.int64)
    own = tl.load(slots + row, mask=row < num_tokens, other=-1).to(tl.int64)
    return row * stride, own == slot - token


@triton.jit(do_not_specialize=["num_tokens"])
def _store_pages(
    k, v, slots, k_tiles, v_tiles, num_tokens, k_row, k_own_head, v_row, v_own_head, tiles_head,
    FORM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A part of one head's pages whose first row is among the ROWS from program_id(1) on."""
    PAGE: tl.constexpr = FORM[2]
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // (2 * PARTS)
    begin = tl.program_id(1) * ROWS
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    each = begin + tl.arange(0, ROWS)
    some = tl.load(slots + each, mask=each < num_tokens, other=-1)
    end = tl.where(tl.min(some) < -1, tl.minimum(begin + ROWS, num_tokens), begin)
    every = tl.arange(0, PAGE)
    few = part * (PAGE // PARTS) + tl.arange(0, PAGE // PARTS)
    for first in tl.range(begin, end):
        slot = tl.load(slots + first).to(tl.int64)
        if (slot < -1) & ((-2 - slot) % PAGE == 0):
            tile = tl.cast(head, tl.int64) * tiles_head + (-2 - slot) // PAGE * FORM[1]
            if tl.program_id(0) // PARTS % 2 == 0:
                k_at, k_held = _rows(slots, first, every, slot, num_tokens, k_row)
                k_at += head * k_own_head
                _keys(k + k_at, k_tiles + tile, k_held, part, C, PARTS, FORM[0], D)
            else:
                v_at, v_held = _rows(slots, first, few, slot, num_tokens, v_row)
                v_at += head * v_own_head
                _values(v + v_at, v_tiles + tile, v_held, few, C, WIDE, PAGE, FORM[0], D)


@triton.jit(do_not_specialize=["num_tokens"])
def _fill_pages(
    k, v, slots, filled, k_tiles, v_tiles, num_tokens, held_head, tiles_head,
    FORM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, LATE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A part of one head's pages whose last row is among the ROWS from program_id(1) on. LATE: the
    launches before run on, and have waited for what stored the tokens."""
    PAGE: tl.constexpr = FORM[2]
    part = tl.program_id(0) % PARTS
    head = tl.cast(tl.program_id(0) // (2 * PARTS), tl.int64)
    begin = tl.program_id(1) * ROWS
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        if not LATE:
            tl.extra.cuda.gdc_wait()
    each = begin + tl.arange(0, ROWS)
    some = tl.load(filled + each, mask=each < num_tokens, other=-1)
    end = tl.where(tl.max(some) >= 0, tl.minimum(begin + ROWS, num_tokens), begin)
    every = tl.arange(0, PAGE)
    few = part * (PAGE // PARTS) + tl.arange(0, PAGE // PARTS)
    for row in tl.range(begin, end):
        page = tl.load(filled + row).to(tl.int64)
        if page >= 0:
            at = head * held_head + tl.load(slots + row).to(tl.int64) // PAGE * PAGE * D
            tile = head * tiles_head + page * FORM[1]
            if tl.program_id(0) // PARTS % 2 == 0:
                _keys(k + at + every * D, k_tiles + tile, every >= 0, part, C, PARTS, FORM[0], D)
            else:
                rows = v + at + few * D
                _values(rows, v_tiles + tile, few >= 0, few, C, WIDE, PAGE, FORM[0], D)
    if CHAINED and LATE:
        tl.extra.cuda.gdc_wait()  # whoever waits for this launch waits for those before, too


def _options(pages: Pages, dim: int) -> dict[str, Any]:
    """Of a launch that stores pages in their format. A page is many small programs: few are stored
    at a time, and the rest of the step waits for them."""
    kind = pages.kind
    bytes_each = triton.next_power_of_2(dim * kind.bits // 8)
    return {
        "FORM": form(pages, dim),
        "D": dim,
        "C": bytes_each,
        "WIDE": triton.next_power_of_2(dim // kind.value_groups(dim)),
        "PARTS": min(MOST_PARTS, bytes_each, pages.page_size),
        "ROWS": ROWS,
        "num_warps": 1,
        **chained(pages.k.device),
    }


def fill_pages(text: Pages, slots: Tensor, filled: Tensor, *, late: bool = False) -> None:
    """Store the pages of the residual that are full now, as `reference.fill_pages` does; slots and
    filled [T] int32 or int64. `late`: beside attention's launches, which read none of these."""
    held, dim = text.residual, text.dim
    assert held is not None and held.k[0].is_contiguous() and text.k[0].is_contiguous()
    assert held.k.stride() == held.v.stride()
    options = _options(text, dim)
    _fill_pages[(2 * len(text.k) * options["PARTS"], triton.cdiv(len(filled), ROWS))](
        *held[:2], slots, filled, text.k, text.v, len(filled), held.k.stride(0), text.k.stride(0),
        LATE=late, **options,
    )  # fmt: skip


def store_pages(k: Tensor, v: Tensor, slots: Tensor, vision: Pages) -> None:
    """Store what of k and v [T, Hkv, D] stands in the vision pool; slots [T] as a plan names them.

    A page's tokens are neighbours in order, its first one first: what else it held is forgotten.
    """
    num_tokens, heads, dim = k.shape
    assert k.stride(2) == v.stride(2) == 1 and vision.k[0].is_contiguous()
    options = _options(vision, dim)
    _store_pages[(2 * heads * options["PARTS"], triton.cdiv(num_tokens, ROWS))](
        k, v, slots, vision.k, vision.v, num_tokens, *k.stride()[:2], *v.stride()[:2],
        vision.k.stride(0), **options,
    )  # fmt: skip
