"""The two KV pools: page bookkeeping joined to the K and V tensors it speaks of.

Owns tensor layout, dtype and the page budgets. Knows nothing of scheduling or models. Layout of
each pool: [layers, 2 (K, V), kv_heads, pages, page_size, head_dim], so one head's page is one
contiguous tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

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

    def pages_in(self, num_bytes: int) -> int:
        return max(num_bytes // self.page_bytes, 1)


class KVPool:
    """K and V of `num_pages` pages over all layers."""

    def __init__(self, shape: KVShape, num_pages: int) -> None:
        self.shape = shape
        size = (shape.num_layers, 2, shape.num_kv_heads, num_pages, shape.page_size, shape.head_dim)
        self.tensor = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, each [Hkv, pages, page_size, D]."""
        return self.tensor[index, 0], self.tensor[index, 1]

    @cached_property
    def arrays(self) -> list[tuple[Any, Any]]:
        """By layer (K, V) as numpy views [Hkv, slots, D], for the compiled CPU kernels."""
        return [(k.numpy(), v.numpy()) for k, v in self.tensor.flatten(3, 4).unbind(0)]


class TextKVPool(KVPool):
    """Paged K/V of text tokens; `pages` says who holds which page."""

    def __init__(self, shape: KVShape, num_bytes: int) -> None:
        super().__init__(shape, shape.pages_in(num_bytes))
        self.pages = PagePool(shape.pages_in(num_bytes))


class VisionKVPool(KVPool):
    """K/V of images, each stored once at local positions under its digest (`index`)."""

    def __init__(self, shape: KVShape, num_bytes: int) -> None:
        super().__init__(shape, shape.pages_in(num_bytes))
        self.index = VisionIndex(shape.pages_in(num_bytes), shape.page_size)
