"""One activation row times a weight matrix on a GPU, in Triton, with what stands around it fused.

Owns the decode step of a single stream, where reading the weights is all the cost: norm before the
product, bias, gating or residual after it, each without a pass of its own. Knows nothing of models.
Sums are float32; nothing is rounded between the norm and the result.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained
from mmserve.kernels.fused import MAX_WIDTH, Gate, Norm, opening


class After(NamedTuple):
    """What becomes of all outputs together: their RMS norm is added to `residual` [1, N]. `arrived`
    [1] int32 counts programs, and is 0 between launches; no two run at a time with the same."""

    residual: Tensor
    norm: Norm
    arrived: Tensor


@triton.jit
def _weights(at, mask):
    """What nobody reads again."""
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _mean(x, K: tl.constexpr, BLOCK_K: tl.constexpr):
    total = tl.zeros([BLOCK_K], tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        total += tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.sum(total, 0) / K


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
        through = opening(y, GELU).to(opened.dtype.element_ty)
        tl.store(opened + n - num_plain, through, mask=ok & (n >= num_plain))
        ok &= n < num_plain
    if ADD:
        y += tl.load(out + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _add_normed_last(out, residual, gain, arrived, eps, num_out, PADDED: tl.constexpr):
    """residual += the RMS norm of out, if this program is the last that has written to out."""
    tl.debug_barrier()  # all of the program's is written
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.debug_barrier()
        n = tl.arange(0, PADDED)
        ok = n < num_out
        y = tl.load(out + n, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = tl.load(residual + n, mask=ok, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(y * y, 0) / num_out + eps)
        total += y * factor * tl.load(gain + n, mask=ok, other=0.0).to(tl.float32)
        tl.store(residual + n, total.to(residual.dtype.element_ty), mask=ok)
        tl.store(arrived, 0)


@triton.jit
def _gemv(
    x, weight, bias, gain, out, opened, residual, after_gain, arrived, eps, after_eps,
    num_out, num_plain,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    OPENS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS outputs a program; GATED reads their rows and those num_out further down; what OPENS
    are the outputs behind num_plain. PADDED: num_out as a power of two, where the last program
    normalises them all."""
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
    mean = _mean(x, K, BLOCK_K) if CENTRED else 0.0
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
            row = tl.where(k < K, row - mean, 0.0)
        if NORM:
            squares += row * row
            scale = tl.load(gain + k, mask=k < K, other=0.0)
            row = row * scale.to(tl.float32)
        acc += held.to(tl.float32) * row[None, :]
        if GATED:
            acc_up += held_up.to(tl.float32) * row[None, :]
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps) if NORM else 1.0
    y, up = tl.sum(acc, 1) * factor, tl.sum(acc_up, 1) * factor
    _put(y, up, n, ok, bias, out, opened, num_plain, BIAS, GATED, OPENS, GELU, ADD)
    if PADDED > 0:
        _add_normed_last(out, residual, after_gain, arrived, after_eps, num_out, PADDED)


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
    centred: bool = False,
    gated: bool = False,
    opened: Tensor | None = None,
    gate: Gate = "silu",
    add: bool = False,
    after: After | None = None,
) -> None:
    """out [1, N] = f(x [1, K] times weight [N, K], rows contiguous).

    `norm`, of K: x is RMS-normalised first; `centred`: less its mean before, which makes a layer
    norm of it, whose bias is a matter of the product's. `bias` [N]. `gated`: weight is [2 N, K],
    what opens the gate above what goes through it. `opened` [1, M]: weight is [N + M, K], and bias
    [N + M]; the outputs behind N go through the gate, and here. `add`: out is added to instead of
    written. `after`: out is rounded, normalised and added to something else.
    """
    num_plain, width = out.shape[1], weight.shape[1]
    num_out = num_plain + (0 if opened is None else opened.shape[1])
    assert x.shape == (1, width) and weight.is_contiguous() and weight.shape[0] >= num_out
    assert not (gated and (bias is not None or opened is not None)), "no model has both"
    assert norm is not None or not centred
    rows, block = _tuning(width, norm is not None, gated)
    gain, eps = norm or (x, 0.0)
    residual, (after_gain, after_eps), arrived = after or (out, (x, 0.0), out)
    assert after is None or (opened is None and num_out <= MAX_WIDTH)
    _gemv[(triton.cdiv(num_out, rows),)](
        x, weight, x if bias is None else bias, gain, out, out if opened is None else opened,
        residual, after_gain, arrived, eps, after_eps, num_out, num_plain,
        K=width, ROWS=rows, BLOCK_K=block, NORM=norm is not None, CENTRED=centred,
        BIAS=bias is not None, GATED=gated, OPENS=opened is not None, GELU=gate == "gelu", ADD=add,
        PADDED=0 if after is None else triton.next_power_of_2(num_out), num_warps=4,
        **chained(x.device),
    )  # fmt: skip
