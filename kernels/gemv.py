"""One activation row times a weight matrix on a GPU, in Triton, with what stands around it fused.

Owns the decode step of a single stream, where reading the weights is all the cost: norm before the
product, bias, gating or residual after it, each without a pass of its own. Knows nothing of models.
Sums are float32; nothing is rounded between the norm and the result.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained
from mmserve.kernels.fused import Gate, Norm, opening


@triton.jit
def _weights(at, mask):
    """What nobody reads again."""
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _put(
    y, up, n, ok, bias, out, opened, num_plain, BIAS: tl.constexpr, GATED: tl.constexpr,
    OPENS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Outputs n [ROWS] from their sums."""
    if BIAS:
        y += tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        y = opening(y, GELU) * up
    if OPENS:
        behind = ok & (n >= num_plain)
        through = opening(y, GELU).to(opened.dtype.element_ty)
        tl.store(opened + n - num_plain, through, mask=behind)
        ok &= n < num_plain
    if ADD:
        y += tl.load(out + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _gemv(
    x, weight, bias, gain, sums, out, opened, eps, num_out, num_plain,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    OPENS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS outputs a program; GATED reads their rows and those num_out further down; what OPENS
    are the outputs behind num_plain."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = n < num_out
    start = weight + n[:, None].to(tl.int64) * K
    further = weight + (n + num_out)[:, None].to(tl.int64) * K
    k = tl.arange(0, BLOCK_K)
    mask = ok[:, None] & (k < K)[None, :]
    # The weights depend on nobody: the first of them arrive while the launch before ends.
    held = _weights(start + k[None, :], mask)
    held_up = _weights(further + k[None, :], mask) if GATED else held
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        mask = ok[:, None] & (k < K)[None, :]
        if at > 0:
            held = _weights(start + k[None, :], mask)
            if GATED:
                held_up = _weights(further + k[None, :], mask)
        row = tl.load(x + k, mask=k < K, other=0.0)
        row = row.to(tl.float32)
        if CENTRED:
            total += row
        if NORM:
            squares += row * row
            scale = tl.load(gain + k, mask=k < K, other=0.0)
            row = row * scale.to(tl.float32)
        acc += held.to(tl.float32) * row[None, :]
        if GATED:
            acc_up += held_up.to(tl.float32) * row[None, :]
    y = tl.sum(acc, 1)
    square = tl.sum(squares, 0) / K
    if CENTRED:
        mean = tl.sum(total, 0) / K
        square -= mean * mean
        y -= mean * tl.load(sums + n, mask=ok, other=0.0)
    factor = 1.0 / tl.sqrt(square + eps) if NORM else 1.0
    y = y * factor
    up = tl.sum(acc_up, 1) * factor
    _put(y, up, n, ok, bias, out, opened, num_plain, BIAS, GATED, OPENS, GELU, ADD)


def _tuning(width: int, norm: bool, gated: bool) -> tuple[int, int]:
    """Rows of a program and columns at a time, by measurement on an H200 over widths from 2,048 to
    32,768, in a layer: attention's output is quicker alone in narrower blocks, but whole rows of it
    arrive while attention runs."""
    wide = width > 4096  # a block of 4,096 would be empty for the most part of its last turn
    if gated:
        rows, block = 1 if width < 3584 or width == 4096 else 2, 2048 if wide else 4096
    elif norm:
        rows, block = (2, 1024) if wide else (4, 4096)
    else:
        rows, block = (4, 1024) if width >= 8192 else (2, 4096)
    return rows, min(block, triton.next_power_of_2(width))


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    centred: Tensor | None = None,
    gated: bool = False,
    opened: Tensor | None = None,
    gate: Gate = "silu",
    add: bool = False,
) -> None:
    """out [1, N] = f(x [1, K] times weight [N, K], rows contiguous).

    `norm`, of K: x is RMS-normalised first; `centred` float32, the sums of each of weight's rows
    times the gains: x is less its mean before, which makes a layer norm of it, whose bias is a
    matter of the product's. `bias` [N]. `gated`: weight is [2 N, K],
    what opens the gate above what goes through it. `opened` [1, M]: weight is [N + M, K], and bias
    [N + M]; the outputs behind N go through the gate, and here. `add`: out is added to instead of
    written.
    """
    num_plain, width = out.shape[1], weight.shape[1]
    num_out = num_plain + (0 if opened is None else opened.shape[1])
    assert x.shape == (1, width) and weight.is_contiguous() and weight.shape[0] >= num_out
    assert not (gated and (bias is not None or opened is not None)), "no model has both"
    assert norm is not None or centred is None
    rows, block = _tuning(width, norm is not None, gated)
    gain, eps = norm or (x, 0.0)
    _gemv[(triton.cdiv(num_out, rows),)](
        x, weight, x if bias is None else bias, gain, x if centred is None else centred, out,
        out if opened is None else opened, eps, num_out, num_plain, K=width, ROWS=rows,
        BLOCK_K=block, NORM=norm is not None, CENTRED=centred is not None, BIAS=bias is not None,
        GATED=gated, OPENS=opened is not None, GELU=gate == "gelu", ADD=add, num_warps=4,
        **chained(x.device),
    )  # fmt: skip
