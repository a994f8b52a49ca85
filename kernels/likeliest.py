"""The few highest of each row of scores on a GPU, best first, in one launch.

Owns the kernel. What it computes is a `topk` of a `log_softmax`; the library's, made for any number
of any row, takes several launches and ten times as long. Knows nothing of drafts.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained

MAX_WIDTH = 32_768  # a row is held in one program's registers


@triton.jit
def _likeliest(
    scores, row_stride, highest, numbers,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, NORMED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(scores + row * row_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    # What is no number is the lowest; what is not there, or was taken, is lower.
    x = tl.where(x > -3e38, tl.minimum(x, 3e38), -3e38)
    x = tl.where(at < WIDTH, x, float("-inf"))
    whole = tl.full([], 0.0, tl.float32)
    if NORMED:
        top = tl.max(x, 0)
        whole = top + tl.log(tl.sum(tl.exp(x - top), 0))
    for n in tl.static_range(COUNT):
        best, number = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(highest + row * COUNT + n, best - whole)
        tl.store(numbers + row * COUNT + n, number.to(tl.int64))
        x = tl.where(at == number, float("-inf"), x)


def likeliest(scores: Tensor, count: int, *, normed: bool) -> tuple[Tensor, Tensor]:
    """scores [N, V], rows contiguous, V at most MAX_WIDTH -> the `count` highest of each row,
    float32 [N, count], and their numbers, int64, the lower one first of equals. `normed`: as
    logarithms of chances, by softmax over the row."""
    num_rows, width = scores.shape
    assert count <= width <= MAX_WIDTH and scores.stride(1) == 1
    highest = torch.empty(num_rows, count, dtype=torch.float32, device=scores.device)
    numbers = torch.empty(num_rows, count, dtype=torch.long, device=scores.device)
    if num_rows == 0:
        return highest, numbers
    padded = triton.next_power_of_2(width)
    _likeliest[(num_rows,)](
        scores, scores.stride(0), highest, numbers, WIDTH=width, PADDED=padded, COUNT=count,
        NORMED=normed, num_warps=min(max(padded // 1024, 1), 16), **chained(scores.device),
    )  # fmt: skip
    return highest, numbers
