"""A radix tree from key prefixes to the text pages that hold their KV, by layer group.

Owns the tree, its locks and its order of eviction. Knows nothing of tensors, and of keys only that
they can be hashed and compared: a key identifies a text token and the images directly before it
(`Sequence.keys`), so equal prefixes mean equal KV. A namespace or salt is simply the first key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_node import (
    HOLE,
    InsertResult,
    Keys,
    MatchResult,
    Needs,
    RadixNode,
    run_starts,
)
from mmserve.cache.recency import Recency


class RadixCache:
    """Longest-prefix cache in whole pages.

    A group either sees everything, and then has a page wherever keys are stored, or it is
    `windowed` and may have holes. The cache holds one pool reference for each page it stores.
    `match` and `insert` take nothing for the caller: a caller that goes on using a node locks it
    (its whole path then stays) before it calls anything else here, and unlocks it once. Not
    thread-safe.
    """

    def __init__(
        self, pools: Sequence[PagePool], page_size: int, windowed: Sequence[bool] = ()
    ) -> None:
        """`pools`, `windowed`: by group, of those that have text."""
        self._pools = list(pools)
        self._page_size = page_size
        groups = range(len(self._pools))
        self._windows = {
            g: Recency[RadixNode]() for g in groups if g < len(windowed) and windowed[g]
        }
        self._full = [g for g in groups if g not in self._windows]
        # With a page in every window of the group: `_windows`; without children: `_leaves`.
        self._leaves = Recency[RadixNode]()
        self._root = RadixNode([], [[] for _ in groups], None)
        self._stored = [0] * len(self._pools)
        self._tick = 0
        # Told of a node before `evict` frees some of its pages [start, end); changes nothing here.
        self.on_evict: Callable[[RadixNode, int, int], None] = lambda node, start, end: None

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages stored, by group."""
        return tuple(self._stored)

    def evictable(self, group: int) -> int:
        """Pages of a group that `evict` could free now. Walks the tree: O(stored pages)."""
        if group in self._windows:
            nodes = (node for node in self.nodes() if not node.locks)
            return sum(len(self._loose(node, group)) for node in nodes)
        total = 0
        kept: set[int] = set()  # ids of the nodes below which something must stay
        for node in reversed(list(self.nodes())):
            free = 0 if id(node) in kept or node.locks else self._loose_tail(node)
            total += free
            if free < node.num_pages:
                kept.add(id(node.parent))
        return total

    def pages(self, group: int) -> list[int]:
        """Every page of a group that is stored, in no order."""
        return [page for node in self.nodes() for page in node.pages[group] if page != HOLE]

    def match(
        self, keys: Keys, needs: Needs | None = None, limit: int | None = None
    ) -> MatchResult:
        """The longest stored prefix of `keys`, in whole pages, that one can go on from.

        At most len(keys) - 1 tokens, because a sequence must compute at least one token to have
        logits; at most `limit` tokens when given. Without `needs` a window needs everything.
        O(len(keys)), and the holes times what `needs` takes.
        """
        cap = len(keys) - 1 if limit is None else min(limit, len(keys) - 1)
        node, pages = self._walk(keys, max(cap, 0) // self._page_size)
        if self._windows:
            needs = needs or (lambda _: [0] * len(self._pools))
            usable = self._usable(pages, needs)
            if usable < len(pages[0]):
                node, pages = self._walk(keys, usable)
            first = needs(usable * self._page_size) or [0] * len(self._pools)
            for group in self._windows:
                unread = min(first[group] // self._page_size, usable)
                pages[group][:unread] = [HOLE] * unread
        return MatchResult(pages, len(pages[0]) * self._page_size, node)

    def find(self, keys: Keys) -> MatchResult:
        """The longest stored prefix of `keys` in whole pages, holes and all."""
        node, pages = self._walk(keys, len(keys) // self._page_size)
        return MatchResult(pages, len(pages[0]) * self._page_size, node)

    def insert(
        self, keys: Keys, pages: Sequence[Sequence[int]], writer: str | None = None
    ) -> InsertResult:
        """Stores the whole pages of `keys`; of each group, pages[i] holds keys [i*page_size,
        (i+1)*page_size), or is a HOLE in a window.

        A trailing part of a page, or keys beyond the given pages, are not stored. Where the prefix
        is known already the tree keeps its own pages and fills its holes. The caller keeps its
        references. `writer`: noted of what is new.
        """
        size = self._page_size
        num_pages = min(len(keys) // size, *map(len, pages))
        node, known = self._walk(keys, num_pages)
        start = len(known[0])
        before = sum(self._stored)
        self._fill_holes(node, start, pages)
        new = [list(part[start:num_pages]) for part in pages]
        if any(page != HOLE for part in new for page in part):
            child = RadixNode(list(keys[start * size : num_pages * size]), new, node)
            child.last_used, child.writer = self._tick, writer
            node.children[tuple(child.keys[:size])] = child
            self._leaves.discard(node)
            self._leaves.add(child)
            for group, part in enumerate(new):
                self._take(child, group, [page for page in part if page != HOLE])
            node = child
            self._trim(child)
        return InsertResult(num_pages * size, sum(self._stored) - before, node)

    def lock(self, node: RadixNode) -> None:
        """Keeps a node and everything above it from eviction until `unlock`. Locks count."""
        self._add_locks(node, 1)

    def unlock(self, node: RadixNode) -> None:
        self._add_locks(node, -1)

    def evict(self, group: int, n: int) -> int:
        """Frees up to `n` pages of a group, least recently used first; returns how many.

        A group that sees everything loses the ends of leaves, with what windows have there. A
        window loses pages alone, the first ones of a node first: what follows a prefix needs its
        end. Locked nodes stay, and so do pages that someone else holds: dropping those would free
        no memory.
        """
        queue = self._windows.get(group, self._leaves)
        freed = 0
        rest: list[RadixNode] = []
        while freed < n and (node := queue.pop()) is not None:
            if not node.locks and group in self._windows:
                freed += self._thin(node, group, n - freed)
            elif not node.locks and (count := min(self._loose_tail(node), n - freed)):
                self.on_evict(node, node.num_pages - count, node.num_pages)
                self._drop_tail(node, count)
                freed += count
            if node.parent is not None:
                rest.append(node)
        for node in rest:
            if group not in self._windows or any(page != HOLE for page in node.pages[group]):
                queue.add(node)
        return freed

    def clear(self) -> None:
        """Forgets everything that is not locked, also pages that someone else holds."""
        for node in reversed(list(self.nodes())):
            if not node.locks:
                self._drop_tail(node, node.num_pages)

    def check_invariants(self) -> None:
        """Tree, page counts, locks, order of use and eviction queues agree with each other."""
        seen: list[set[int]] = [set() for _ in self._pools]
        for node in self.nodes():
            parent = node.parent
            first = tuple(node.keys[: self._page_size])
            assert parent is not None and parent.children.get(first) is node, "a child is misfiled"
            assert len(node.keys) == node.num_pages * self._page_size > 0, "a ragged node"
            assert node.locks >= sum(c.locks for c in node.children.values()), "a lock is lost"
            assert parent is self._root or parent.last_used >= node.last_used, "use is not on path"
            assert (node in self._leaves) == (not node.children), "leaves are not all queued"
            for group, pages in enumerate(node.pages):
                held = [page for page in pages if page != HOLE]
                assert len(pages) == node.num_pages, "a ragged node"
                assert group in self._windows or len(held) == len(pages), "a hole in no window"
                assert seen[group].isdisjoint(held), "a page is stored twice"
                seen[group].update(held)
                pool = self._pools[group]
                assert all(pool.ref_count(p) > 0 for p in held), "a stored page is free"
                if group in self._windows:
                    assert (node in self._windows[group]) == bool(held), "windows: not all queued"
            if not node.children:
                assert any(part[-1] != HOLE for part in node.pages), "a leaf that holds nothing"
        assert [len(pages) for pages in seen] == self._stored, "the counts of pages are wrong"
        for queue in (self._leaves, *self._windows.values()):
            queue.check_invariants()
            assert all(node.parent is not None for node in queue), "a dead node is queued"

    # -- the tree -------------------------------------------------------------------------------

    def _walk(self, keys: Keys, num_pages: int) -> tuple[RadixNode, list[list[int]]]:
        """The deepest node along `keys`, at most `num_pages` deep, and the pages down to it.

        Marks the path as used and splits the last node where the keys part from it.
        """
        self._tick += 1
        size = self._page_size
        node = self._root
        pages: list[list[int]] = [[] for _ in self._pools]
        while len(pages[0]) < num_pages:
            start = len(pages[0]) * size
            child = node.children.get(tuple(keys[start : start + size]))
            if child is None:
                break
            common = self._common_pages(child, keys, start, num_pages - len(pages[0]))
            if common < child.num_pages:
                child = self._split(child, common)
            child.last_used = self._tick
            for found, part in zip(pages, child.pages, strict=True):
                found += part
            node = child
        return node, pages

    def _common_pages(self, node: RadixNode, keys: Keys, start: int, limit: int) -> int:
        size = self._page_size
        limit = min(limit, node.num_pages)
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
        assert node.parent is not None and 0 < num_pages < node.num_pages
        border = num_pages * size
        heads = [part[:num_pages] for part in node.pages]
        upper = RadixNode(node.keys[:border], heads, node.parent)
        upper.locks, node.memo = node.locks, None
        upper.last_used, upper.writer = node.last_used, node.writer
        node.parent.children[tuple(upper.keys[:size])] = upper
        node.keys, node.pages = node.keys[border:], [part[num_pages:] for part in node.pages]
        node.parent = upper
        upper.children[tuple(node.keys[:size])] = node
        for group in self._windows:
            self._queue_window(upper, group)
            self._queue_window(node, group)
        return upper

    def _usable(self, pages: list[list[int]], needs: Needs) -> int:
        """Of a stored prefix, the most pages with which windows have what they need."""
        size, n = self._page_size, len(pages[0])
        starts = {group: run_starts(pages[group]) for group in self._windows}
        while n:
            first = needs(n * size)
            # A shorter prefix needs no later page, so one that ends in the same run lacks it, too.
            lacking = [s[n] for g, s in starts.items() if first and first[g] // size < s[n]]
            if first is not None and not lacking:
                return n
            n = min(lacking, default=n) - 1
        return 0

    def _drop_tail(self, node: RadixNode, num_pages: int) -> None:
        """Releases a leaf's last `num_pages` pages; an empty leaf leaves the tree."""
        parent = node.parent
        if not num_pages or parent is None:
            return
        assert not node.children and not node.locks, "an inner or locked node loses pages"
        keep = node.num_pages - num_pages
        first = tuple(node.keys[: self._page_size])
        for group, part in enumerate(node.pages):
            self._release(group, [page for page in part[keep:] if page != HOLE])
            del part[keep:]
        del node.keys[keep * self._page_size :]
        for group in self._windows:
            self._queue_window(node, group)
        if keep:
            return
        del parent.children[first]
        node.parent = None
        self._leaves.discard(node)
        if not parent.children and parent.parent is not None:
            self._leaves.add(parent)

    def _trim(self, node: RadixNode) -> None:
        """Without a group that sees everything, the end of a branch may hold nothing: it goes."""
        while not self._full and not node.children and not node.locks and node.parent is not None:
            last = max(
                (i for part in node.pages for i, p in enumerate(part) if p != HOLE), default=-1
            )
            parent = node.parent
            self._drop_tail(node, node.num_pages - 1 - last)
            node = parent if node.parent is None else self._root

    # -- pages ----------------------------------------------------------------------------------

    def _take(self, node: RadixNode, group: int, pages: list[int]) -> None:
        self._pools[group].retain(pages)
        self._stored[group] += len(pages)
        if group in self._windows:
            self._queue_window(node, group)

    def _release(self, group: int, pages: list[int]) -> None:
        self._pools[group].release(pages)
        self._stored[group] -= len(pages)

    def _fill_holes(self, node: RadixNode, end: int, pages: Sequence[Sequence[int]]) -> None:
        """Takes pages where the path down to `node`, of `end` pages, has holes."""
        while self._windows and node.parent is not None:
            start = end - node.num_pages
            for group in self._windows:
                mine = node.pages[group]
                given = enumerate(pages[group][start:end])
                new = {i: page for i, page in given if page != HOLE and mine[i] == HOLE}
                for i, page in new.items():
                    mine[i] = page
                self._take(node, group, list(new.values()))
            node, end = node.parent, start

    def _thin(self, node: RadixNode, group: int, n: int) -> int:
        """Frees up to `n` of a node's pages of a window, the first ones first."""
        places = self._loose(node, group)[:n]
        if places:
            self.on_evict(node, places[0], places[-1] + 1)
        self._release(group, [node.pages[group][i] for i in places])
        for i in places:
            node.pages[group][i] = HOLE
        self._trim(node)
        return len(places)

    def _loose(self, node: RadixNode, group: int) -> list[int]:
        """Where a node has pages of a window that only the cache holds."""
        count = self._pools[group].ref_count
        return [i for i, p in enumerate(node.pages[group]) if p != HOLE and count(p) == 1]

    def _loose_tail(self, node: RadixNode) -> int:
        """How many of a node's last pages only the cache holds, of groups that see everything."""
        tail = node.num_pages
        for group in self._full:
            count = self._pools[group].ref_count
            held = (i for i, p in enumerate(reversed(node.pages[group])) if count(p) > 1)
            tail = min(tail, next(held, tail))
        return tail

    def _queue_window(self, node: RadixNode, group: int) -> None:
        if any(page != HOLE for page in node.pages[group]):
            self._windows[group].add(node)
        else:
            self._windows[group].discard(node)

    def _add_locks(self, node: RadixNode, n: int) -> None:
        step: RadixNode | None = node
        while step is not None:
            step.locks += n
            assert step.locks >= 0, "a node is unlocked more often than locked"
            step = step.parent

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the root, parents before children; a long chat is too deep to recurse."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
