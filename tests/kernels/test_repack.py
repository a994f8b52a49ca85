"""Pages of other sizes and formats hold the same tokens."""

from __future__ import annotations

import pytest
import torch

from mmserve.kernels.kv_formats import FORMATS, Pages
from mmserve.kernels.reference import read_pages
from mmserve.kernels.repack import repack

HEADS, DIM = 3, 32


def drawn(count: int) -> Pages:
    random = torch.Generator().manual_seed(count)
    k, v = (torch.randn((HEADS, -(-count // 16), 16, DIM), generator=random) for _ in range(2))
    return Pages(k, v)


def tokens(pages: Pages, count: int) -> torch.Tensor:
    return torch.stack(read_pages(pages, torch.arange(pages.k.shape[1])[None]))[..., :count, :]


@pytest.mark.parametrize("count", [1, 16, 33, 64])
@pytest.mark.parametrize("size", [4, 16, 64])
def test_plain_pages_of_any_size_hold_the_same(count: int, size: int) -> None:
    pages = drawn(count)
    made = repack(pages, count, FORMATS["auto"], size, DIM, torch.float32)
    assert made.size == size and torch.equal(tokens(made, count), tokens(pages, count))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_once_stored_is_the_same_in_plain_pages(name: str) -> None:
    pages = drawn(40)
    low = repack(pages, 40, FORMATS[name], 64, DIM, torch.float32)
    back = repack(low, 40, FORMATS["auto"], 16, DIM, torch.float32)
    assert torch.equal(tokens(back, 40), tokens(low, 40))
    assert (tokens(low, 40) - tokens(pages, 40)).abs().mean() < 0.4
