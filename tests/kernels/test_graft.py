"""Rows that stand for what a device has grown become its tokens; all others stay as they are."""

from __future__ import annotations

import pytest
import torch

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels.graft import graft
from mmserve.kernels.work import HEADER

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST = -101


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("count", [5, 70])
def test_rows_get_tokens_depths_and_masks(axes: int, count: int) -> None:
    sets, lines = 2, 1 + axes + 2
    generator = torch.Generator().manual_seed(count)
    grown = torch.randint(-(2**31), 2**31, (4, 90), generator=generator, dtype=torch.int32)
    grown[1] = torch.arange(90) % 7
    rows = torch.randint(0, 1000, (lines, count), generator=generator, dtype=torch.int32)
    rows[0, 1] = FIRST + 1  # a token that the step before has chosen
    drawn = torch.arange(count) % 3 == 2
    numbers = torch.randperm(90, generator=generator)[:count]
    rows[0, drawn] = FIRST - numbers[drawn].int()
    # The second set has no trees.
    trees = HEADER * sets + rows.numel()
    header = torch.zeros(sets, HEADER, dtype=torch.int32)
    header[0, 7] = trees
    masks = torch.randint(0, 99, (count, 2), generator=generator, dtype=torch.int32)
    work = torch.cat([header.flatten(), rows.flatten(), masks.flatten()]).to(DEVICE)
    view = work[HEADER * sets : trees].view(lines, count)

    graft(work, view, grown.to(DEVICE), FIRST, axes=axes, sets=sets)

    rows[0, drawn] = grown[0, numbers[drawn]]
    rows[1 : 1 + axes, drawn] += grown[1, numbers[drawn]]
    masks[drawn] = grown[2:, numbers[drawn]].T
    expected = torch.cat([header.flatten(), rows.flatten(), masks.flatten()])
    assert torch.equal(work.cpu(), expected)
