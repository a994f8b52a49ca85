"""Single images' KV, as users ask for it: where it is, what it takes, and that it stays.

Owns the budget of pins. Knows nothing of conversations. On the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmserve.cache.kv_pool import VisionKVPool
from mmserve.cache.vision_index import VisionEntry
from mmserve.engine.cold_kv import ColdKV
from mmserve.errors import PinBudgetExceededError
from mmserve.held_image import ABSENT, ACTIVE, COLD, DISK, HOST, HeldImage, ImageId

PIN_SHARE = 2  # pinned images may take one part in so many of the pool


class _Pin(NamedTuple):
    """`counts`: the tokens of what is or may come under each key."""

    keys: tuple[bytes, ...]
    counts: tuple[int, ...]


class ImageKV:
    """`pools`: of the layer groups that have images. `key_of(digest)`: what an image's KV was
    stored under last. `tier_of(key)`: the highest tier below the pools that has it; `cold`: has it
    in fewer bits; None: nothing has."""

    def __init__(
        self,
        pools: Sequence[VisionKVPool],
        key_of: Callable[[bytes], bytes],
        tier_of: Callable[[bytes], str | None] = lambda key: None,
        cold: ColdKV | None = None,
    ) -> None:
        self._pools, self._tier_of, self.cold = pools, tier_of, cold
        self._key_of = key_of
        self._pinned: dict[ImageId, _Pin] = {}

    def state(self, key: bytes) -> str:
        """Where the KV of a key is. Any thread may ask."""
        if all(pool.index.is_ready(key) for pool in self._pools):
            return ACTIVE
        tier = self._tier_of(key)
        if tier is None:
            return ABSENT if self._format(key) is None else COLD
        return tier if tier == HOST else DISK

    def _format(self, key: bytes) -> str | None:
        """In which an image could be had, that is nowhere as it was computed."""
        return self.cold.state(key) if self.cold is not None else None

    def format_of(self, key: bytes) -> str | None:
        """Which the KV under a key has been held in since it was computed; None: in the pool's."""
        return self.cold.format_of(key) if self.cold is not None else None

    def held(self, images: Sequence[ImageId]) -> list[HeldImage]:
        return [self._held(image) for image in images]

    def _held(self, image: ImageId) -> HeldImage:
        keys = [self._key_of(digest) for digest in image.digests]
        key = next((key for key in keys if self.state(key) != ABSENT), keys[0])
        found = self._entries(key)
        every = [part for each in keys for part in self._entries(each)]
        state = self.state(key)
        return HeldImage(
            state=state,
            num_tokens=found[0][1].num_tokens if found else image.num_tokens,
            num_bytes=sum(len(entry.pages) * pool.shape.page_bytes for pool, entry in every),
            hits=max((entry.hits for _, entry in every), default=0),
            pinned=image in self._pinned,
            kv_format=self._format(key) if state == COLD else None,
        )

    def _entries(self, key: bytes) -> list[tuple[VisionKVPool, VisionEntry]]:
        entries = ((pool, pool.index.lookup(key)) for pool in self._pools)
        return [(pool, entry) for pool, entry in entries if entry is not None]

    def _pin(self, image: ImageId) -> _Pin:
        keys = tuple(self._key_of(digest) for digest in image.digests)
        expected = image.counts or (0,) * len(keys)
        counts = tuple(
            max((entry.num_tokens for _, entry in self._entries(key)), default=count)
            for key, count in zip(keys, expected, strict=True)
        )
        return _Pin(keys, counts)

    def pin(self, image: ImageId) -> None:
        """Let it stay as long as anything else can give way, also if it is written only later: all
        that it is by any detail, which all counts.

        Raises `PinBudgetExceededError`.
        """
        pinned = {**self._pinned, image: self._pin(image)}
        for pool in self._pools:
            index, size = pool.index, pool.shape.page_size
            pages = sum(index.pages_for(n) for pin in pinned.values() for n in pin.counts)
            limit = index.num_pages // PIN_SHARE
            if pages > limit:
                raise PinBudgetExceededError(
                    f"With this image {pages} pages of {size} visual tokens would be pinned; the "
                    f"limit is {limit}, half of the pool."
                )
        self.unpin(image)  # it may have had other keys
        self._pinned = pinned
        for key in pinned[image].keys:
            for pool in self._pools:
                pool.index.pin(key)

    @property
    def pinned(self) -> list[ImageId]:
        return list(self._pinned)

    def drop(self, key: bytes) -> bool:
        """Forget what lies under a key in the pools, and what is cold of it; False: it is not
        there, or somebody reads it.

        What tiers have of it stays, and what is pinned is kept again once it is back.
        """
        entries = [pool.index.lookup(key) for pool in self._pools]
        if any(entry is not None and entry.references for entry in entries):
            return False
        cold = self.cold is not None and self.cold.drop(key)
        return sum(pool.index.drop(key) for pool in self._pools) > 0 or cold

    def unpin(self, image: ImageId) -> None:
        """Harmless when it is not pinned."""
        pin = self._pinned.pop(image, None)
        for key in () if pin is None else pin.keys:
            for pool in self._pools:
                pool.index.unpin(key)
