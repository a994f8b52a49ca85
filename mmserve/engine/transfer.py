"""Copies between host and device that nobody waits for, and tokens that only the device has seen.

Owns the pinned side of each copy. Knows nothing of what is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [N] of host numbers on `device`."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, in stream order."""
    # From pageable memory the host would wait until the device has come to the copy.
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Staging:
    """Pinned room for the numbers of one step after another, used in turns: to pin some anew for
    each takes longer than the copy."""

    def __init__(self, device: torch.device, turns: int = 4) -> None:
        self._on_gpu = device.type == "cuda"
        self._rooms: list[tuple[Tensor, Any] | None] = [None] * turns
        self._turn = 0

    def copy(self, array: Any, target: Tensor) -> None:
        """A numpy array [N] into target [N], in stream order; it is the caller's again at once."""
        if not self._on_gpu:
            target.copy_(torch.from_numpy(array))
            return
        self._turn = (self._turn + 1) % len(self._rooms)
        room = self._rooms[self._turn]
        if room is None or room[0].numel() < len(array):
            pinned = torch.empty(2 * len(array), dtype=target.dtype, pin_memory=True)
            room = self._rooms[self._turn] = pinned, torch.cuda.Event()  # type: ignore[no-untyped-call]
        held, sent = room
        sent.synchronize()  # of the last turn; so far ahead is the host of hardly any device
        part = held[: len(array)]
        part.numpy()[:] = array
        target.copy_(part, non_blocking=True)
        sent.record(torch.cuda.current_stream(target.device))


def download(tensor: Tensor) -> Tensor:
    """A tensor on the host, whose values are there once the stream has come so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def resolve_pending(token_ids: Tensor, previous: Tensor | None) -> Tensor:
    """Token ids [T] int64 with each pending one, -(row + 1), replaced by `previous[row]`.

    `previous` [C] int64, same device: what the step before has chosen; None or empty: nothing is
    pending.
    """
    if previous is None or not len(previous):
        return token_ids
    return torch.where(token_ids < 0, previous[(-1 - token_ids).clamp_(min=0)], token_ids)
