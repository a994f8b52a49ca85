"""The free list and reference counts of one pool's page ids.

Owns which pages are free and how many holders each taken page has. Knows nothing of tensors, tokens
or why a page is held.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PagePoolExhausted(Exception):
    """Fewer pages can be had than were asked for. All counts are pages."""

    def __init__(self, requested: int, available: int, total: int) -> None:
        super().__init__(f"{requested} pages requested, {available} of {total} available")
        self.requested = requested
        self.available = available
        self.total = total


class PagePool:
    """Page ids 0..num_pages-1, each free or held by one or more holders.

    Whoever allocates or retains a page releases it once; the page is free again at zero holders.
    Not thread-safe: one thread, the engine's, owns it.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self._counts = [0] * num_pages
        # A heap: the lowest ids leave first, so pages taken together lie together and a pool
        # that is mostly idle touches only the front of its tensors.
        self._free = list(range(num_pages))

    @property
    def num_pages(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages, ascending ids, one reference each.

        Raises `PagePoolExhausted`, and takes nothing, when fewer than `n` are free.
        """
        assert n >= 0, f"{n} pages requested"
        if n > len(self._free):
            raise PagePoolExhausted(n, len(self._free), self.num_pages)
        pages = [heapq.heappop(self._free) for _ in range(n)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page; every page must already be held by someone."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is free and cannot be retained"
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page and frees those that nobody holds any more."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is released more often than held"
            self._counts[page] -= 1
            if not self._counts[page]:
                heapq.heappush(self._free, page)

    def ref_count(self, page: int) -> int:
        """How many holders a page has; 0 is free."""
        return self._counts[page]

    def check_invariants(self) -> None:
        """Every page is either free, exactly once, or held; no page is both or neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert all(count >= 0 for count in self._counts), "a reference count is negative"
        unheld = {page for page, count in enumerate(self._counts) if count == 0}
        assert free == unheld, f"free and held disagree on pages {sorted(free ^ unheld)}"
