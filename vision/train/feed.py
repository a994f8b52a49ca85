"""From shards to the batch of one update, on the device.

Owns how shards are joined, and how long was waited for them. Which shards an update gets depends on
its number alone, never on who was faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from mmserve.vision.train.packing import Shard


class Feed:
    """`taken`: shards so far, which is where to go on from."""

    def __init__(
        self, shards: Iterator[Shard], count: int, latents: int, device: torch.device
    ) -> None:
        """`count`: of an update; `latents`: of an image, at most."""
        self._shards, self._count, self._latents, self._device = shards, count, latents, device
        self.taken = 0
        self.waited_s = 0.0

    def batch(self) -> Shard:
        begun = time.monotonic()
        found = [next(self._shards) for _ in range(self._count)]
        self.waited_s += time.monotonic() - begun
        self.taken += len(found)
        return joined([self._sent(shard) for shard in found], self._latents)

    def _sent(self, shard: Shard) -> Shard:
        """All but the answers, which the host reads."""
        parts = (part.to(self._device, non_blocking=True) for part in shard)
        return Shard(*parts)._replace(answers=shard.answers)


def joined(shards: Sequence[Shard], latents: int) -> Shard:
    """As one shard of all rows and images; the numbers of images and latents go through."""
    first, moved = 0, []
    for shard in shards:
        image = torch.where(shard.image > 0, shard.image + first, 0)
        latent = torch.where(shard.latent >= 0, shard.latent + first * latents, -1)
        moved.append(shard._replace(image=image, latent=latent))
        first += len(shard.pixels)
    return Shard(*(torch.cat(part) for part in zip(*moved, strict=True)))
