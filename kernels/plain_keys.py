"""Reading keys and values as the model computes them, for segment attention, in Triton.

Owns the online softmax over the pages of one segment; mmserve.kernels.packed_keys is the same for
pools of other formats. Knows nothing of pools, work or launches.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_step(
    s, state_m, state_l, n, valid, lo, hi, tree,
    MASKED: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr, KEYS: tl.constexpr = 1,
):  # fmt: skip
    """Of the scores s [M, N] of a block of keys n [N]: p [M, N], what earlier sums fade by, and the
    new state. The rest as in `_tiles`. KEYS: their axis, which may be the first."""
    if CAP > 0:
        # CAP tanh(s / CAP), by an exponential that may overflow.
        s = CAP - 2 * CAP / (tl.exp2(s * (2.8853900817779268 / CAP)) + 1)
    if MASKED:
        key = tl.expand_dims(n, 1 - KEYS)
        end = tl.expand_dims(hi, KEYS)
        read = (key >= tl.expand_dims(lo, KEYS)) & (key < end)
        if TREES:
            bit = key - end
            drawn = (tl.expand_dims(tree, KEYS) >> (bit & 63).to(tl.int64)) & 1
            read |= (bit >= 0) & (bit < 64) & (drawn == 1)
        s = tl.where(read & tl.expand_dims(valid, 1 - KEYS), s, -1e30)
    new_m = tl.maximum(state_m, tl.max(s, KEYS))
    p = tl.exp2(s - tl.expand_dims(new_m, KEYS))
    if MASKED:
        p = tl.where(s > -1e29, p, 0.0)
    fade = tl.exp2(state_m - new_m)
    return p, fade, new_m, state_l * fade + tl.sum(p, KEYS)


@triton.jit
def whole_blocks(first, all_first, all_last, BLOCK_N: tl.constexpr):
    """Where the blocks of the keys from `first` on begin, and from where to where every row reads
    all keys of them.

    Blocks begin at multiples of their size: a row's bits follow from what it reads alone.
    """
    begin = first - first % BLOCK_N
    whole = tl.cdiv(all_first, BLOCK_N) * BLOCK_N
    full = all_last - all_last % BLOCK_N
    some = whole < full
    return begin, tl.where(some, whole, begin), tl.where(some, full, begin)


@triton.jit
def _tiles(
    state_m, state_l, acc, q_a, q_b, keys, values, table, begin, end, first, last, lo, hi,
    tree, D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, end) of one segment, BLOCK_N at a time.

    state_m, state_l [M], acc [M, WIDE]; q_a, q_b [M, HALF] the rotated halves, scaled for exp2;
    keys, values: a head's first element; table: the segment's page ids. With MASKED nothing outside
    of [first, last) is touched and a row reads its keys [lo, hi) [M] only, with TREES also hi + j
    for the bits j of tree int64 [M]; without, every row reads every key.
    CAP: scores, scaled as q is, never exceed it (0: they may).
    """
    half = tl.arange(0, HALF)
    wide = tl.arange(0, WIDE)
    half_ok = half < D // 2
    wide_ok = wide < D
    for at in tl.range(begin, end, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        valid = (n >= first) & (n < last)
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
        p, fade, state_m, state_l = softmax_step(
            s, state_m, state_l, n, valid, lo, hi, tree, MASKED, TREES, CAP
        )
        acc = acc * fade[:, None]
        if MASKED or WIDE != D:
            v_mask = valid[:, None] & wide_ok[None, :]
            v = tl.load(values + slot[:, None] * D + wide[None, :], mask=v_mask, other=0.0)
        else:
            v = tl.load(values + slot[:, None] * D + wide[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return state_m, state_l, acc


@triton.jit
def run_keys(
    state_m, state_l, acc, q_a, q_b, keys, values, table, first, last, all_first, all_last, lo, hi,
    tree, D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_tiles` over the keys [first, last), of which every row reads [all_first, all_last)."""
    begin, whole, full = whole_blocks(first, all_first, all_last, BLOCK_N)
    if begin < whole:
        state_m, state_l, acc = _tiles(
            state_m, state_l, acc, q_a, q_b, keys, values, table, begin, whole, first, last, lo, hi,
            tree, D, HALF, WIDE, PAGE, BLOCK_N, True, TREES, CAP, PRECISION,
        )  # fmt: skip
    state_m, state_l, acc = _tiles(
        state_m, state_l, acc, q_a, q_b, keys, values, table, whole, full, first, last, lo, hi,
        tree, D, HALF, WIDE, PAGE, BLOCK_N, False, TREES, CAP, PRECISION,
    )  # fmt: skip
    if full < last:
        state_m, state_l, acc = _tiles(
            state_m, state_l, acc, q_a, q_b, keys, values, table, full, last, first, last, lo, hi,
            tree, D, HALF, WIDE, PAGE, BLOCK_N, True, TREES, CAP, PRECISION,
        )  # fmt: skip
    return state_m, state_l, acc
