"""Orders from one rank to the others: any value; tensors of a device go from device to device.

Owns the form of a message. Knows nothing of what is ordered. What a process reads was written by
the one that started it, over a pipe that nobody else has.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Spread = Callable[[Tensor], Any]  # from the first rank to all, in the order of the stream


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.apart: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return None
        self.apart.append(value.contiguous())
        return tuple(value.shape), value.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device
        self.apart: list[Tensor] = []

    def persistent_load(self, told: Any) -> Tensor:
        shape, dtype = told
        self.apart.append(torch.empty(shape, dtype=dtype, device=self._device))
        return self.apart[-1]


def send(peers: Sequence[Any], value: Any, spread: Spread) -> None:
    """`peers`: pipes. Raises OSError where one is gone."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    for peer in peers:
        peer.send_bytes(file.getbuffer())
    for tensor in pickler.apart:
        spread(tensor)


def receive(leader: Any, device: torch.device, spread: Spread) -> Any:
    """Raises EOFError where the first rank is gone."""
    unpickler = _Unpickler(leader.recv_bytes(), device)
    value = unpickler.load()
    for tensor in unpickler.apart:
        spread(tensor)
    return value
