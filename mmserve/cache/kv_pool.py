"""The two KV pools: page bookkeeping joined to the K and V tensors it speaks of.

Owns tensor layout, format and the page budgets. Knows nothing of scheduling or models. Layout of
each pool: [layers, 2 (K, V), kv_heads, pages, page_size, head_dim], so one head's page is one
contiguous tile; where the format is not plain, [layers, 2, kv_heads, pages, bytes of a tile].

Where pages are stored as a whole, text that comes token by token waits for its page to be full in a
third pool, the *residual*, of as many pages as can be open in one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmserve.cache.page_pool import PagePool
from mmserve.cache.vision_index import VisionIndex
from mmserve.kernels.kv_formats import PLAIN, KVFormat, Pages
from mmserve.kernels.reference import move_kv, move_tokens


@dataclass(frozen=True)
class KVShape:
    """What one token's KV is made of. `dtype`: as the model computes it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    kind: KVFormat = PLAIN

    @property
    def tile(self) -> tuple[int, ...]:
        """Of one head's page."""
        if self.kind.plain:
            return self.page_size, self.head_dim
        return (self.kind.tile_bytes(self.page_size, self.head_dim),)

    @property
    def stored(self) -> torch.dtype:
        """Of a tile's elements."""
        return self.dtype if self.kind.plain else torch.uint8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        tiles = 2 * self.num_layers * self.num_kv_heads
        return tiles * math.prod(self.tile) * self.stored.itemsize

    def pages_in(self, num_bytes: int) -> int:
        return max(num_bytes // self.page_bytes, 1)


class KVPool:
    """K and V of `num_pages` pages over all layers."""

    def __init__(self, shape: KVShape, num_pages: int) -> None:
        self.shape = shape
        size = (shape.num_layers, 2, shape.num_kv_heads, num_pages, *shape.tile)
        self.tensor = torch.zeros(size, dtype=shape.stored, device=shape.device)

    def layer(self, index: int) -> Pages:
        own = self.shape
        keys, values = self.tensor[index]
        return Pages(keys, values, own.kind, own.page_size, own.head_dim)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies tokens from slots to slots int64 [N] in all layers; all is read first."""
        own = self.shape
        if own.kind.plain:
            move_kv(self.tensor, sources, destinations)
        else:
            ends = sources, destinations
            move_tokens(self.tensor, own.kind, own.page_size, own.head_dim, *ends)

    @cached_property
    def arrays(self) -> list[tuple[Any, Any]]:
        """By layer (K, V) as numpy views [Hkv, slots, D], for the compiled CPU kernels."""
        assert self.shape.kind.plain
        return [(k.numpy(), v.numpy()) for k, v in self.tensor.flatten(3, 4).unbind(0)]


class TextKVPool(KVPool):
    """Paged K/V of text tokens; `pages` says who holds which page."""

    def __init__(self, shape: KVShape, num_bytes: int, num_open: int = 0) -> None:
        """`num_open`: pages of the residual, where there is one."""
        super().__init__(shape, shape.pages_in(num_bytes))
        self.residual = KVPool(replace(shape, kind=PLAIN), num_open) if num_open else None
        self.forget()

    def forget(self) -> None:
        """All pages are free and nobody's, whatever any earlier books say."""
        self.pages = PagePool(self.tensor.shape[3])

    def layer(self, index: int) -> Pages:
        pages = super().layer(index)
        if self.residual is None:
            return pages
        return pages._replace(residual=self.residual.layer(index))


class VisionKVPool(KVPool):
    """K/V of images, each stored once at local positions under its digest (`index`)."""

    def __init__(self, shape: KVShape, num_bytes: int) -> None:
        super().__init__(shape, shape.pages_in(num_bytes))
        self.forget()

    def forget(self) -> None:
        """No image is stored, whatever any earlier books say."""
        self.index = VisionIndex(self.tensor.shape[3], self.shape.page_size)
