"""Draft trees that a device has grown become part of a step that the host has laid out.

Owns what is written where: a step's rows of ids and positions, and the masks among the tables of
mmserve.kernels.work. Knows nothing of who grew them. The host knows how many tokens a tree has, not
which, nor who follows whom: a row that stands for one is told by its id, and whatever depends on
the tree's shape is written here, before the step reads it.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained
from mmserve.kernels.work import HEADER

BLOCK = 64  # rows of one program


@triton.jit
def _graft(
    work, rows, grown, first, num_rows, num_grown,
    AXES: tl.constexpr, SETS: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """BLOCK rows; arguments as `graft`'s."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < num_rows
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = first - tl.load(rows + row, mask=ok, other=0)
    ok = ok & (number >= 0)
    tl.store(rows + row, tl.load(grown + number, mask=ok, other=0), mask=ok)
    depth = tl.load(grown + num_grown + number, mask=ok, other=0)
    for axis in tl.static_range(AXES):
        at = rows + (1 + axis) * num_rows + row
        tl.store(at, tl.load(at, mask=ok, other=0) + depth, mask=ok)
    low = tl.load(grown + 2 * num_grown + number, mask=ok, other=0)
    high = tl.load(grown + 3 * num_grown + number, mask=ok, other=0)
    for each in tl.static_range(SETS):
        trees = tl.load(work + each * HEADER + 7)
        drawn = ok & (trees > 0)
        tl.store(work + trees + 2 * row, low, mask=drawn)
        tl.store(work + trees + 2 * row + 1, high, mask=drawn)


def graft(work: Tensor, rows: Tensor, grown: Tensor, first: int, *, axes: int, sets: int) -> None:
    """In place of ids, positions and masks of the rows with ids up to `first`.

    work int32: a step's tables, of `sets` sets, and among them rows [lines, T]: ids, then positions
    by axis. grown int32 [4, N]: tokens, depths, and masks, the lower half first. Id first - n
    stands for number n of them; the row's positions are those of depth 0.
    """
    assert rows.is_contiguous() and grown.is_contiguous() and grown.shape[0] == 4
    num_rows = rows.shape[1]
    _graft[(triton.cdiv(num_rows, BLOCK),)](
        work, rows, grown, first, num_rows, grown.shape[1],
        AXES=axes, SETS=sets, HEADER=HEADER, BLOCK=BLOCK, num_warps=1, **chained(work.device),
    )  # fmt: skip
