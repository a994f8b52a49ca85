"""Reading keys and values whose format is not plain, for segment attention, in Triton.

Owns the softmax over tiles of mmserve.kernels.kv_formats; mmserve.kernels.attention_kernels calls
it where a pool has such a format. Knows nothing of pools, work or launches.

Tiles are read in the parts that mmserve.kernels.unpacking speaks of: queries are read in the same
parts, scores are sums over parts, and each part of the values has sums of its own, which are put
side by side at the end. Scales of bytes are folded into scores and probabilities; levels of groups
are multiplied by their scales. Queries, too, are float16.
"""

# Kernels are typed by what they are launched with, and their tuples grow.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from mmserve.kernels.plain_keys import softmax_step, whole_blocks
from mmserve.kernels.unpacking import (
    bits_of,
    element_unit,
    elements,
    halves,
    has_outliers,
    levels,
    magnified,
    value_groups,
    width,
)


@triton.jit
def _byte_tiles(
    state_m, state_l, sums, q, keys, values, table, begin, end, first, last, lo, hi, tree,
    CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As plain_keys' `_tiles`; q and sums: tuples of parts."""
    C: tl.constexpr = width(2, D)
    column = tl.arange(0, C)
    column_ok = column < D // 2
    k_words = keys.to(tl.pointer_type(tl.uint16))
    v_words = values.to(tl.pointer_type(tl.uint16))
    k_scales = keys.to(tl.pointer_type(tl.bfloat16)) + PAGE * D // 2
    v_scales = values.to(tl.pointer_type(tl.bfloat16)) + PAGE * D // 2
    for at in tl.range(begin, end, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        valid = (n >= first) & (n < last)
        if MASKED:
            page = tl.load(table + n // PAGE, mask=valid, other=0)
        else:
            page = tl.load(table + n // PAGE)
        tile = page.to(tl.int64) * (TILE // 2)
        word = tile + n % PAGE * (D // 2)
        if MASKED or C * 2 != D:
            k_mask = column_ok[:, None] & valid[None, :]
            k = tl.load(k_words + word[None, :] + column[:, None], mask=k_mask, other=0)
        else:
            k = tl.load(k_words + word[None, :] + column[:, None])
        k_scale = tl.load(k_scales + tile + n % PAGE, mask=valid, other=0.0)
        s = tl.dot(q[0], elements(k, CODE, 0, ASSEMBLY))
        s = tl.dot(q[1], elements(k, CODE, 1, ASSEMBLY), s)
        s *= (k_scale.to(tl.float32) * element_unit(CODE))[None, :]
        p, fade, state_m, state_l = softmax_step(
            s, state_m, state_l, n, valid, lo, hi, tree, MASKED, TREES, CAP
        )
        if MASKED or C * 2 != D:
            v_mask = valid[:, None] & column_ok[None, :]
            v = tl.load(v_words + word[:, None] + column[None, :], mask=v_mask, other=0)
        else:
            v = tl.load(v_words + word[:, None] + column[None, :])
        v_scale = tl.load(v_scales + tile + n % PAGE, mask=valid, other=0.0)
        p = (p * (v_scale.to(tl.float32) * magnified(CODE))[None, :]).to(tl.float16)
        even = tl.dot(p, elements(v, CODE, 0, ASSEMBLY), sums[0] * fade[:, None])
        odd = tl.dot(p, elements(v, CODE, 1, ASSEMBLY), sums[1] * fade[:, None])
        sums = (even, odd)
    return state_m, state_l, sums


@triton.jit
def _group_scores(
    q, tile, CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """[M, PAGE] of a tile of keys; q: a tuple of parts."""
    PARTS: tl.constexpr = 8 // bits_of(CODE)
    C: tl.constexpr = width(2 * PARTS, D)
    WORDS: tl.constexpr = D // (2 * PARTS)  # of a token
    column = tl.arange(0, C)
    token = tl.arange(0, PAGE)
    ok = column < WORDS
    words = tile.to(tl.pointer_type(tl.uint16))
    scales_at = (words + PAGE * WORDS).to(tl.pointer_type(tl.uint32)) + column
    k_at = words + (token * WORDS)[None, :] + column[:, None]
    if C != WORDS:
        k = tl.load(k_at, mask=ok[:, None], other=0)
    else:
        k = tl.load(k_at)
    s = tl.zeros([q[0].shape[0], PAGE], tl.float32)
    for j in tl.static_range(PARTS):
        if C != WORDS:
            scales = tl.load(scales_at + j * WORDS, mask=ok, other=0)
            lows = tl.load(scales_at + j * WORDS + D // 2, mask=ok, other=0)
        else:
            scales = tl.load(scales_at + j * WORDS)
            lows = tl.load(scales_at + j * WORDS + D // 2)
        scale, scale_odd = halves(scales)
        low, low_odd = halves(lows)
        x = levels(k, scale[:, None], low[:, None], CODE, 2 * j, ASSEMBLY)
        y = levels(k, scale_odd[:, None], low_odd[:, None], CODE, 2 * j + 1, ASSEMBLY)
        if has_outliers(CODE):
            dim = column * 2 + j * (D // PARTS)
            x = _outlying_keys(x, tile, dim, ok, token, D, PAGE, PAGE * WORDS)
            y = _outlying_keys(y, tile, dim + 1, ok, token, D, PAGE, PAGE * WORDS)
        s = tl.dot(q[2 * j], x, s)
        s = tl.dot(q[2 * j + 1], y, s)
    return s


@triton.jit
def _group_sums(
    p, fade, sums, tile,
    CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """sums, a tuple of parts, faded, and p [M, PAGE] times a tile of values."""
    PARTS: tl.constexpr = 8 // bits_of(CODE)
    GROUPS: tl.constexpr = value_groups(CODE, D)
    C: tl.constexpr = width(2 * PARTS, D)
    WORDS: tl.constexpr = D // (2 * PARTS)  # of a token
    column = tl.arange(0, C)
    token = tl.arange(0, PAGE)
    ok = column < WORDS
    words = tile.to(tl.pointer_type(tl.uint16))
    scales_at = words + PAGE * WORDS
    v_at = words + (token * WORDS)[:, None] + column[None, :]
    if C != WORDS:
        v = tl.load(v_at, mask=ok[None, :], other=0)
    else:
        v = tl.load(v_at)
    if GROUPS == 2:
        pairs = scales_at.to(tl.pointer_type(tl.uint32)) + token
        first_scale, second_scale = halves(tl.load(pairs))
        first_low, second_low = halves(tl.load(pairs + PAGE))
    else:
        own = scales_at.to(tl.pointer_type(tl.bfloat16)) + token
        first_scale = tl.load(own).to(tl.float32).to(tl.float16)
        first_low = tl.load(own + PAGE).to(tl.float32).to(tl.float16)
        second_scale = first_scale
        second_low = first_low
    new = ()
    for i in tl.static_range(2 * PARTS):
        scale = first_scale if i < PARTS else second_scale
        low = first_low if i < PARTS else second_low
        x = levels(v, scale[:, None], low[:, None], CODE, i, ASSEMBLY)
        if has_outliers(CODE):
            dim = column * 2 + i % 2 + i // 2 * (D // PARTS)
            x = _outlying_values(x, tile, dim, token, i // PARTS, D, PAGE, GROUPS, PAGE * WORDS)
        new = new + (tl.dot(p, x, sums[i] * fade[:, None]),)
    return new


@triton.jit
def _group_tiles(
    state_m, state_l, sums, q, keys, values, table, begin, end, first, last, lo, hi, tree,
    CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As `_byte_tiles`; a block is a page."""
    for at in tl.range(begin, end, PAGE):
        n = at + tl.arange(0, PAGE)
        valid = (n >= first) & (n < last)
        tile = tl.load(table + at // PAGE).to(tl.int64) * TILE
        s = _group_scores(q, keys + tile, CODE, D, PAGE, ASSEMBLY)
        p, fade, state_m, state_l = softmax_step(
            s, state_m, state_l, n, valid, lo, hi, tree, MASKED, TREES, CAP
        )
        sums = _group_sums(p.to(tl.float16), fade, sums, values + tile, CODE, D, PAGE, ASSEMBLY)
    return state_m, state_l, sums


@triton.jit
def _outlying_keys(
    x, tile, dim, ok, token, D: tl.constexpr, PAGE: tl.constexpr, DATA: tl.constexpr
):  # fmt: skip
    """Keys x [C, N] with each channel's outlier in its place."""
    at = tile + 2 * DATA + 4 * D
    value = tl.load(at.to(tl.pointer_type(tl.bfloat16)) + dim, mask=ok, other=0.0)
    place = tl.load(at + 2 * D + dim, mask=ok, other=255)
    value = value.to(tl.float32).to(tl.float16)
    return tl.where(place[:, None] == token[None, :], value[:, None], x)


@triton.jit
def _outlying_values(
    x, tile, dim, token, group,
    D: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, DATA: tl.constexpr,
):  # fmt: skip
    """Values x [N, C] of a group of their token's with the group's outlier in its place."""
    which = token * GROUPS
    first = dim
    if GROUPS == 2:
        which += group
        first = dim - group * (D // 2)
    at = tile + 2 * DATA + 4 * GROUPS * PAGE
    value = tl.load(at.to(tl.pointer_type(tl.bfloat16)) + which)
    place = tl.load(at + 2 * GROUPS * PAGE + which)
    value = value.to(tl.float32).to(tl.float16)
    return tl.where(place[:, None] == first[None, :], value[:, None], x)


@triton.jit
def _query_part(
    q, at, ok, scale, rope, base, turned, PART: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr
):
    """[M, C] of rows ok [M] of q, float16, scaled for exp2, rotated by the angles of -base [M] if
    `turned`."""
    C: tl.constexpr = width(2 * PARTS, D)
    column = tl.arange(0, C)
    dim = column * 2 + PART % 2 + PART // 2 * (D // PARTS)
    mask = ok[:, None] & (column < D // (2 * PARTS))[None, :]
    second = dim >= D // 2
    within = tl.where(second, dim - D // 2, dim)
    other = tl.where(second, within, dim + D // 2)
    x = tl.load(q + at[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(q + at[:, None] + other[None, :], mask=mask & turned, other=0.0).to(tl.float32)
    angle = rope + base[:, None].to(tl.int64) * D + within[None, :]
    cos = tl.load(angle, mask=mask & turned, other=1.0)
    sin = tl.load(angle + D // 2, mask=mask & turned, other=0.0)
    x = x * cos + tl.where(second[None, :], -y, y) * sin
    return (x * (scale * 1.4426950408889634)).to(tl.float16)


@triton.jit
def _some_tiles(
    state_m, state_l, sums, q, keys, values, table, begin, end, first, last, lo, hi, tree,
    CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    if bits_of(CODE) == 8:
        state_m, state_l, sums = _byte_tiles(
            state_m, state_l, sums, q, keys, values, table, begin, end, first, last, lo, hi, tree,
            CODE, D, PAGE, TILE, BLOCK_N, MASKED, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    else:
        state_m, state_l, sums = _group_tiles(
            state_m, state_l, sums, q, keys, values, table, begin, end, first, last, lo, hi, tree,
            CODE, D, PAGE, TILE, MASKED, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    return state_m, state_l, sums


@triton.jit
def _side_by_side(sums, PARTS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Parts [M, C] as [M, WIDE] in order of dimensions."""
    M: tl.constexpr = sums[0].shape[0]
    C: tl.constexpr = width(2 * PARTS, D)
    wholes = ()
    for j in tl.static_range(PARTS):
        wholes = wholes + (tl.join(sums[2 * j], sums[2 * j + 1]).reshape(M, 2 * C),)
    if PARTS == 1:
        x = wholes[0]
    else:
        x = tl.join(wholes[0], wholes[1]).permute(0, 2, 1).reshape(M, 4 * C)
        if PARTS == 4:
            y = tl.join(wholes[2], wholes[3]).permute(0, 2, 1).reshape(M, 4 * C)
            x = tl.join(x, y).permute(0, 2, 1).reshape(M, 8 * C)
    if 2 * PARTS * C != D:
        dim = tl.arange(0, WIDE)
        each: tl.constexpr = D // PARTS
        place = tl.where(dim < D, dim // each * (2 * C) + dim % each, 0)
        x = tl.gather(x, tl.broadcast_to(place[None, :], [M, WIDE]), 1)
    return x


@triton.jit
def run_packed(
    state_m, state_l, acc, q, at, ok, scale, rope, base, turned, keys, values, table,
    first, last, all_first, all_last, lo, hi, tree,
    CODE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As plain_keys' `run_keys`, for the queries that stand `at` [M] in q, to be turned back
    by base [M] if `turned`; keys, values: a head's first byte."""
    PARTS: tl.constexpr = 8 // bits_of(CODE)
    BLOCK_N: tl.constexpr = BLOCK if PARTS == 1 else PAGE
    parts = ()
    sums = ()
    for i in tl.static_range(2 * PARTS):
        part = _query_part(q, at, ok, scale, rope, base, turned, i, PARTS, D)
        parts = parts + (part,)
        sums = sums + (tl.zeros(part.shape, tl.float32),)
    begin, whole, full = whole_blocks(first, all_first, all_last, BLOCK_N)
    before = state_m
    if begin < whole:
        state_m, state_l, sums = _some_tiles(
            state_m, state_l, sums, parts, keys, values, table, begin, whole, first, last, lo, hi,
            tree, CODE, D, PAGE, TILE, BLOCK_N, True, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    state_m, state_l, sums = _some_tiles(
        state_m, state_l, sums, parts, keys, values, table, whole, full, first, last, lo, hi,
        tree, CODE, D, PAGE, TILE, BLOCK_N, False, TREES, CAP, ASSEMBLY,
    )  # fmt: skip
    if full < last:
        state_m, state_l, sums = _some_tiles(
            state_m, state_l, sums, parts, keys, values, table, full, last, first, last, lo, hi,
            tree, CODE, D, PAGE, TILE, BLOCK_N, True, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    new = _side_by_side(sums, PARTS, D, WIDE)
    if PARTS == 1:
        new = new * (element_unit(CODE) / magnified(CODE))
    return state_m, state_l, acc * tl.exp2(before - state_m)[:, None] + new
