"""Towers' kernels give what PyTorch's own operations give, at odd sizes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels import spans

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed(count: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Queries, keys and values [T, 3, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, 3, heads, dim, generator=generator)
    return made.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 20), (16, 80)])
def test_queries_and_keys_are_rotated_and_values_are_not(
    heads: int, dim: int, dtype: torch.dtype
) -> None:
    x = packed(5, heads, dim, dtype)
    angles = torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()  # of each half its own
    expected = torch.stack(
        [*apply_rotary_pos_emb_vision(x[:, 0], x[:, 1], cos[0], sin[1]), x[:, 2]]
    )
    spans.turn(x[:, :2], cos[0], sin[1])
    torch.testing.assert_close(x.transpose(0, 1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (2, 20), (3, 80)])
@pytest.mark.parametrize(
    "borders", [[0, 1], [0, 64], [0, 48, 112, 148], [0, 3, 3, 70], [0, 65, 66, 200]]
)
def test_a_row_reads_its_own_span(
    borders: list[int], heads: int, dim: int, dtype: torch.dtype
) -> None:
    q, k, v = packed(borders[-1], heads, dim, dtype).unbind(1)
    out = torch.full((borders[-1], heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    longest = max(b - a for a, b in zip(borders, borders[1:], strict=False))
    edges = torch.tensor(borders, dtype=torch.int32, device=DEVICE)
    spans.attend(q, k, v, edges, longest, 0.3, out)
    for start, end in zip(borders, borders[1:], strict=False):
        a, b, c = (x[start:end].transpose(0, 1).float() for x in (q, k, v))
        expected = functional.scaled_dot_product_attention(a, b, c, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(out[start:end].float(), expected, rtol=2e-3, atol=2e-3)


def test_a_spans_bits_do_not_depend_on_the_others() -> None:
    x, other = (packed(96, 2, 20, torch.float32, seed) for seed in (1, 2))
    found = []
    for before, borders in ((64, [0, 64, 96]), (0, [0, 32])):
        q, k, v = torch.cat([other[:before], x[:32]]).unbind(1)
        out = torch.empty_like(q.contiguous())
        spans.attend(q, k, v, torch.tensor(borders, dtype=torch.int32, device=DEVICE), 64, 0.3, out)
        found.append(out[before:])
    assert torch.equal(*found)
