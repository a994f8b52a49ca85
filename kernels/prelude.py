"""What stands before a decoder's first layer on a GPU, in Triton: rows of token ids, and angles.

Owns two kernels, each for a handful of PyTorch's: in a captured step of one row every launch costs
as much as it would with many. Knows nothing of models or requests.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained

CHUNK = 1024  # of a row of the embedding


@triton.jit
def _embed(
    ids, previous, table, out, scale, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    SCALED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """CHUNK of one token's row."""
    row = tl.program_id(0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.load(ids + row).to(tl.int64)
    chosen = tl.load(previous + (-1 - token), mask=token < 0, other=0)
    token = tl.where(token < 0, chosen, token)
    x = tl.load(table + token * WIDTH + at, mask=at < WIDTH, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(out + row.to(tl.int64) * WIDTH + at, x, mask=at < WIDTH)


@triton.jit
def _angles(
    positions, regimes, inverse, scales, cos, sin, HALF: tl.constexpr, PADDED: tl.constexpr,
    SOME: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One token's; SOME of which are of another regime than the first."""
    row = tl.program_id(0)
    dim = tl.arange(0, PADDED)
    ok = dim < HALF
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    regime = tl.load(regimes + row).to(tl.int32) if SOME else 0
    scale = tl.load(scales + regime)
    step = tl.load(inverse + regime * HALF + dim, mask=ok, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * step
    c = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * scale).to(sin.dtype.element_ty)
    for first in tl.static_range(0, 2):
        at = row.to(tl.int64) * 2 * HALF + first * HALF + dim
        tl.store(cos + at, c, mask=ok)
        tl.store(sin + at, s, mask=ok)


def embed(
    ids: Tensor, previous: Tensor, table: Tensor, out: Tensor, scale: float | None = None
) -> None:
    """Rows of table [V, W] for ids [T] int32 or int64, times scale: out [T, W]; an id -(n + 1)
    stands for previous[n], [C] int64. All contiguous."""
    width = table.shape[1]
    assert out.shape == (len(ids), width) and table.is_contiguous() and out.is_contiguous()
    _embed[(len(ids), triton.cdiv(width, CHUNK))](
        ids, previous, table, out, scale or 1.0, WIDTH=width, CHUNK=CHUNK,
        SCALED=scale is not None, num_warps=4, **chained(out.device),
    )  # fmt: skip


def angles(
    positions: Tensor,
    regimes: Tensor | None,
    inverse: Tensor,
    scales: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """cos and sin [T, 2 H] of positions [T] times the frequencies of each one's regime, both halves
    alike, times the regime's scale.

    regimes [T] integers, None: all 0; inverse [R, H] and scales [R] float32; all contiguous.
    """
    count, half = len(positions), inverse.shape[1]
    assert cos.shape == sin.shape == (count, 2 * half)
    _angles[(count,)](
        positions, positions if regimes is None else regimes, inverse, scales, cos, sin,
        HALF=half, PADDED=triton.next_power_of_2(half), SOME=regimes is not None, num_warps=1,
        **chained(cos.device),
    )  # fmt: skip
