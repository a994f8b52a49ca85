"""Reading keys and values whose format is not plain, for segment attention, in Triton.

Owns the softmax over tiles of mmserve.kernels.kv_formats; mmserve.kernels.attention_kernels calls
it where a pool has such a format. Knows nothing of pools, work or launches.

Tiles are read in the parts that mmserve.kernels.unpacking speaks of: queries are read in the same
parts, scores are sums over parts, and each part of the values has sums of its own, which are put
side by side at the end. Everything stands the other way round than in plain_keys: keys and
dimensions down, queries across, because tensor cores multiply 16 rows by 8 columns and unpacked
elements are in registers already, as only the left of two factors may be.

Elements are multiplied as they are stored. Scales of keys' channels go to the queries, scales of
tokens to scores and probabilities; what a level of zero means is summed up beside.
"""

# Kernels are typed by what they are launched with, and their tuples grow.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from mmserve.kernels.plain_keys import softmax_step, whole_blocks
from mmserve.kernels.unpacking import (
    bits_of,
    elements,
    group_of,
    halves,
    has_outliers,
    levels,
    magnified,
    outlying_keys,
    outlying_values,
    place_of,
    unit,
    value_groups,
    width,
    zero,
)


@triton.jit
def _token_scales(
    keys, values, table, at, first, last, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Float32 [N] of keys and of values, of the tokens from `at` on; bytes' tiles."""
    if PAGE % 2 == 0:  # by twos: what has four bytes is copied ahead
        n = at + 2 * tl.arange(0, N // 2)
        read = (n + 1 >= first) & (n < last)
        k_scales = (keys + PAGE * D).to(tl.pointer_type(tl.uint32))
        v_scales = (values + PAGE * D).to(tl.pointer_type(tl.uint32))
        if MASKED:
            page = tl.load(table + n // PAGE, mask=read, other=0)
            pair = page.to(tl.int64) * (TILE // 4) + n % PAGE // 2
            k = tl.load(k_scales + pair, mask=read, other=0)
            v = tl.load(v_scales + pair, mask=read, other=0)
        else:
            page = tl.load(table + n // PAGE)
            pair = page.to(tl.int64) * (TILE // 4) + n % PAGE // 2
            k = tl.load(k_scales + pair)
            v = tl.load(v_scales + pair)
        k_even, k_odd = halves(k)
        v_even, v_odd = halves(v)
        k_scale = tl.join(k_even, k_odd).reshape(N)
        v_scale = tl.join(v_even, v_odd).reshape(N)
    else:
        n = at + tl.arange(0, N)
        read = (n >= first) & (n < last)
        page = tl.load(table + n // PAGE, mask=read, other=0)
        scale = page.to(tl.int64) * (TILE // 2) + n % PAGE
        k_scales = (keys + PAGE * D).to(tl.pointer_type(tl.bfloat16))
        v_scales = (values + PAGE * D).to(tl.pointer_type(tl.bfloat16))
        k_scale = tl.load(k_scales + scale, mask=read, other=0.0).to(tl.float32)
        v_scale = tl.load(v_scales + scale, mask=read, other=0.0).to(tl.float32)
    return k_scale, v_scale


@triton.jit
def _byte_tiles(
    state_m, state_l, sums, lows, q, keys, values, table, begin, end, first, last, lo, hi, tree,
    CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As plain_keys' `_tiles`; q and sums: tuples of parts [C, M]; lows: of one [M], what is added
    to all sums."""
    C: tl.constexpr = width(2, D)
    column = tl.arange(0, C)
    column_ok = column < D // 2
    k_words = keys.to(tl.pointer_type(tl.uint16))
    v_words = values.to(tl.pointer_type(tl.uint16))
    less = tl.sum(q[0].to(tl.float32), 0) + tl.sum(q[1].to(tl.float32), 0)
    less *= zero(CODE) / unit(CODE)
    for at in tl.range(begin, end, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        valid = (n >= first) & (n < last)
        if MASKED:
            page = tl.load(table + n // PAGE, mask=valid, other=0)
        else:
            page = tl.load(table + n // PAGE)
        word = page.to(tl.int64) * (TILE // 2) + n % PAGE * (D // 2)
        k_scale, v_scale = _token_scales(
            keys, values, table, at, first, last, D, PAGE, TILE, BLOCK_N, MASKED
        )
        if MASKED or C * 2 != D:
            mask = valid[:, None] & column_ok[None, :]
            k = tl.load(k_words + word[:, None] + column[None, :], mask=mask, other=0)
        else:
            k = tl.load(k_words + word[:, None] + column[None, :])
        s = tl.dot(elements(k, CODE, 0, ASSEMBLY), q[0])
        s = tl.dot(elements(k, CODE, 1, ASSEMBLY), q[1], s)
        s = (s - less[None, :]) * (k_scale * unit(CODE))[:, None]
        p, fade, state_m, state_l = softmax_step(
            s, state_m, state_l, n, valid, lo, hi, tree, MASKED, TREES, CAP, 0
        )
        if MASKED or C * 2 != D:
            mask = column_ok[:, None] & valid[None, :]
            v = tl.load(v_words + word[None, :] + column[:, None], mask=mask, other=0)
        else:
            v = tl.load(v_words + word[None, :] + column[:, None])
        p = (p * (v_scale * magnified(CODE))[:, None]).to(tl.float16)
        if zero(CODE) != 0:
            lows = (lows[0] * fade - zero(CODE) * tl.sum(p.to(tl.float32), 0),)
        even = tl.dot(elements(v, CODE, 0, ASSEMBLY), p, sums[0] * fade[None, :])
        odd = tl.dot(elements(v, CODE, 1, ASSEMBLY), p, sums[1] * fade[None, :])
        sums = (even, odd)
    return state_m, state_l, sums, lows


@triton.jit
def _group_scores(
    q, tile, CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """[PAGE, M] of a tile of keys; q: a tuple of parts."""
    PARTS: tl.constexpr = 8 // bits_of(CODE)
    C: tl.constexpr = width(2 * PARTS, D)
    WORDS: tl.constexpr = D // (2 * PARTS)  # of a token
    column = tl.arange(0, C)
    token = tl.arange(0, PAGE)
    ok = column < WORDS
    words = tile.to(tl.pointer_type(tl.uint16))
    scales_at = (words + PAGE * WORDS).to(tl.pointer_type(tl.uint32)) + column
    k_at = words + (token * WORDS)[:, None] + column[None, :]
    if C != WORDS:
        k = tl.load(k_at, mask=ok[None, :], other=0)
    else:
        k = tl.load(k_at)
    s = tl.zeros([PAGE, q[0].shape[1]], tl.float32)
    low = tl.zeros(q[0].shape, tl.float32)
    for j in tl.static_range(PARTS):
        if C != WORDS:
            scales = tl.load(scales_at + j * WORDS, mask=ok, other=0)
            lows = tl.load(scales_at + j * WORDS + D // 2, mask=ok, other=0)
        else:
            scales = tl.load(scales_at + j * WORDS)
            lows = tl.load(scales_at + j * WORDS + D // 2)
        scale, scale_odd = halves(scales)
        low_even, low_odd = halves(lows)
        even = q[2 * j]
        odd = q[2 * j + 1]
        if has_outliers(CODE):
            x = levels(k, _row(scale), _row(low_even), CODE, 2 * j, ASSEMBLY)
            y = levels(k, _row(scale_odd), _row(low_odd), CODE, 2 * j + 1, ASSEMBLY)
            dim = column * 2 + j * (D // PARTS)
            x = outlying_keys(x, tile, dim, ok, token, D, PAGE, PAGE * WORDS)
            y = outlying_keys(y, tile, dim + 1, ok, token, D, PAGE, PAGE * WORDS)
        else:
            x = elements(k, CODE, 2 * j, ASSEMBLY)
            y = elements(k, CODE, 2 * j + 1, ASSEMBLY)
            low += even.to(tl.float32) * (low_even * 2.0 ** place_of(CODE, 2 * j))[:, None]
            low += odd.to(tl.float32) * (low_odd * 2.0 ** place_of(CODE, 2 * j))[:, None]
            even = even * scale.to(tl.float16)[:, None]
            odd = odd * scale_odd.to(tl.float16)[:, None]
        s = tl.dot(x, even, s)
        s = tl.dot(y, odd, s)
    if not has_outliers(CODE):
        s = s * unit(CODE) + tl.sum(low, 0)[None, :]
    return s


@triton.jit
def _group_sums(
    p, fade, sums, lows, tile,
    CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """sums, a tuple of parts, and lows, of as many as a token has scales, faded, and a tile of
    values times p [PAGE, M]."""
    PARTS: tl.constexpr = 8 // bits_of(CODE)
    GROUPS: tl.constexpr = value_groups(CODE, D)
    C: tl.constexpr = width(2 * PARTS, D)
    WORDS: tl.constexpr = D // (2 * PARTS)  # of a token
    column = tl.arange(0, C)
    token = tl.arange(0, PAGE)
    ok = column < WORDS
    words = tile.to(tl.pointer_type(tl.uint16))
    scales_at = words + PAGE * WORDS
    v_at = words + (token * WORDS)[None, :] + column[:, None]
    if C != WORDS:
        v = tl.load(v_at, mask=ok[:, None], other=0)
    else:
        v = tl.load(v_at)
    if GROUPS == 2:
        pairs = scales_at.to(tl.pointer_type(tl.uint32)) + token
        scales = halves(tl.load(pairs))
        least = halves(tl.load(pairs + PAGE))
    else:
        own = scales_at.to(tl.pointer_type(tl.bfloat16)) + token
        scales = (tl.load(own).to(tl.float32),)
        least = (tl.load(own + PAGE).to(tl.float32),)
    factors = ()
    below = ()
    for g in tl.static_range(GROUPS):
        if has_outliers(CODE):
            factors = factors + (p.to(tl.float16),)
            below = below + (lows[g],)
        else:
            scale = scales[g] * magnified(CODE)
            low = least[g] * magnified(CODE)
            factors = factors + ((p * scale[:, None]).to(tl.float16),)
            below = below + (lows[g] * fade + tl.sum(p * low[:, None], 0),)
    new = ()
    for i in tl.static_range(2 * PARTS):
        if has_outliers(CODE):
            scale = scales[group_of(CODE, D, i)]
            low = least[group_of(CODE, D, i)]
            x = levels(v, _row(scale), _row(low), CODE, i, ASSEMBLY)
            dim = column * 2 + i % 2 + i // 2 * (D // PARTS)
            x = outlying_values(x, tile, dim, token, i // PARTS, D, PAGE, GROUPS, PAGE * WORDS)
        else:
            x = elements(v, CODE, i, ASSEMBLY)
        new = new + (tl.dot(x, factors[group_of(CODE, D, i)], sums[i] * fade[None, :]),)
    return new, below


@triton.jit
def _row(x):
    return x.to(tl.float16)[None, :]


@triton.jit
def _group_tiles(
    state_m, state_l, sums, lows, q, keys, values, table, begin, end, first, last, lo, hi, tree,
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
            s, state_m, state_l, n, valid, lo, hi, tree, MASKED, TREES, CAP, 0
        )
        sums, lows = _group_sums(p, fade, sums, lows, values + tile, CODE, D, PAGE, ASSEMBLY)
    return state_m, state_l, sums, lows


@triton.jit
def _query_part(
    q, at, ok, scale, rope, base, turned,
    CODE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """[C, M] of rows ok [M] of q, float16, scaled for exp2 and by the place of its part of keys,
    rotated by the angles of -base [M] if `turned`."""
    C: tl.constexpr = width(2 * PARTS, D)
    column = tl.arange(0, C)
    dim = column * 2 + PART % 2 + PART // 2 * (D // PARTS)
    mask = (column < D // (2 * PARTS))[:, None] & ok[None, :]
    second = dim >= D // 2
    within = tl.where(second, dim - D // 2, dim)
    other = tl.where(second, within, dim + D // 2)
    x = tl.load(q + dim[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(q + other[:, None] + at[None, :], mask=mask & turned, other=0.0).to(tl.float32)
    angle = rope + within[:, None] + base[None, :].to(tl.int64) * D
    cos = tl.load(angle, mask=mask & turned, other=1.0)
    sin = tl.load(angle + D // 2, mask=mask & turned, other=0.0)
    x = x * cos + tl.where(second[:, None], -y, y) * sin
    if not has_outliers(CODE):
        scale = scale * 0.5 ** place_of(CODE, PART)
    return (x * (scale * 1.4426950408889634)).to(tl.float16)


@triton.jit
def _some_tiles(
    state_m, state_l, sums, lows, q, keys, values, table, begin, end, first, last, lo, hi, tree,
    CODE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    if bits_of(CODE) == 8:
        state_m, state_l, sums, lows = _byte_tiles(
            state_m, state_l, sums, lows, q, keys, values, table, begin, end, first, last,
            lo, hi, tree, CODE, D, PAGE, TILE, BLOCK_N, MASKED, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    else:
        state_m, state_l, sums, lows = _group_tiles(
            state_m, state_l, sums, lows, q, keys, values, table, begin, end, first, last,
            lo, hi, tree, CODE, D, PAGE, TILE, MASKED, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    return state_m, state_l, sums, lows


@triton.jit
def _whole(sums, lows, CODE: tl.constexpr, D: tl.constexpr):
    """A tuple of parts [M, C]: sums in the values' own measure."""
    PARTS: tl.constexpr = 8 // bits_of(CODE)
    parts = ()
    for i in tl.static_range(2 * PARTS):
        x = sums[i]
        if not has_outliers(CODE):
            low = lows[group_of(CODE, D, i)]
            x = x * (unit(CODE) * 0.5 ** place_of(CODE, i)) + low[None, :]
            x /= magnified(CODE)
        parts = parts + (tl.trans(x),)
    return parts


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
    lows = ()
    for i in tl.static_range(2 * PARTS):
        part = _query_part(q, at, ok, scale, rope, base, turned, CODE, i, PARTS, D)
        parts = parts + (part,)
        sums = sums + (tl.zeros(part.shape, tl.float32),)
    for _ in tl.static_range(value_groups(CODE, D)):
        lows = lows + (tl.zeros_like(state_l),)
    begin, whole, full = whole_blocks(first, all_first, all_last, BLOCK_N)
    before = state_m
    if begin < whole:
        state_m, state_l, sums, lows = _some_tiles(
            state_m, state_l, sums, lows, parts, keys, values, table, begin, whole, first, last,
            lo, hi, tree, CODE, D, PAGE, TILE, BLOCK_N, True, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    state_m, state_l, sums, lows = _some_tiles(
        state_m, state_l, sums, lows, parts, keys, values, table, whole, full, first, last,
        lo, hi, tree, CODE, D, PAGE, TILE, BLOCK_N, False, TREES, CAP, ASSEMBLY,
    )  # fmt: skip
    if full < last:
        state_m, state_l, sums, lows = _some_tiles(
            state_m, state_l, sums, lows, parts, keys, values, table, full, last, first, last,
            lo, hi, tree, CODE, D, PAGE, TILE, BLOCK_N, True, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    new = _side_by_side(_whole(sums, lows, CODE, D), PARTS, D, WIDE)
    return state_m, state_l, acc * tl.exp2(before - state_m)[:, None] + new
