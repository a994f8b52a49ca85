"""Rows of token ids and angles of positions are what PyTorch makes of them."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels import prelude

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [1, 48, 1030])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [None, 7.25])
def test_ids_become_rows_and_pending_ones_those_of_what_was_chosen(
    width: int, dtype: torch.dtype, scale: float | None
) -> None:
    random = torch.Generator().manual_seed(width)
    table = torch.randn(9, width, generator=random).to(DEVICE, dtype)
    ids = torch.tensor([3, -1, 8, -3, 0], dtype=torch.int32, device=DEVICE)
    previous = torch.tensor([7, 5, 2], device=DEVICE)
    out = torch.full((5, width), torch.nan, dtype=dtype, device=DEVICE)
    prelude.embed(ids, previous, table, out, scale)
    expected = table[[3, 7, 8, 2, 0]]
    assert torch.equal(out, expected if scale is None else expected * scale)


@pytest.mark.parametrize("half", [1, 16, 20, 64])
@pytest.mark.parametrize("regimes", [None, [1, 0, 1]])
def test_positions_become_angles_of_their_regime(half: int, regimes: list[int] | None) -> None:
    positions = torch.tensor([0, 77, 12_345], device=DEVICE)
    inverse = torch.rand(2, half, generator=torch.Generator().manual_seed(half)).to(DEVICE)
    scales = torch.tensor([1.0, 1.25], device=DEVICE)
    cos, sin = (torch.full((3, 2 * half), torch.nan, device=DEVICE) for _ in range(2))
    chosen = torch.tensor(regimes or [0, 0, 0], device=DEVICE)
    prelude.angles(positions, None if regimes is None else chosen, inverse, scales, cos, sin)
    angle = (positions[:, None].float() * inverse[chosen]).repeat(1, 2)
    for out, expected in ((cos, angle.cos()), (sin, angle.sin())):
        torch.testing.assert_close(out, expected * scales[chosen, None], rtol=0, atol=2e-6)
