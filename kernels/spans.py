"""Attention in vision towers that cut an image into spans, on a GPU, in Triton.

Owns two kernels: rotating queries and keys where they stand, and attention of rows to their own
span. Knows nothing of models. Computed in float32 and rounded once, when written; a row's bits do
not depend on the spans beside its own.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # rows: the windows of Qwen2.5-VL have 64 or fewer


@triton.jit
def _turn(
    x, cos, sin, x_row, x_part, cos_row, sin_row,
    HEADS: tl.constexpr, D: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one part of a row. The strides are of rows and parts."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)
    ok = half < D // 2
    head = tl.arange(0, HEADS_PADDED)
    both = (head < HEADS)[:, None] & ok[None, :]
    at = x + row * x_row + tl.program_id(1) * x_part + head[:, None] * D + half[None, :]
    first = tl.load(at, mask=both, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=both, other=0.0).to(tl.float32)
    c, s = cos + row * cos_row + half, sin + row * sin_row + half
    first_cos = tl.load(c, mask=ok, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(s, mask=ok, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(c + D // 2, mask=ok, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(s + D // 2, mask=ok, other=0.0).to(tl.float32)[None, :]
    kind = x.dtype.element_ty
    tl.store(at, (first * first_cos - second * first_sin).to(kind), mask=both)
    tl.store(at + D // 2, (second * second_cos + first * second_sin).to(kind), mask=both)


@triton.jit
def _attend(
    q, k, v, out, spans, scale, q_row, k_row, v_row, out_row,
    D: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of a span's rows in one head. `scale` is of powers of two; the strides of rows."""
    end = tl.load(spans + tl.program_id(0) + 1)
    start = tl.load(spans + tl.program_id(0))
    first = start + tl.program_id(1) * TILE
    if first < end:
        d = tl.arange(0, PADDED)
        column = tl.program_id(2) * D + d[None, :]
        rows = (first + tl.arange(0, TILE)).to(tl.int64)
        ok = (rows < end)[:, None] & (d < D)[None, :]
        asked = tl.load(q + rows[:, None] * q_row + column, mask=ok, other=0.0)
        most = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, PADDED], tl.float32)
        for at in range(start, end, TILE):
            keys = (at + tl.arange(0, TILE)).to(tl.int64)
            there = (keys < end)[:, None] & (d < D)[None, :]
            key = tl.load(k + keys[:, None] * k_row + column, mask=there, other=0.0)
            value = tl.load(v + keys[:, None] * v_row + column, mask=there, other=0.0)
            scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where((keys < end)[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(most - higher)
            total = total * fade + tl.sum(weights, 1)
            read = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            acc = acc * fade[:, None] + read
            most = higher
        wanted = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * out_row + column, wanted, mask=ok)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [T, P, H, D] in place, each row by cos and sin [T, D], whose rows are contiguous:
    x cos + (-second half, first half) sin, as transformers' vision towers do."""
    count, parts, heads, dim = x.shape
    assert x.stride()[2:] == (dim, 1) and cos.stride(1) == sin.stride(1) == 1
    _turn[(count, parts)](
        *(x, cos, sin, *x.stride()[:2], cos.stride(0), sin.stride(0)),
        HEADS=heads,
        D=dim,
        HEADS_PADDED=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(dim // 2),
        num_warps=4,
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, longest: int, scale: float, out: Tensor
) -> None:
    """q, k, v, out [T, H, D], heads contiguous: each row reads the rows of its own span. `spans`
    [S + 1] int32 are their borders, none of them longer than `longest` rows."""
    heads, dim = q.shape[1:]
    assert all(x.stride()[1:] == (dim, 1) for x in (q, k, v, out))
    _attend[(len(spans) - 1, triton.cdiv(longest, TILE), heads)](
        *(q, k, v, out, spans, scale / math.log(2), *(x.stride(0) for x in (q, k, v, out))),
        D=dim,
        PADDED=max(triton.next_power_of_2(dim), 16),
        TILE=TILE,
        num_warps=4,
        num_stages=1,  # most spans are one tile of keys
    )
