"""The keys and values that a head keeps of its own: the last few hundred tokens of each sequence.

Owns the ring buffers and who has which. Knows nothing of tokens, and nothing of the engine's pools:
a head has one layer, and what it forgets costs guesses, never answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = 0  # a ring that rows without a sequence write to


class HeadKV:
    """Rings of `size` tokens, [rings, size, 2 Hkv, D]: keys, rotated, then values. Position p
    stands at p modulo `size`, so the last `size` ones are there."""

    def __init__(
        self,
        size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        room: int = 0,
    ) -> None:
        """`room`: for so many sequences nothing moves."""
        self.size = size
        shape = (1 + room, size, 2 * num_kv_heads, head_dim)
        self.rings = torch.zeros(shape, device=device, dtype=dtype)
        self._free = list(range(room, 0, -1))

    @property
    def is_full(self) -> bool:
        """Whether `take` would move the rings."""
        return not self._free

    def take(self) -> int:
        """A ring for a new sequence; there is always one more."""
        if self.is_full:
            first, count = len(self.rings), max(len(self.rings), 4)
            more = self.rings.new_zeros(count, *self.rings.shape[1:])
            self.rings = torch.cat((self.rings, more))
            self._free = list(range(first + count - 1, first - 1, -1))
        return self._free.pop()

    def give(self, ring: int) -> None:
        assert ring != NOBODY and ring not in self._free
        self._free.append(ring)

    def write(self, rings: Tensor, positions: Tensor, kv: Tensor) -> None:
        """rings, positions [T] int64; kv [T, 2 Hkv, D]. No two rows of one place but nobody's."""
        self.rings[rings, positions % self.size] = kv

    def read(self, rings: Tensor) -> tuple[Tensor, Tensor]:
        """rings [B] -> keys, values [B, Hkv, size, D]."""
        keys, values = self.rings[rings].transpose(1, 2).chunk(2, 1)
        return keys, values

    def hidden(self, positions: Tensor, first: Tensor, dtype: torch.dtype) -> Tensor:
        """positions, first [B] -> [B, size]: 0 where a place holds a position from `first` on, if
        those up to `positions` have been written; minus infinity elsewhere."""
        places = torch.arange(self.size, device=positions.device)
        held = positions[..., None] - (positions[..., None] - places) % self.size
        lacking = held < first[..., None]
        return torch.zeros_like(held, dtype=dtype).masked_fill(lacking, float("-inf"))
