"""The content address of the vision pool: an image's digest to the pages of its KV.

Owns which images are stored, who holds them and which goes next. Knows nothing of tensors, pixels
or sequences. A digest is the whole identity of an image (32 bytes, compared in full).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmserve.cache.page_pool import PagePool, PagePoolExhausted


class EntryState(enum.Enum):
    WRITING = "writing"  # pages are reserved, their KV is not written yet
    READY = "ready"
    FAILED = "failed"  # the write failed; goes with its last holder


@dataclass
class VisionEntry:
    """One image's place. `hits`: how often it was found. `writer`: whoever it was reserved for,
    where that is known. Read-only outside this module."""

    pages: list[int]
    num_tokens: int
    state: EntryState = EntryState.WRITING
    references: int = 0
    hits: int = 0
    writer: str | None = None

    @property
    def ready(self) -> bool:
        return self.state is EntryState.READY


@dataclass
class VisionStats:
    """Counts of images since start: found, not found, thrown out for another."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class AcquireResult(NamedTuple):
    pages: dict[bytes, list[int]]
    missing: list[bytes]  # the caller must write these, in this order, and mark them ready


class VisionIndex:
    """Images in whole pages, with references, pins and least-recently-used eviction.

    Life of an image: reserved (writing) -> ready -> idle, once nobody refers to it -> evicted.
    Only idle images are evicted: ready and without reference. Pinned ones go last, when nothing
    else is left to give way: a pin never keeps anybody from running. A writing or failed image
    whose last reference goes is forgotten at once, since nobody is left to write it; so a reference
    is not released while a write into its pages is in flight. Not thread-safe.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._pool = PagePool(num_pages)
        self._page_size = page_size
        self._entries: dict[bytes, VisionEntry] = {}
        # Idle images, least recently used first: those without a pin, and those with one.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._idle_pages = 0  # of both
        self._pinned: set[bytes] = set()
        self._referenced_pages = 0
        self.stats = VisionStats()
        # Told of an idle image before it gives way to another; changes nothing here.
        self.on_evict: Callable[[bytes], None] = lambda _: None

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        """Pages that hold an image, idle ones included."""
        return self.num_pages - self.num_free

    @property
    def num_referenced(self) -> int:
        """Pages of images that somebody refers to."""
        return self._referenced_pages

    @property
    def num_available(self) -> int:
        """Pages a reservation could get now: free ones and those of idle images."""
        return self.num_free + self._idle_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that an image of `num_tokens` visual tokens takes."""
        return -(-num_tokens // self._page_size)

    def lookup(self, digest: bytes) -> VisionEntry | None:
        """What is stored of an image; takes nothing and does not count as use."""
        return self._entries.get(digest)

    def is_ready(self, digest: bytes) -> bool:
        """Whether an image's KV is written and can be read."""
        entry = self._entries.get(digest)
        return entry is not None and entry.ready

    def stored(self) -> list[tuple[bytes, VisionEntry]]:
        """Every image that can be read: those in use, then pinned ones, then the others, the last
        used first."""
        idle = [*reversed(self._kept), *reversed(self._idle)]
        held = [digest for digest in self._entries if not self._is_idle(digest)]
        return [(d, self._entries[d]) for d in (*held, *idle) if self._entries[d].ready]

    def entries(self) -> Iterable[tuple[bytes, VisionEntry]]:
        """Every image that has pages, readable or not; until something changes here."""
        return self._entries.items()

    def is_pinned(self, digest: bytes) -> bool:
        return digest in self._pinned

    def acquire(self, digest: bytes) -> list[int] | None:
        """Adds a reference and returns the pages; None when the image is absent or failed.

        The image may still be in writing by another holder: see `VisionEntry.ready`.
        """
        entry = self._entries.get(digest)
        if entry is None or entry.state is EntryState.FAILED:
            return None
        self._hold(digest, entry)
        entry.hits += 1
        self.stats.hits += 1
        return entry.pages

    def retain(self, digest: bytes) -> None:
        """Adds a reference to what somebody holds already; not a use of its own."""
        entry = self._entries[digest]
        assert entry.references > 0, "an image that nobody holds cannot be retained"
        entry.references += 1

    def reserve(self, digest: bytes, num_tokens: int, writer: str | None = None) -> list[int]:
        """Pages for an absent image, one reference, to be written and then marked ready.

        Evicts idle images as needed. Raises `PagePoolExhausted`, and changes nothing, when free
        and idle pages together are too few.
        """
        assert digest not in self._entries, "the image is stored already"
        assert num_tokens > 0, f"an image of {num_tokens} tokens"
        needed = self.pages_for(num_tokens)
        if needed > self.num_available:
            raise PagePoolExhausted(needed, self.num_available, self.num_pages)
        while self.num_free < needed:
            victim = next(iter(self._idle or self._kept))
            self.on_evict(victim)
            self._set_idle(victim, False)
            self._forget(victim)
            self.stats.evictions += 1
        entry = VisionEntry(self._pool.allocate(needed), num_tokens, writer=writer)
        self._entries[digest] = entry
        self._hold(digest, entry)
        self.stats.misses += 1
        return entry.pages

    def can_acquire(self, images: Sequence[tuple[bytes, int]]) -> bool:
        """Whether `acquire_all` would get the images (digest, visual tokens) now."""
        sizes = dict(images)
        known = {d: self._entries[d] for d in sizes if d in self._entries}
        if any(entry.state is EntryState.FAILED for entry in known.values()):
            return False
        needed = sum(self.pages_for(n) for d, n in sizes.items() if d not in known)
        spared = sum(len(entry.pages) for d, entry in known.items() if self._is_idle(d))
        return needed <= self.num_available - spared

    def acquire_all(
        self, images: Sequence[tuple[bytes, int]], writer: str | None = None
    ) -> AcquireResult | None:
        """Holds every image (digest, visual tokens) of one sequence, or none of them.

        One reference per occurrence, so a repeated image is released once per occurrence too.
        None means not now: too few pages, or an image whose write has just failed. Because nobody
        ever waits with a part of their images in hand, sequences cannot block each other.
        """
        if not self.can_acquire(images):
            return None
        sizes = dict(images)
        known = [digest for digest in sizes if digest in self._entries]
        # The known ones first: held, they cannot be evicted by the reservations.
        for digest, _ in images:
            if digest in known:
                self.acquire(digest)
        missing: list[bytes] = []
        for digest, num_tokens in images:
            if digest in known:
                continue
            if self.acquire(digest) is None:
                self.reserve(digest, num_tokens, writer)
                missing.append(digest)
        return AcquireResult({d: self._entries[d].pages for d in sizes}, missing)

    def mark_ready(self, digest: bytes) -> None:
        """The KV of a writing image is complete in its pages."""
        entry = self._entries[digest]
        assert entry.state is EntryState.WRITING, f"a {entry.state.value} image becomes ready"
        entry.state = EntryState.READY

    def discard(self, digest: bytes) -> None:
        """The write of an image failed: nobody gets it any more; its holders still release it."""
        entry = self._entries[digest]
        assert entry.state is EntryState.WRITING, f"a {entry.state.value} image is discarded"
        entry.state = EntryState.FAILED

    def release(self, digest: bytes) -> None:
        """Drops one reference."""
        entry = self._entries[digest]
        assert entry.references > 0, "an image is released more often than held"
        entry.references -= 1
        if entry.references:
            return
        self._referenced_pages -= len(entry.pages)
        if entry.ready:
            self._set_idle(digest, True)
        else:
            self._forget(digest)

    def pin(self, digest: bytes) -> None:
        """Let an image go last, from now on until `unpin`: also one that is not stored yet, or is
        written anew. Harmless when it is pinned."""
        self._pinned.add(digest)
        if digest in self._idle:
            del self._idle[digest]
            self._kept[digest] = None

    def unpin(self, digest: bytes) -> None:
        """Harmless when the image is not pinned."""
        self._pinned.discard(digest)
        if digest in self._kept:
            del self._kept[digest]
            self._idle[digest] = None

    def drop(self, digest: bytes) -> bool:
        """Forgets one image, pinned or not, that nobody refers to. False: there is none such."""
        if not self._is_idle(digest):
            return False
        self._set_idle(digest, False)
        self._forget(digest)
        return True

    def clear(self) -> None:
        """Forgets every idle image, pinned ones excepted."""
        for digest in list(self._idle):
            self.drop(digest)

    def check_invariants(self) -> None:
        """Entries, idle list, counters and the page pool agree with each other."""
        self._pool.check_invariants()
        pages = [page for entry in self._entries.values() for page in entry.pages]
        assert len(pages) == len(set(pages)), "two images share a page"
        assert all(self._pool.ref_count(page) == 1 for page in pages), "an image's page is free"
        assert len(pages) == self.num_used, "a used page belongs to no image"
        idle = {
            digest
            for digest, entry in self._entries.items()
            if entry.ready and not entry.references
        }
        assert idle & self._pinned == set(self._kept), "the list of kept images is wrong"
        assert idle - self._pinned == set(self._idle), "the idle list is wrong"
        assert self._idle_pages == sum(len(self._entries[d].pages) for d in idle)
        held = [entry for entry in self._entries.values() if entry.references]
        assert self._referenced_pages == sum(len(entry.pages) for entry in held)
        for entry in self._entries.values():
            assert len(entry.pages) == self.pages_for(entry.num_tokens), "wrong number of pages"
            assert entry.ready or entry.references > 0, "an unwritten image nobody waits for"

    def _hold(self, digest: bytes, entry: VisionEntry) -> None:
        if not entry.references:
            self._referenced_pages += len(entry.pages)
            self._set_idle(digest, False)
        entry.references += 1

    def _is_idle(self, digest: bytes) -> bool:
        return digest in self._idle or digest in self._kept

    def _set_idle(self, digest: bytes, idle: bool) -> None:
        if idle == self._is_idle(digest):
            return
        size = len(self._entries[digest].pages)
        images = self._kept if digest in self._pinned else self._idle
        if idle:
            images[digest] = None
            self._idle_pages += size
        else:
            del images[digest]
            self._idle_pages -= size

    def _forget(self, digest: bytes) -> None:
        self._pool.release(self._entries.pop(digest).pages)
