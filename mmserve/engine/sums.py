"""Sums over ranks: by the process group, small ones on a GPU by reading each other's memory.

Owns which way which tensor goes, which is the same on all ranks. Decoding adds up a few rows twice
a layer, where a collective of the library takes longer to begin than to add. Knows nothing of
models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

Sum = Callable[[Tensor], Any]  # in place

DIRECT_BYTES = 2 << 20  # of all ranks' parts together, up to which they are read directly
ALIGNMENT = 16  # bytes


def sums(device: torch.device, dtype: torch.dtype, ranks: int) -> Sum:
    """Of tensors of a model in `dtype`. All ranks call it at once."""
    if device.type != "cuda" or not DIRECT_BYTES:
        return dist.all_reduce
    direct: Direct | None = None
    try:
        direct = Direct(device, dtype, DIRECT_BYTES // ranks)
        well = direct.adds_up(ranks)
    except (RuntimeError, ImportError, AttributeError) as error:  # GPUs that do not see each other
        logger.warning("ranks do not read each other's memory: %s", error)
        well = False
    all_well = torch.tensor(int(well), device=device)
    dist.all_reduce(all_well, op=dist.ReduceOp.MIN)
    return direct if direct is not None and bool(all_well) else dist.all_reduce


class Direct:
    """Each rank puts its part where the others can read it, and adds up all of them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as shared

        group: Any = dist.group.WORLD
        self._group: str = group.group_name
        here = torch.device(device.type, torch.cuda.current_device())
        self._room = shared.empty(num_bytes // dtype.itemsize, dtype=dtype, device=here)
        self._held = shared.rendezvous(self._room, self._group)

    def __call__(self, x: Tensor) -> Tensor:
        room, size = self._room, x.numel() * x.element_size()
        fits = x.numel() <= room.numel() and size % ALIGNMENT == 0
        if x.dtype != room.dtype or not fits or not x.is_contiguous():
            dist.all_reduce(x)
            return x
        part = room[: x.numel()].view(x.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(part, x, "sum", self._group, x)
        return x

    def adds_up(self, ranks: int) -> bool:
        """Tried, twice in a row and of two sizes."""
        rank, good = dist.get_rank(), True
        for count in (64, self._room.numel(), 64):
            x = torch.full((1, count), float(rank + 1), dtype=self._room.dtype)
            x = self(x.to(self._room.device))
            good = good and bool((x == ranks * (ranks + 1) / 2).all())
        return good
