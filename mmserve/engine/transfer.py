"""Copies between host and device that nobody waits for, and tokens that only the device has seen.

Owns the pinned side of each copy. Knows nothing of what is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

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
