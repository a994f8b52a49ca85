"""A radix tree from key prefixes to the text pages that hold their KV.

Owns the tree, its locks and its order of eviction. Knows nothing of tensors, and of keys only that
they can be hashed and compared: a key identifies a text token and the images directly before it
(`Sequence.keys`), so equal prefixes mean equal KV. A namespace or salt is simply the first key.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from mmserve.cache.page_pool import PagePool

Keys = Sequence[Hashable]


class RadixNode:
    """A run of whole pages below its parent. Outside this module it is a handle to lock."""

    __slots__ = ("keys", "pages", "parent", "children", "locks", "last_used", "queued")

    def __init__(self, keys: list[Hashable], pages: list[int], parent: RadixNode | None) -> None:
        self.keys = keys
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple[Hashable, ...], RadixNode] = {}  # by the child's first page
        self.locks = 0  # locks on this node or below it
        self.last_used = 0  # ticks
        self.queued = False  # has an entry in the eviction heap


class MatchResult(NamedTuple):
    pages: list[int]
    num_tokens: int
    node: RadixNode  # the end of the match; the root when nothing matched


class InsertResult(NamedTuple):
    num_tokens: int  # tokens of the given keys that the tree now holds
    num_new_pages: int  # pages of the given ones that the tree took
    node: RadixNode  # the end of what it holds


class RadixCache:
    """Longest-prefix cache in whole pages.

    The cache holds one pool reference for each page it stores. `match` and `insert` take nothing
    for the caller: a caller that goes on using a node locks it (its whole path then stays) before
    it calls anything else here, and unlocks it once. Not thread-safe.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = RadixNode([], [], None)
        self._num_pages = 0
        self._tick = 0
        # Every leaf has one entry (last_used, serial, node). `last_used` may have grown since the
        # push, and the node may have got children; both are settled when the entry is popped.
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._serial = 0

    @property
    def num_pages(self) -> int:
        """Pages stored."""
        return self._num_pages

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now. Walks the tree: O(stored pages)."""
        total = 0
        kept: set[int] = set()  # ids of the nodes below which something must stay
        for node in reversed(list(self._nodes())):
            free = 0 if id(node) in kept or node.locks else self._loose_tail(node)
            total += free
            if free < len(node.pages):
                kept.add(id(node.parent))
        return total

    def pages(self) -> list[int]:
        """Every page stored, in no order."""
        return [page for node in self._nodes() for page in node.pages]

    def match(self, keys: Keys, limit: int | None = None) -> MatchResult:
        """The longest stored prefix of `keys`, in whole pages. O(len(keys)).

        At most len(keys) - 1 tokens, because a sequence must compute at least one token to have
        logits; at most `limit` tokens when given.
        """
        cap = len(keys) - 1 if limit is None else min(limit, len(keys) - 1)
        node, pages = self._walk(keys, max(cap, 0) // self._page_size)
        return MatchResult(pages, len(pages) * self._page_size, node)

    def insert(self, keys: Keys, pages: Sequence[int]) -> InsertResult:
        """Stores the whole pages of `keys`; pages[i] holds keys [i*page_size, (i+1)*page_size).

        A trailing part of a page, or keys beyond the given pages, are not stored. Where the prefix
        is known already the tree keeps its own pages. The caller keeps its references.
        """
        size = self._page_size
        num_pages = min(len(keys) // size, len(pages))
        node, known = self._walk(keys, num_pages)
        new = list(pages[len(known) : num_pages])
        if new:
            self._pool.retain(new)
            run = list(keys[len(known) * size : num_pages * size])
            child = RadixNode(run, new, node)
            child.last_used = self._tick
            node.children[tuple(run[:size])] = child
            self._num_pages += len(new)
            self._queue(child)
            node = child
        return InsertResult(num_pages * size, len(new), node)

    def lock(self, node: RadixNode) -> None:
        """Keeps a node and everything above it from eviction until `unlock`. Locks count."""
        self._add_locks(node, 1)

    def unlock(self, node: RadixNode) -> None:
        self._add_locks(node, -1)

    def evict(self, n: int) -> int:
        """Frees up to `n` pages, least recently used leaves first; returns how many.

        A leaf loses pages from its end, so no more goes than asked. Locked nodes stay, and so do
        pages that someone else holds: dropping those would free no memory.
        """
        freed = 0
        held: list[RadixNode] = []
        while freed < n and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.children or node.parent is None:
                continue
            if used != node.last_used:
                self._queue(node)
                continue
            count = 0 if node.locks else min(self._loose_tail(node), n - freed)
            self._drop_tail(node, count)
            freed += count
            if node.parent is not None:
                held.append(node)
        for node in held:
            self._queue(node)
        return freed

    def clear(self) -> None:
        """Forgets everything that is not locked, also pages that someone else holds."""
        for node in reversed(list(self._nodes())):
            if not node.locks:
                self._drop_tail(node, len(node.pages))

    def check_invariants(self) -> None:
        """Tree, page counts, locks, order of use and eviction heap agree with each other."""
        seen: set[int] = set()
        queued = {id(node) for _, _, node in self._heap}
        assert len(queued) == len(self._heap), "a node is queued for eviction twice"
        for node in self._nodes():
            parent = node.parent
            first = tuple(node.keys[: self._page_size])
            assert parent is not None and parent.children.get(first) is node, "a child is misfiled"
            assert len(node.keys) == len(node.pages) * self._page_size > 0, "a ragged node"
            assert seen.isdisjoint(node.pages), "a page is stored twice"
            seen.update(node.pages)
            assert all(self._pool.ref_count(p) > 0 for p in node.pages), "a stored page is free"
            assert node.locks >= sum(c.locks for c in node.children.values()), "a lock is lost"
            assert parent is self._root or parent.last_used >= node.last_used, "use is not on path"
            assert node.queued == (id(node) in queued), "the queued mark is wrong"
            assert node.children or node.queued, "a leaf cannot be found by eviction"
        assert len(seen) == self._num_pages, f"{len(seen)} pages in the tree, {self._num_pages}"

    def _walk(self, keys: Keys, num_pages: int) -> tuple[RadixNode, list[int]]:
        """The deepest node along `keys`, at most `num_pages` deep, and the pages down to it.

        Marks the path as used and splits the last node where the keys part from it.
        """
        self._tick += 1
        size = self._page_size
        node = self._root
        pages: list[int] = []
        while len(pages) < num_pages:
            start = len(pages) * size
            child = node.children.get(tuple(keys[start : start + size]))
            if child is None:
                break
            common = self._common_pages(child, keys, start, num_pages - len(pages))
            if common < len(child.pages):
                child = self._split(child, common)
            child.last_used = self._tick
            pages += child.pages
            node = child
        return node, pages

    def _common_pages(self, node: RadixNode, keys: Keys, start: int, limit: int) -> int:
        size = self._page_size
        limit = min(limit, len(node.pages))
        # One comparison of the whole run settles the common case at C speed.
        if node.keys[: limit * size] == list(keys[start : start + limit * size]):
            return limit
        return next(
            i
            for i in range(limit)
            if node.keys[i * size : (i + 1) * size]
            != list(keys[start + i * size : start + (i + 1) * size])
        )

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Puts the first `num_pages` pages into a new parent, which is returned.

        `node` stays the lower part, so handles to it still name the same prefix.
        """
        size = self._page_size
        assert node.parent is not None and 0 < num_pages < len(node.pages)
        border = num_pages * size
        upper = RadixNode(node.keys[:border], node.pages[:num_pages], node.parent)
        upper.locks = node.locks
        upper.last_used = node.last_used
        node.parent.children[tuple(upper.keys[:size])] = upper
        node.keys, node.pages = node.keys[border:], node.pages[num_pages:]
        node.parent = upper
        upper.children[tuple(node.keys[:size])] = node
        return upper

    def _drop_tail(self, node: RadixNode, num_pages: int) -> None:
        """Releases a leaf's last `num_pages` pages; an empty leaf leaves the tree."""
        parent = node.parent
        if not num_pages or parent is None:
            return
        assert not node.children and not node.locks, "an inner or locked node loses pages"
        keep = len(node.pages) - num_pages
        self._pool.release(node.pages[keep:])
        self._num_pages -= num_pages
        if keep:
            del node.pages[keep:], node.keys[keep * self._page_size :]
            return
        del parent.children[tuple(node.keys[: self._page_size])]
        node.parent = None
        if not parent.children and parent.parent is not None:
            self._queue(parent)

    def _loose_tail(self, node: RadixNode) -> int:
        """How many of a node's last pages only the cache holds."""
        for i, page in enumerate(reversed(node.pages)):
            if self._pool.ref_count(page) > 1:
                return i
        return len(node.pages)

    def _add_locks(self, node: RadixNode, n: int) -> None:
        step: RadixNode | None = node
        while step is not None:
            step.locks += n
            assert step.locks >= 0, "a node is unlocked more often than locked"
            step = step.parent

    def _queue(self, node: RadixNode) -> None:
        if not node.queued:
            self._serial += 1
            node.queued = True
            heapq.heappush(self._heap, (node.last_used, self._serial, node))

    def _nodes(self) -> Iterator[RadixNode]:
        """All nodes but the root, parents before children; a long chat is too deep to recurse."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
