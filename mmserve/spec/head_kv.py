"""The keys and values that a head keeps of its own: the last few hundred tokens of each sequence.

Owns the ring buffers and who has which. Knows nothing of tokens, and nothing of the engine's pools:
a head has one layer, and what it forgets costs guesses, never answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmserve.spec.drafter import MOST_TOKENS

NOBODY = 0  # a ring that rows without a sequence write to


class HeadKV:
    """Rings of `size` tokens, [rings, size, Hkv, D] keys (rotated) and values. Position p stands at
    p modulo `size`; a position sees the last `window` ones up to itself. What was guessed and was
    wrong is written over, or lies beyond what anyone sees."""

    def __init__(
        self,
        window: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.window, self.size = window, window + MOST_TOKENS
        shape = (1, self.size, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self._free: list[int] = []

    def take(self) -> int:
        """A ring for a new sequence; there is always one more."""
        if not self._free:
            first, count = len(self.keys), max(len(self.keys), 4)
            self.keys = _longer(self.keys, count)
            self.values = _longer(self.values, count)
            self._free = list(range(first + count - 1, first - 1, -1))
        return self._free.pop()

    def give(self, ring: int) -> None:
        assert ring != NOBODY and ring not in self._free
        self._free.append(ring)

    def write(self, rings: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """rings, positions [T] int64; keys, values [T, Hkv, D]. No two rows of one place."""
        places = positions % self.size
        self.keys[rings, places] = keys
        self.values[rings, places] = values

    def read(self, rings: Tensor) -> tuple[Tensor, Tensor]:
        """rings [B] -> keys, values [B, size, Hkv, D]."""
        return self.keys[rings], self.values[rings]

    def seen(self, positions: Tensor, first: Tensor) -> Tensor:
        """positions, first [B] -> [B, size] bool: which places hold what is seen from a position,
        where nothing is known from before `first`."""
        places = torch.arange(self.size, device=positions.device)
        held = positions[:, None] - (positions[:, None] - places) % self.size
        return held >= torch.maximum(first, positions - self.window + 1)[:, None]


def _longer(rings: Tensor, count: int) -> Tensor:
    return torch.cat((rings, rings.new_zeros(count, *rings.shape[1:])))
