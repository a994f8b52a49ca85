"""What the engine calls the images of stored conversations, and which of them it keeps.

Owns the memory of identities, and pins in the vision pool: an image stays there as long as one
stored turn has it pinned. Knows nothing of turns or of HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from mmserve.errors import RequestError
from mmserve.held_image import HeldImage, ImageId
from mmserve.server.engine_face import EngineFace
from mmserve.server.history import StoredImage

MAX_IDS = 16_384  # identities that are remembered

log = logging.getLogger("mmserve.server")


class ImageKeeper:
    """Images by the digest of their file."""

    def __init__(self, engine: EngineFace) -> None:
        self._engine = engine
        self._ids: OrderedDict[str, ImageId] = OrderedDict()
        self._wanted: Counter[str] = Counter()  # turns that have it pinned
        self._pinned: dict[str, ImageId] = {}

    async def _identify(self, image: StoredImage) -> ImageId:
        known = self._ids.get(image.digest)
        if known is None:
            known = await self._engine.identify(await image.blob.read())
            if known.num_tokens is not None:  # else it may be known later
                self._ids[image.digest] = known
                if len(self._ids) > MAX_IDS:
                    self._ids.popitem(last=False)
        return known

    async def held(self, images: Sequence[StoredImage]) -> list[HeldImage]:
        """Where the KV of each is."""
        return await self._engine.held_images([await self._identify(image) for image in images])

    def moved(self, before: frozenset[str], after: frozenset[str]) -> None:
        """A stored turn's pins have changed; what none has any more goes from the pool's."""
        self._wanted.update(after - before)
        for digest in before - after:
            self._wanted[digest] -= 1
            if self._wanted[digest] <= 0:
                del self._wanted[digest]
                self._let_go(digest)

    def _let_go(self, digest: str) -> None:
        image = self._pinned.pop(digest, None)
        if image is not None:
            self._engine.unpin_image(image)

    async def pin(self, image: StoredImage) -> None:
        """Keep an image in the pool, for a turn that is about to have it pinned. Raises
        `PinBudgetExceededError`."""
        if image.digest not in self._pinned:
            known = await self._identify(image)
            await self._engine.pin_image(known)
            self._pinned[image.digest] = known

    def release(self, images: Iterable[StoredImage]) -> None:
        """Let go of those that no turn has come to have pinned."""
        for image in images:
            if image.digest not in self._wanted:
                self._let_go(image.digest)

    async def pin_again(self, images: Iterable[StoredImage]) -> None:
        """After a restart; the pool's budget may have become smaller."""
        for image in {image.digest: image for image in images}.values():
            try:
                await self.pin(image)
            except RequestError as error:
                log.warning("an image is not pinned again: %s", error.message)
            self.release([image])
