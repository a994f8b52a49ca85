"""The few highest of each row are those of a sort, and equal ones come in order."""

from __future__ import annotations

import pytest
import torch

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels.likeliest import likeliest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "width", "count"), [(1, 1, 1), (3, 50, 8), (2, 8192, 8)])
@pytest.mark.parametrize("normed", [False, True])
def test_the_highest_are_those_of_a_sort(rows: int, width: int, count: int, normed: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = 4 * torch.randn(rows, width + 3, generator=generator)[:, :width]
    highest, numbers = likeliest(scores.to(DEVICE), count, normed=normed)
    values = scores.log_softmax(-1) if normed else scores
    want = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(numbers.cpu(), want.indices[:, :count])
    torch.testing.assert_close(highest.cpu(), want.values[:, :count])


def test_equal_ones_come_in_order_and_what_is_no_number_last() -> None:
    scores = torch.tensor([[1.0, 5.0, float("nan"), 5.0, float("-inf"), 2.0]], device=DEVICE)
    _, numbers = likeliest(scores, 6, normed=False)
    assert numbers.tolist() == [[1, 3, 5, 0, 2, 4]]
