"""One activation row times a weight matrix on a GPU, in Triton, with what stands around it fused.

Owns the decode step of a single stream, where reading the weights is all the cost: RMS norm before
the product, bias, gating or residual after it, each without a pass of its own. Knows nothing of
models. Sums are float32; nothing is rounded between the norm and the result.
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
def _gemv(
    x, weight, bias, gain, out, eps, num_out,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    ADD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS outputs a program; GATED reads their rows and those num_out further down."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = n < num_out
    start = weight + n[:, None].to(tl.int64) * K
    further = weight + (n + num_out)[:, None].to(tl.int64) * K
    k = tl.arange(0, BLOCK_K)
    mask = ok[:, None] & (k < K)[None, :]
    # The weights depend on nobody: the first of them arrive while the launch before ends.
    held = tl.load(start + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    held_up = held
    if GATED:
        held_up = tl.load(further + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        mask = ok[:, None] & (k < K)[None, :]
        if at > 0:
            at_k = k[None, :]
            held = tl.load(start + at_k, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                held_up = tl.load(
                    further + at_k, mask=mask, other=0.0, eviction_policy="evict_first"
                )
        row = tl.load(x + k, mask=k < K, other=0.0)
        row = row.to(tl.float32)
        if NORM:
            squares += row * row
            scale = tl.load(gain + k, mask=k < K, other=0.0)
            row = row * scale.to(tl.float32)
        acc += held.to(tl.float32) * row[None, :]
        if GATED:
            acc_up += held_up.to(tl.float32) * row[None, :]
    y = tl.sum(acc, 1)
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps) if NORM else 1.0
    y = y * factor
    if GATED:
        y = opening(y, GELU) * (tl.sum(acc_up, 1) * factor)
    if BIAS:
        y += tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(out + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=ok)


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
    gated: bool = False,
    gate: Gate = "silu",
    add: bool = False,
) -> None:
    """out [1, N] = f(x [1, K] times weight [N, K], rows contiguous).

    `norm`, of K: x is RMS-normalised first. `bias` [N]. `gated`: weight is [2 N, K], what opens
    the gate above what goes through it. `add`: out is added to instead of written.
    """
    num_out, width = out.shape[1], weight.shape[1]
    assert x.shape == (1, width) and weight.is_contiguous() and weight.shape[0] >= num_out
    assert not (gated and bias is not None), "no model has both"
    rows, block = _tuning(width, norm is not None, gated)
    gain, eps = norm or (x, 0.0)
    _gemv[(triton.cdiv(num_out, rows),)](
        x, weight, x if bias is None else bias, gain, out, eps, num_out,
        K=width, ROWS=rows, BLOCK_K=block, NORM=norm is not None, BIAS=bias is not None,
        GATED=gated, GELU=gate == "gelu", ADD=add, num_warps=4, **chained(x.device),
    )  # fmt: skip
