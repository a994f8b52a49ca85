"""Whose each page is, for whoever watches the pools.

Owns the way from the books of pages to a `Snapshot`, and owners' numbers. Looks at lists and counts
only, at no tensor, and changes nothing. On the engine's thread, between two steps; it takes time
only when it is asked.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Hashable, Sequence

from mmserve.cache.radix_node import HOLE
from mmserve.kv_snapshot import (
    FREE,
    ImageOwner,
    Owner,
    PoolPages,
    PrefixOwner,
    RequestOwner,
    Snapshot,
)
from mmserve.scheduler.scheduler import Scheduler

Maps = dict[int, list[int]]  # by layer group; one place more than there are pages, for HOLE


class PageOwners:
    """`text_bytes`, `vision_bytes`: of a page, by layer group; `format_of(key)`: of what lies under
    a key in the vision pool and is not as it was computed."""

    def __init__(
        self,
        scheduler: Scheduler,
        text_bytes: Sequence[int],
        vision_bytes: Sequence[int],
        format_of: Callable[[bytes], str | None] = lambda key: None,
    ) -> None:
        self._scheduler, self._holdings = scheduler, scheduler.holdings
        self._bytes, self._format_of = (text_bytes, vision_bytes), format_of
        self._count = itertools.count()
        # A node is itself, a request its id, an image its key.
        self._numbers: dict[Hashable, int] = {}
        self._seen: dict[Hashable, int] = {}  # of them, those of the snapshot that is being made

    def look(self) -> Snapshot:
        started = time.perf_counter()
        self._seen = {}
        holdings = self._holdings
        text = {g: _blank(holdings.text[g].num_pages) for g in holdings.text_groups}
        vision = {g: _blank(holdings.vision[g].num_pages) for g in holdings.image_groups}
        owners: list[Owner] = [*self._prefixes(text), *self._requests(text), *self._images(vision)]
        self._numbers = self._seen
        return Snapshot(
            (*self._pools("text", text), *self._pools("vision", vision)),
            tuple(owners),
            holdings.page_size,
            len(self._scheduler.running),
            self._scheduler.num_waiting,
            time.perf_counter() - started,
        )

    def _number(self, name: Hashable) -> int:
        number = self._seen.get(name, self._numbers.get(name))
        self._seen[name] = number = next(self._count) if number is None else number
        return number

    def _prefixes(self, maps: Maps) -> list[Owner]:
        """Of thousands of nodes and tens of thousands of pages, so plainly written."""
        radix, holdings = self._holdings.radix, self._holdings
        parts = [(maps[g], holdings.text[g].ref_count) for g in holdings.text_groups]
        seen, numbers = self._seen, self._numbers
        ends: dict[int, int] = {}
        found: list[Owner] = []
        for node in () if radix is None else radix.nodes():
            number = numbers.get(node)
            if number is None:
                number = next(self._count)
            seen[node] = number
            readers = 0
            for (owners, holders), pages in zip(parts, node.pages, strict=True):
                for page in pages:
                    owners[page] = number
                # What a window lets go goes from the front, so the last page is read longest.
                if page != HOLE and holders(page) > readers:
                    readers = holders(page) - 1
            parent = seen.get(node.parent)  # none of the root
            start = 0 if parent is None else ends[parent]
            size = len(node.keys)
            ends[number] = start + size
            found.append(PrefixOwner(number, parent, node.writer, start, size, readers))
        return found

    def _requests(self, maps: Maps) -> list[Owner]:
        found: dict[str, Owner] = {}
        for seq in self._scheduler.running:
            number = self._number(seq.id)
            for g, owners in maps.items():
                for page in seq.tables[g]:
                    if owners[page] < 0:
                        owners[page] = number
            if seq.id not in found:
                computed = seq.num_computed_tokens
                found[seq.id] = RequestOwner(number, seq.id, seq.num_tokens, computed)
        return list(found.values())

    def _images(self, maps: Maps) -> list[Owner]:
        """One that lies in several groups is one owner."""
        found: dict[bytes, ImageOwner] = {}
        for g, owners in maps.items():
            index = self._holdings.vision[g]
            for key, entry in index.entries():
                number = self._number(key)
                for page in entry.pages:
                    owners[page] = number
                references, hits = entry.references, entry.hits
                if (known := found.get(key)) is not None:
                    references = max(references, known.references)
                    hits = max(hits, known.hits)
                found[key] = ImageOwner(
                    number,
                    key,
                    entry.writer,
                    entry.num_tokens,
                    entry.state.value,
                    references,
                    hits,
                    index.is_pinned(key),
                    self._format_of(key),
                )
        return list(found.values())

    def _pools(self, kind: str, maps: Maps) -> list[PoolPages]:
        sizes = self._bytes[kind == "vision"]
        pools = []
        for g, owners in maps.items():
            pages = array("i", owners)
            pages.pop()
            pools.append(PoolPages(kind, self._holdings.groups[g].window, sizes[g], pages))
        return pools


def _blank(num_pages: int) -> list[int]:
    return [FREE] * (num_pages + 1)
