"""What the engine calls the images of stored conversations, and which of them it keeps.

Owns the memory of identities, and pins in the vision pool: an image stays there as long as one
stored turn has it pinned. Knows nothing of turns or of HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from mmserve.errors import RequestError
from mmserve.held_image import HeldImage, ImageId
from mmserve.request import Tenant
from mmserve.server.engine_face import EngineFace
from mmserve.server.history import StoredImage

MAX_IDS = 16_384  # identities that are remembered

Name = tuple[bytes, str]

log = logging.getLogger("mmserve.server")


class ImageKeeper:
    """Images by their owner's salt and the digest of their file. `tenant_of`: by owner."""

    def __init__(self, engine: EngineFace, tenant_of: Callable[[str], Tenant]) -> None:
        self._engine, self._tenant_of = engine, tenant_of
        self._ids: OrderedDict[Name, ImageId] = OrderedDict()
        self._wanted: Counter[Name] = Counter()  # turns that have it pinned
        self._pinned: dict[Name, ImageId] = {}

    def _name(self, owner: str, digest: str) -> Name:
        return self._tenant_of(owner).salt, digest

    async def _identify(self, owner: str, image: StoredImage) -> ImageId:
        name = self._name(owner, image.digest)
        known = self._ids.get(name)
        if known is None:
            data = await image.blob.read()
            known = await self._engine.identify(data, self._tenant_of(owner))
            if known.num_tokens is not None:  # else it may be known later
                self._ids[name] = known
                if len(self._ids) > MAX_IDS:
                    self._ids.popitem(last=False)
        return known

    async def held(self, owner: str, images: Sequence[StoredImage]) -> list[HeldImage]:
        """Where the KV of each is."""
        return await self._engine.held_images([await self._identify(owner, i) for i in images])

    def moved(self, owner: str, before: frozenset[str], after: frozenset[str]) -> None:
        """A stored turn's pins have changed; what none has any more goes from the pool's."""
        self._wanted.update(self._name(owner, digest) for digest in after - before)
        for name in (self._name(owner, digest) for digest in before - after):
            self._wanted[name] -= 1
            if self._wanted[name] <= 0:
                del self._wanted[name]
                self._let_go(name)

    def _let_go(self, name: Name) -> None:
        image = self._pinned.pop(name, None)
        if image is not None:
            self._engine.unpin_image(image)

    async def pin(self, owner: str, image: StoredImage) -> None:
        """Keep an image in the pool, for a turn that is about to have it pinned. Raises
        `PinBudgetExceededError`."""
        name = self._name(owner, image.digest)
        if name not in self._pinned:
            known = await self._identify(owner, image)
            await self._engine.pin_image(known)
            self._pinned[name] = known

    def release(self, owner: str, images: Iterable[StoredImage]) -> None:
        """Let go of those that no turn has come to have pinned."""
        for name in (self._name(owner, image.digest) for image in images):
            if name not in self._wanted:
                self._let_go(name)

    async def pin_again(self, images: Iterable[tuple[str, StoredImage]]) -> None:
        """After a restart, with their owners; the pool's budget may have become smaller."""
        for owner, image in images:
            try:
                await self.pin(owner, image)
            except RequestError as error:
                log.warning("an image is not pinned again: %s", error.message)
            self.release(owner, [image])
