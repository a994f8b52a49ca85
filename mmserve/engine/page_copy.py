"""Copies of pages between a pool and other memory, in the order of the engine's stream.

Owns the copying. Knows nothing of what pages hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmserve.cache.kv_pool import KVPool
from mmserve.engine.transfer import upload


def gather(pool: KVPool, pages: Sequence[int], out: Tensor | None = None) -> Tensor:
    """[layers, 2, kv_heads, len(pages), page_size, head_dim], a copy on the pool's device."""
    index = upload(pages, torch.long, pool.shape.device)
    return torch.index_select(pool.tensor, 3, index, out=out)


def scatter(pool: KVPool, pages: Sequence[int], tensor: Tensor) -> None:
    """Writes what `gather` gave into these pages."""
    index = upload(pages, torch.long, pool.shape.device)
    pool.tensor.index_copy_(3, index, tensor.to(pool.shape.device))
