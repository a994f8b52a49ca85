"""RadixCache over several layer groups: windows have holes, and a prefix is found all the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.radix_node import HOLE, Needs, RadixNode
from mmserve.cache.recency import Recency

SIZE = 2
NUM_PAGES = 20
KEYS = st.lists(st.sampled_from([0, 1, (b"image", 0)]), max_size=11)
KINDS = st.sampled_from([(False, True), (True,), (True, False, True), (False, False), (True, True)])

Prefix = tuple[Hashable, ...]


class WindowedMachine(RuleBasedStateMachine):
    """`self.stored` maps each stored whole-page prefix to its last page in every group."""

    @initialize(windowed=KINDS)
    def begin(self, windowed: tuple[bool, ...]) -> None:
        self.windowed = windowed
        self.groups = range(len(windowed))
        self.pools = [PagePool(NUM_PAGES) for _ in windowed]
        self.cache = RadixCache(self.pools, SIZE, windowed)
        self.stored: dict[Prefix, list[int]] = {}
        self.locked: list[tuple[RadixNode, Prefix]] = []
        self.held: list[list[list[int]]] = []

    @rule(keys=KEYS, keep=st.booleans(), data=st.data())
    def insert(self, keys: list[Hashable], keep: bool, data: st.DataObject) -> None:
        num_pages = len(keys) // SIZE
        if any(pool.num_free < num_pages for pool in self.pools):
            return
        own = [pool.allocate(num_pages) for pool in self.pools]
        given = [
            [HOLE if w and data.draw(st.booleans()) else page for page in pages]
            for w, pages in zip(self.windowed, own, strict=True)
        ]
        before = sum(self.cache.num_pages)
        result = self.cache.insert(keys, given)
        for i in range(num_pages):
            prefix = tuple(keys[: (i + 1) * SIZE])
            mine = self.stored.setdefault(prefix, [HOLE for _ in self.groups])
            for g in self.groups:
                mine[g] = given[g][i] if mine[g] == HOLE else mine[g]
        self.forget_empty_ends()
        assert result.num_tokens == num_pages * SIZE
        assert result.num_new_pages == sum(self.cache.num_pages) - before
        if keep:
            self.held.append(own)
        else:
            self.release_all(own)

    @rule(
        keys=KEYS,
        window=st.integers(1, 12),
        limit=st.none() | st.integers(0, 12),
        barred=st.sampled_from([99, 99, 99, 2, 5]),
        lock=st.booleans(),
    )
    def match(
        self, keys: list[Hashable], window: int, limit: int | None, barred: int, lock: bool
    ) -> None:
        """Prefixes of more than `barred` tokens are of no use."""

        def needs(count: int) -> Sequence[int] | None:
            first = max(count + 1 - window, 0)
            return None if count > barred else [first if w else 0 for w in self.windowed]

        result = self.cache.match(keys, needs, limit)
        cap = len(keys) - 1 if limit is None else min(limit, len(keys) - 1)
        known = 0
        while (known + 1) * SIZE <= cap and tuple(keys[: (known + 1) * SIZE]) in self.stored:
            known += 1
        path = [self.stored[tuple(keys[: (i + 1) * SIZE])] for i in range(known)]
        if any(self.windowed):
            while known and not self.usable(path[:known], needs(known * SIZE)):
                known -= 1
        first = needs(known * SIZE) or [0] * len(self.windowed)
        assert result.num_tokens == known * SIZE
        for g, w in enumerate(self.windowed):
            unread = min(first[g] // SIZE, known) if w else 0
            assert result.pages[g] == [HOLE] * unread + [p[g] for p in path[unread:known]]
        if lock:
            self.cache.lock(result.node)
            self.locked.append((result.node, tuple(keys[: known * SIZE])))

    def usable(self, path: list[list[int]], first: Sequence[int] | None) -> bool:
        if first is None:
            return False
        return all(page[g] != HOLE for g in self.groups for page in path[first[g] // SIZE :])

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.cache.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))[0])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_all(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(group=st.integers(0, 2), n=st.integers(0, 6))
    def evict(self, group: int, n: int) -> None:
        group %= len(self.windowed)
        expected = min(n, self.cache.evictable(group))
        free = self.pools[group].num_free
        assert self.cache.evict(group, n) == expected
        assert self.pools[group].num_free == free + expected
        others = [g for g in self.groups if g != group] if self.windowed[group] else []
        before = {g: sorted(p[g] for p in self.stored.values() if p[g] != HOLE) for g in others}
        self.forget_what_left()
        assert all(sorted(self.cache.pages(g)) == before[g] for g in others), "others lost pages"

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.forget_what_left()
        kept = {key[: i * SIZE] for _, key in self.locked for i in range(1, len(key) // SIZE + 1)}
        assert set(self.stored) == kept

    def release_all(self, pages: list[list[int]]) -> None:
        for pool, part in zip(self.pools, pages, strict=True):
            pool.release(part)

    def forget_what_left(self) -> None:
        there = [set(self.cache.pages(g)) for g in self.groups]
        for prefix, pages in list(self.stored.items()):
            self.stored[prefix] = [p if p in there[g] else HOLE for g, p in enumerate(pages)]
            lost = [g for g in self.groups if not self.windowed[g] and pages[g] not in there[g]]
            if lost:
                assert self.stored.pop(prefix) == [HOLE for _ in self.groups]
        self.forget_empty_ends()

    def forget_empty_ends(self) -> None:
        """What holds nothing, nor anything behind it, is not stored."""
        full = [key for key, pages in self.stored.items() if any(p != HOLE for p in pages)]
        kept = {key[: i * SIZE] for key in full for i in range(1, len(key) // SIZE + 1)}
        self.stored = {key: pages for key, pages in self.stored.items() if key in kept}

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        for g, pool in enumerate(self.pools):
            pool.check_invariants()
            pages = [p[g] for p in self.stored.values() if p[g] != HOLE]
            assert sorted(self.cache.pages(g)) == sorted(pages)
            assert self.cache.num_pages[g] == len(pages)
            for page in pages:
                assert pool.ref_count(page) == 1 + sum(page in own[g] for own in self.held)

    @invariant()
    def what_is_locked_stays(self) -> None:
        for _, prefix in getattr(self, "locked", []):
            assert not prefix or prefix in self.stored

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for node, _ in self.locked:
            self.cache.unlock(node)
        for own in self.held:
            self.release_all(own)
        for g in self.groups:
            assert self.cache.evictable(g) == self.cache.num_pages[g]
            self.cache.evict(g, NUM_PAGES)
        assert not any(self.cache.num_pages)
        assert not list(self.cache.nodes()), "keys stay behind without a page"


TestWindowed = WindowedMachine.TestCase
TestWindowed.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def hybrid(*runs: tuple[list[Hashable], int]) -> tuple[list[PagePool], RadixCache]:
    """Everything, and a window whose pages are there from the given one on."""
    pools = [PagePool(NUM_PAGES), PagePool(NUM_PAGES)]
    cache = RadixCache(pools, SIZE, (False, True))
    for keys, first in runs:
        pages = [pool.allocate(len(keys) // SIZE) for pool in pools]
        cache.insert(keys, [pages[0], [HOLE] * first + pages[1][first:]])
        for pool, part in zip(pools, pages, strict=True):
            pool.release(part)
    return pools, cache


def last(window: int) -> Needs:
    return lambda count: [0, max(count + 1 - window, 0)]


def test_a_prefix_is_found_only_where_the_window_before_its_end_is_there() -> None:
    _, cache = hybrid(([1, 2, 3, 4, 5, 6, 7, 8], 2))
    found = cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9], last(5))
    assert found.num_tokens == 8 and found.pages[1][:2] == [HOLE, HOLE]
    assert cache.match([1, 2, 3, 4, 5, 6, 9, 9, 9], last(3)).num_tokens == 6
    assert cache.match([1, 2, 3, 4, 5, 6, 9, 9, 9], last(5)).num_tokens == 0


def test_a_window_page_that_was_missing_is_taken_from_who_has_it() -> None:
    _, cache = hybrid(([1, 2, 3, 4, 5, 6], 2), ([1, 2, 3, 4], 1))
    assert cache.num_pages == (3, 2)
    assert cache.match([1, 2, 3, 4, 5, 6, 7], last(4)).num_tokens == 6


def test_a_short_window_pool_takes_no_page_of_the_others() -> None:
    pools, cache = hybrid(([1, 2, 3, 4, 5, 6], 0))
    assert cache.evict(1, 2) == 2 and cache.num_pages == (3, 1)
    assert cache.match([1, 2, 3, 4, 5, 6, 7], last(2)).num_tokens == 6
    assert (pools[0].num_free, pools[1].num_free) == (NUM_PAGES - 3, NUM_PAGES - 1)


def test_a_window_gives_the_least_recently_used_pages_first() -> None:
    _, cache = hybrid(([1, 2, 3, 4], 0), ([5, 6, 7, 8], 0))
    cache.match([1, 2, 3, 4, 0])
    assert cache.evict(1, 2) == 2
    assert cache.match([1, 2, 3, 4, 0]).num_tokens == 4
    assert cache.match([5, 6, 7, 8, 0], last(1)).num_tokens == 4
    assert cache.match([5, 6, 7, 8, 0], last(2)).num_tokens == 0


def test_the_end_of_a_branch_takes_its_window_pages_along() -> None:
    pools, cache = hybrid(([1, 2, 3, 4, 5, 6], 0))
    assert cache.evict(0, 1) == 1 and cache.num_pages == (2, 2)
    assert pools[1].num_free == NUM_PAGES - 2


def test_a_lone_windows_branches_go_when_they_hold_nothing() -> None:
    pool = PagePool(NUM_PAGES)
    cache = RadixCache([pool], SIZE, (True,))
    pages = pool.allocate(3)
    cache.insert([1, 2, 3, 4, 5, 6], [[HOLE, pages[1], pages[2]]])
    cache.insert([1, 2, 3, 4, 9, 9], [[HOLE, HOLE, HOLE]])
    pool.release(pages)
    assert cache.num_pages == (2,) and len(list(cache.nodes())) == 2
    assert cache.evict(0, 5) == 2 and not list(cache.nodes())


class Thing:
    def __init__(self, last_used: int) -> None:
        self.last_used = last_used


@pytest.mark.parametrize("count", [1, 5, 200])
def test_what_was_used_the_longest_ago_leaves_first_however_often_times_change(count: int) -> None:
    queue = Recency[Thing]()
    things = [Thing(n) for n in range(count)]
    for thing in things:
        queue.add(thing)
    for n, thing in enumerate(reversed(things)):
        thing.last_used = count + n
    queue.discard(things[0])
    queue.check_invariants()
    left = [queue.pop() for _ in range(count)]
    assert left == [*reversed(things[1:]), None]


@given(st.lists(st.integers(0, 9)))
def test_things_that_come_and_go_leave_nothing_behind(used: list[int]) -> None:
    queue = Recency[Thing]()
    for _ in range(30):
        things = [Thing(n) for n in used]
        for thing in things:
            queue.add(thing)
        for thing in things:
            queue.discard(thing)
    assert queue.pop() is None and not list(queue) and len(queue._heap) <= 16
