"""Copies of pages between a pool and other memory, in the order of the engine's stream.

Owns the copying. Knows nothing of what pages hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmserve.cache.kv_pool import KVPool, TextKVPool
from mmserve.engine.transfer import upload
from mmserve.scheduler.batch import PageCopy


def gather(pool: KVPool, pages: Sequence[int], out: Tensor | None = None) -> Tensor:
    """[layers, 2, kv_heads, len(pages), page_size, head_dim], a copy on the pool's device."""
    index = upload(pages, torch.long, pool.shape.device)
    if out is None:
        out = pool.tensor.new_empty(*pool.tensor.shape[:3], len(pages), *pool.tensor.shape[4:])
    torch.index_select(_wide(pool.tensor), 3, index, out=_wide(out))
    return out


def scatter(pool: KVPool, pages: Sequence[int], tensor: Tensor) -> None:
    """Writes what `gather` gave into these pages."""
    index = upload(pages, torch.long, pool.shape.device)
    _wide(pool.tensor).index_copy_(3, index, _wide(tensor.to(pool.shape.device)))


def copy_pages(pools: Sequence[TextKVPool], copies: Sequence[PageCopy]) -> None:
    """Makes copies inside of pools, which are by layer group."""
    for g, residual in sorted({(copy.group, copy.residual) for copy in copies}):
        mine = [copy for copy in copies if (copy.group, copy.residual) == (g, residual)]
        pool = pools[g].residual if residual else pools[g]
        if pool is not None:
            sources = gather(pool, [copy.source for copy in mine])
            scatter(pool, [copy.target for copy in mine], sources)


def _wide(tensor: Tensor) -> Tensor:
    """The same bits in fewer, larger numbers: they are copied one by one."""
    fits = tensor.shape[-1] * tensor.itemsize % torch.int64.itemsize == 0
    return tensor.view(torch.int64) if fits else tensor
