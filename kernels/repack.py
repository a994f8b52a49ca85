"""The same keys and values in pages of another format, or of another size.

Owns nothing but the way there. Knows nothing of what the pages hold, or why.
"""

from __future__ import annotations

import math

import torch

from mmserve.kernels.kv_formats import KVFormat, Pages
from mmserve.kernels.reference import read_pages, write_kv


def repack(
    pages: Pages, num_tokens: int, kind: KVFormat, size: int, dim: int, dtype: torch.dtype
) -> Pages:
    """The first tokens of all pages, in their order, in new pages of `size` tokens; `dim`: of a
    head, `dtype`: of elements where the format is plain. Tokens are lost by no format, precision by
    every one that is not."""
    device, heads = pages.k.device, pages.k.shape[0]
    index = torch.arange(num_tokens, device=device)
    every = torch.arange(pages.k.shape[1], device=device)
    held = (part[0, :, :num_tokens].transpose(0, 1) for part in read_pages(pages, every[None]))
    tile = (size, dim) if kind.plain else (kind.tile_bytes(size, dim),)
    shape = (heads, math.ceil(num_tokens / size), *tile)
    k = torch.zeros(shape, dtype=dtype if kind.plain else torch.uint8, device=device)
    made = Pages(k, torch.zeros_like(k), kind, size, dim)
    write_kv(made, index, *held)
    return made
