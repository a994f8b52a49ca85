"""Images that had to leave the vision pool, held in fewer bits than there.

Owns their bytes and which of them steps down next. Knows nothing of pools, sequences, or how an
image comes here and leaves.

Formats are the rungs of a ladder. An image comes in on the first one. Where there is no room, the
image of the highest rung that was used longest ago steps down by one; when all stand on the last
one, the one used longest ago goes. Each step is made from the rung above, never past it: so what
lies on a rung is a function of the image as it was computed, whenever and why ever it came there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mmserve.kernels.kv_formats import KVFormat, Pages
from mmserve.kernels.repack import repack


class Rung(NamedTuple):
    """A format by its name, and what it means for each layer group: some stay as computed."""

    name: str
    kinds: tuple[KVFormat, ...]


@dataclass(frozen=True)
class ColdImage:
    """One image's KV by layer group, in pages of its own whose heads are those of all layers, one
    layer after another."""

    num_tokens: int
    parts: tuple[Pages, ...]

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.itemsize for part in self.parts for x in part[:2])

    def step(self, kinds: Sequence[KVFormat], size: int) -> ColdImage:
        """In these formats, by group; pages of `size` tokens."""

        def part(pages: Pages, kind: KVFormat) -> Pages:
            if pages.kind == kind and pages.size == size:
                return pages
            dim = pages.k.shape[3] if pages.kind.plain else pages.dim
            dtype = pages.k.dtype if pages.kind.plain else torch.float32
            return repack(pages, self.num_tokens, kind, size, dim, dtype)

        return ColdImage(self.num_tokens, tuple(map(part, self.parts, kinds)))


class ColdImages:
    """`rungs`: the highest first; `group_tokens`: that share scales, at most."""

    def __init__(self, rungs: Sequence[Rung], num_bytes: int, group_tokens: int) -> None:
        self.rungs, self.num_bytes = tuple(rungs), num_bytes
        self._group_tokens = group_tokens
        # By rung: images by key, the one that was used longest ago first.
        self._held: list[OrderedDict[bytes, ColdImage]] = [OrderedDict() for _ in rungs]
        self._bytes = [0 for _ in rungs]
        self.on_step: Callable[[str], None] = lambda name: None  # an image has come to a rung

    @property
    def used(self) -> int:
        """Bytes."""
        return sum(self._bytes)

    def put(self, key: bytes, image: ColdImage) -> None:
        """As it was in the pool: it begins on the first rung, whatever was known of it."""
        self.drop(key)
        self._step(key, image, 0)
        while self.used > self.num_bytes:
            self._give_way()

    def rung(self, key: bytes) -> str | None:
        """The format that an image is in. Any thread may ask."""
        found = (
            rung.name for rung, held in zip(self.rungs, self._held, strict=True) if key in held
        )
        return next(found, None)

    def get(self, key: bytes, name: str) -> ColdImage | None:
        """An image, if it is in this very format; that is a use of it."""
        for rung, held in zip(self.rungs, self._held, strict=True):
            if rung.name == name and key in held:
                held.move_to_end(key)
                return held[key]
        return None

    def drop(self, key: bytes) -> bool:
        """Forget an image. False: there was none."""
        for number, held in enumerate(self._held):
            if (image := held.pop(key, None)) is not None:
                self._bytes[number] -= image.num_bytes
                return True
        return False

    def count(self, name: str) -> tuple[int, int]:
        """Images in a format, and their bytes. Any thread may ask."""
        number = [rung.name for rung in self.rungs].index(name)
        return len(self._held[number]), self._bytes[number]

    def check_invariants(self) -> None:
        sizes = [sum(image.num_bytes for image in held.values()) for held in self._held]
        assert sizes == self._bytes and self.used <= self.num_bytes
        keys = [key for held in self._held for key in held]
        assert len(keys) == len(set(keys)), "an image stands on two rungs"

    def _step(self, key: bytes, image: ColdImage, number: int) -> None:
        size = min(self._group_tokens, 1 << max(image.num_tokens - 1, 1).bit_length())
        stepped = image.step(self.rungs[number].kinds, size)
        self._held[number][key] = stepped
        self._bytes[number] += stepped.num_bytes
        self.on_step(self.rungs[number].name)

    def _give_way(self) -> None:
        number = next(number for number, held in enumerate(self._held) if held)
        key, image = self._held[number].popitem(last=False)
        self._bytes[number] -= image.num_bytes
        if number + 1 < len(self._held):
            self._step(key, image, number + 1)
