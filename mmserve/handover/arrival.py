"""Objects of KV on their way in, layer by layer, into memory of the device that reads them.

Owns that memory and what of it is there. Knows nothing of sockets or pools.

Objects that come together lie side by side, each in one piece, so that a layer of all of them is
one strided copy; on a GPU it is made as it comes, and the last layer is all that is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmserve.handover.wire import Piece
from mmserve.tiers.host_memory import host_memory
from mmserve.tiers.kv_object import KVObject, Now, Owner


class Ports:
    """Where pieces come in: one thread's, for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._room = host_memory(0, pinned=False)
        self._stream: Any = None
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def take(self, num_bytes: int, fill: Callable[[memoryview], int]) -> Tensor:
        """uint8 [num_bytes] on the host, filled; it lasts until the next one is taken."""
        if self._room.numel() < num_bytes:
            self._room = host_memory(num_bytes, pinned=self._on_gpu)
        part = self._room[:num_bytes]
        if fill(part.numpy().data) != num_bytes:
            raise OSError("a piece of KV has another length than was said")
        return part

    def put(self, part: Tensor, target: Tensor) -> None:
        """Copy what was taken to memory of the device."""
        if self._stream is None:
            target.copy_(part.view_as(target))
            return
        with torch.cuda.stream(self._stream):
            target.copy_(part.view_as(target).to(self.device, non_blocking=True))
        self._stream.synchronize()  # the room is another piece's then

    def memory(self, rows: int, width: int) -> Tensor:
        """uint8 [rows, width], each row aligned as any number needs."""
        size = rows, -(-width // 16) * 16
        if self._stream is None:
            return torch.empty(size, dtype=torch.uint8)[:, :width]
        with torch.cuda.stream(self._stream):  # else a copy would wait for the steps under way
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        memory.record_stream(torch.cuda.current_stream(self.device))
        return memory[:, :width]


class Arrival:
    """Objects of equal parts that come together."""

    def __init__(self, first: Piece, owner: Owner, ports: Ports) -> None:
        self._names, self._parts, self._ports = first.names, first.parts, ports
        self._num_bytes = owner.num_bytes(first.parts)
        self._memory = ports.memory(len(first.names), self._num_bytes)
        self._left = self._num_bytes

    def add(self, piece: Piece, payload: Tensor) -> list[KVObject]:
        """A piece's bytes; the objects, once they are whole."""
        end = piece.start + piece.size
        if piece.parts != self._parts or not 0 <= piece.start < end <= self._num_bytes:
            raise OSError("a piece of KV is of other objects than were begun")
        self._ports.put(payload, self._memory[:, piece.start : end])
        self._left -= piece.size
        if self._left:
            return []
        rows = zip(self._names, self._memory, strict=True)
        # What was put is there: `put` has waited for it.
        return [KVObject(name, self._parts, row, Now()) for name, row in rows]
