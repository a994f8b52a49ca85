"""The two KV pools: page bookkeeping joined to the K and V tensors it speaks of.

Owns tensor layout, dtype and the page budgets. Knows nothing of scheduling or models. Layout of
each pool: [layers, 2 (K, V), kv_heads, pages, page_size, head_dim], so one head's page is one
contiguous tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmserve.cache.page_pool import PagePool
from mmserve.cache.vision_index import VisionIndex


@dataclass(frozen=True)
class KVShape:
    """What one token's KV is made of."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * self.page_size * self.dtype.itemsize

    def allocate(self, num_pages: int) -> Tensor:
        size = (self.num_layers, 2, self.num_kv_heads, num_pages, self.page_size, self.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


class TextKVPool:
    """Paged K/V of text tokens; `pages` says who holds which page."""

    def __init__(self, shape: KVShape, num_bytes: int) -> None:
        self.shape = shape
        self.pages = PagePool(max(num_bytes // shape.page_bytes, 1))
        self.tensor = shape.allocate(self.pages.num_pages)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, each [Hkv, pages, page_size, D]."""
        return self.tensor[index, 0], self.tensor[index, 1]


class VisionKVPool:
    """K/V of images, each stored once at local positions under its digest (`index`)."""

    def __init__(self, shape: KVShape, num_bytes: int) -> None:
        self.shape = shape
        num_pages = max(num_bytes // shape.page_bytes, 1)
        self.index = VisionIndex(num_pages, shape.page_size)
        self.tensor = shape.allocate(num_pages)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, each [Hkv, pages, page_size, D]."""
        return self.tensor[index, 0], self.tensor[index, 1]

    def write(self, pages: list[int], layer: int, k: Tensor, v: Tensor) -> None:
        """Store one image's k, v [n, Hkv, D] of one layer in its pages."""
        size = self.shape.page_size
        slots = torch.tensor([p * size + o for p in pages for o in range(size)])[: len(k)]
        for pool, new in zip(self.layer(layer), (k, v), strict=True):
            flat = pool.view(pool.shape[0], -1, pool.shape[3])
            flat[:, slots.to(flat.device)] = new.transpose(0, 1).to(pool.dtype)
