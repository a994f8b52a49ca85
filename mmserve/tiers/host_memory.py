"""Memory on the host that objects lie in, pinned where a GPU reads it.

Owns how it is got, and having some ready. Knows nothing of objects.

Pinned memory is PyTorch's: it takes powers of two, and keeps what is let go for whoever asks next.
To pin memory that is new takes 5 ms for 8 MiB on an H200's machine, on one thread at a time: longer
than to fill it. It is the step or the restore that needs it that waits, so some is had ready.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MOST_READY = 4 << 30  # bytes: a session of 32 k tokens of a 7B model


def host_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """uint8 [num_bytes], not initialised. Raises `RuntimeError` where there is none."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def bytes_taken(memory: Tensor) -> int:
    """What memory of `host_memory` takes."""
    size = memory.numel()
    return 1 << (size - 1).bit_length() if memory.is_pinned() else size


class Reserve:
    """Pins `num_bytes`, in pieces of so many, on a thread of its own, and lets them go to be used.

    Where there is no memory for that, what is needed is pinned when it is.
    """

    def __init__(self, num_bytes: int, piece: int) -> None:
        self._count, self._piece = num_bytes // piece, piece
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._pin, name="kv-pin", daemon=True)
        self._thread.start()

    def _pin(self) -> None:
        held: list[Tensor] = []
        try:
            while len(held) < self._count and not self._closed.is_set():
                held.append(host_memory(self._piece, pinned=True))
        except RuntimeError as error:
            pinned = len(held) * self._piece >> 20
            logger.warning("no more than %d MiB could be pinned: %s", pinned, error)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
