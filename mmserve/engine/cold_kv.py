"""Between the vision pool and the store of cold images: what steps down, and what comes back.

Owns which images a request reads as they are after having been cold, and the names of those.
Everything runs on the engine's thread. Knows nothing of how images are chosen to go, or of bits.

An image that came back has lost something, so it is not the image that was computed: it lies in the
pool under a name of its own, made of the image's and its format, and text that saw it is known by
that name, too. What is under such a name is a function of the image and the format alone: so hit
equals miss here as everywhere. Which of them a request is given depends on what had to leave: as it
was computed, as long as the pool or a tier has it; else as it is cold, unless computing the text
behind it anew would take longer than the image; else it is encoded. Its answer tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from mmserve import keys
from mmserve.cache.cold_images import ColdImage, ColdImages
from mmserve.cache.kv_pool import KVPool, VisionKVPool
from mmserve.engine.page_copy import gather, scatter
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.repack import repack
from mmserve.metrics import Metrics
from mmserve.scheduler.holdings import Holdings
from mmserve.sequence import Sequence as Seq
from mmserve.sequence import SequenceStatus
from mmserve.tiers.cost import Costs

logger = logging.getLogger(__name__)


class ColdKV:
    """`pools`: of images, by layer group; `tier_of(key)`: the highest tier below that has it as it
    was computed."""

    def __init__(
        self,
        images: ColdImages,
        holdings: Holdings,
        pools: Sequence[VisionKVPool],
        costs: Costs,
        metrics: Metrics,
        tier_of: Callable[[bytes], str | None],
    ) -> None:
        self.images = images
        self._holdings, self._costs, self._metrics, self._tier_of = (
            holdings,
            costs,
            metrics,
            tier_of,
        )
        self._pools = {g: pools[g] for g in holdings.image_groups}
        self._names: dict[bytes, str] = {}  # by stepped name, what the pool holds: its format
        images.on_step = metrics.image_stepped
        for rung in images.rungs:
            metrics.show_cold(rung.name, partial(images.count, rung.name))
        for pool in self._pools.values():
            pool.index.on_evict = self._after(pool.index.on_evict)

    def _after(self, others: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def evicted(key: bytes) -> None:
            others(key)
            self._evicted(key)

        return evicted

    # -- what is told ---------------------------------------------------------------------------

    def format_of(self, key: bytes) -> str | None:
        """Of what the pool holds under a name; None: it is as it was computed."""
        return self._names.get(key)

    def state(self, key: bytes) -> str | None:
        """The format in which an image could be had, that is not there as computed. Any thread may
        ask."""
        return self._ready(key) or self.images.rung(key)

    def drop(self, key: bytes) -> bool:
        """Forget an image here. What came back of it stays in the pool until it is dropped."""
        return self.images.drop(key)

    def _ready(self, key: bytes) -> str | None:
        """The best format of which the pool has what came back of an image."""
        for rung in self.images.rungs:
            if self._is_ready(keys.stepped(key, rung.name)):
                return rung.name
        return None

    def _is_ready(self, key: bytes) -> bool:
        return all(pool.index.is_ready(key) for pool in self._pools.values())

    # -- down -----------------------------------------------------------------------------------

    def _evicted(self, key: bytes) -> None:
        """An image is about to leave a pool: it is kept here, unless it has come from here, or is
        pinned: who pins an image wants it as it is."""
        if self._names.pop(key, None) is not None:
            return
        indexes = [pool.index for pool in self._pools.values()]
        if not self._is_ready(key) or any(index.is_pinned(key) for index in indexes):
            return
        entries = {g: pool.index.lookup(key) for g, pool in self._pools.items()}
        pages = {g: entry.pages for g, entry in entries.items() if entry is not None}
        count = next(entry.num_tokens for entry in entries.values() if entry is not None)
        parts = tuple(_read(self._pools[g], own) for g, own in pages.items())
        try:
            self.images.put(key, ColdImage(count, parts))
        except RuntimeError:  # PyTorch's, for memory
            logger.warning("an image found no memory to become cold in", exc_info=True)
            self.images.drop(key)

    # -- up -------------------------------------------------------------------------------------

    def choose(self, seq: Seq) -> None:
        """Before a place is looked for: name a sequence's images as it is to read them. Who has
        begun goes on as it began, as long as that is there."""
        begun = seq.status is SequenceStatus.PREEMPTED
        chosen: dict[bytes, str] = {}
        for digest in {placed.image.digest for placed in seq.images}:
            key = seq.course.key(digest)
            name = self._kept(key, seq.coarse.get(digest)) if begun else self._best(key)
            if name is not None:
                chosen[digest] = name
        if chosen == seq.coarse:
            return
        if begun:
            seq.read_as(chosen)
        else:
            self._begin(seq, chosen)

    def lift(self, seq: Seq) -> bool:
        """Bring to the pool what was chosen and is not there. False: there is no room now, and
        nothing has been brought."""
        if not seq.coarse:
            return True
        cold = {
            placed.key: self.images.get(seq.course.key(digest), seq.coarse[digest])
            for placed in seq.images
            if (digest := placed.image.digest) in seq.coarse and not self._is_ready(placed.key)
        }
        if cold and not self._bring(seq, cold):
            return False
        lost = [d for d, name in seq.coarse.items() if not self._is_ready(_name(seq, d, name))]
        if lost:  # there was no memory, say
            seq.read_as({d: name for d, name in seq.coarse.items() if d not in lost})
        read = {*seq.coarse.values(), seq.coarsest}
        lowest_first = (rung.name for rung in reversed(self.images.rungs))
        seq.coarsest = next((name for name in lowest_first if name in read), None)
        return True

    def _kept(self, key: bytes, name: str | None) -> str | None:
        if name is None or self._is_ready(keys.stepped(key, name)):
            return name
        return name if self.images.rung(key) == name else None

    def _best(self, key: bytes) -> str | None:
        indexes = [pool.index for pool in self._pools.values()]
        if all(index.lookup(key) is not None for index in indexes) or self._tier_of(key):
            return None
        return None if any(index.is_pinned(key) for index in indexes) else self.state(key)

    def _begin(self, seq: Seq, chosen: Mapping[bytes, str]) -> None:
        """As chosen, unless more time would be lost with the text that is known behind images as
        they were computed than the images themselves take."""
        if seq.coarse:
            seq.read_as({})
        known = self._holdings.reach(seq)
        seq.read_as(chosen)
        lost = max(known - self._holdings.reach(seq), 0)
        images = {placed.image.digest: placed.image.num_tokens for placed in seq.images}
        spared = self._costs.compute_s(0, sum(images[digest] for digest in chosen))
        again = self._costs.compute_s(lost, 0)
        if spared is not None and again is not None and again > spared:
            seq.read_as({})

    def _bring(self, seq: Seq, cold: Mapping[bytes, ColdImage | None]) -> bool:
        """Copies of cold images to the pool, under these names; nothing that the sequence needs
        gives way to another."""
        sizes = [(placed.key, placed.num_stored) for placed in seq.images]
        indexes = {g: pool.index for g, pool in self._pools.items()}
        if not all(index.can_acquire(sizes) for index in indexes.values()):
            return False
        held: list[tuple[int, bytes]] = []
        try:
            for g, index in indexes.items():
                for key in dict(sizes):
                    if index.is_ready(key):
                        index.acquire(key)
                        held.append((g, key))
            for key, image in cold.items():
                if image is not None:
                    self._place(key, image, held)
                    self._names[key] = _format(seq, key)
        except RuntimeError:  # PyTorch's, for memory: the rest is encoded
            logger.warning("a cold image found no memory to come back", exc_info=True)
        finally:
            for g, key in held:  # unwritten, it is forgotten
                indexes[g].release(key)
        return True

    def _place(self, key: bytes, image: ColdImage, held: list[tuple[int, bytes]]) -> None:
        for (g, pool), part in zip(self._pools.items(), image.parts, strict=True):
            if pool.index.is_ready(key):
                continue
            pages = pool.index.reserve(key, image.num_tokens)
            held.append((g, key))
            _write(pool, pages, part, image.num_tokens)
        for pool in self._pools.values():
            if not pool.index.is_ready(key):
                pool.index.mark_ready(key)
        self._metrics.cold_images_read.inc()


def _name(seq: Seq, digest: bytes, name: str) -> bytes:
    return keys.stepped(seq.course.key(digest), name)


def _format(seq: Seq, key: bytes) -> str:
    return next(seq.coarse[p.image.digest] for p in seq.images if p.key == key)


def _read(pool: KVPool, pages: Sequence[int]) -> Pages:
    """A copy of pages whose heads are those of all layers."""
    shape, held = pool.shape, gather(pool, pages)
    k, v = (held[:, part].flatten(0, 1) for part in range(2))
    return Pages(k, v, shape.kind, shape.page_size, shape.head_dim)


def _write(pool: KVPool, pages: Sequence[int], part: Pages, num_tokens: int) -> None:
    """Such pages, in the pool's format, to these."""
    shape = pool.shape
    own = repack(part, num_tokens, shape.kind, shape.page_size, shape.head_dim, shape.dtype)
    heads = shape.num_layers, shape.num_kv_heads
    scatter(pool, pages, torch.stack([x.view(*heads, *x.shape[1:]) for x in own[:2]], 1))
