"""RadixCache against a brute-force list of stored prefixes, over random sequences of calls."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.radix_node import RadixNode

SIZE = 2
NUM_PAGES = 24
A, B = b"a" * 32, b"b" * 32

# Few different keys, so that prefixes meet, part inside pages and at page borders.
KEY: st.SearchStrategy[Hashable] = st.sampled_from([0, 1, (A, 0), (B, 0), (A, B, 0)])
KEYS = st.lists(KEY, max_size=11)


def cache_of(*runs: list[Hashable]) -> tuple[PagePool, RadixCache]:
    """A cache that holds the runs and is the only holder of its pages."""
    pool = PagePool(NUM_PAGES)
    cache = RadixCache([pool], SIZE)
    for run in runs:
        store(pool, cache, run)
    return pool, cache


def store(pool: PagePool, cache: RadixCache, keys: list[Hashable]) -> RadixNode:
    pages = pool.allocate(len(keys) // SIZE)
    node = cache.insert(keys, [pages]).node
    pool.release(pages)
    return node


class RadixMachine(RuleBasedStateMachine):
    """`self.stored` maps each stored whole-page prefix to the page that ends it, `self.used` to
    when it was last asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.cache = RadixCache([self.pool], SIZE)
        self.stored: dict[tuple[Hashable, ...], int] = {}
        self.used: dict[tuple[Hashable, ...], int] = {}
        self.time = 0
        self.told: list[int] = []  # the pages of which the listener heard that they go
        self.cache.on_evict = self.hear
        self.locked: list[tuple[RadixNode, list[int]]] = []
        self.held: list[list[int]] = []

    def hear(self, node: RadixNode, start: int, end: int) -> None:
        self.told += reversed(node.pages[0][start:end])

    def use(self, keys: list[Hashable], num_pages: int) -> None:
        self.time += 1
        for i in range(num_pages):
            self.used[tuple(keys[: (i + 1) * SIZE])] = self.time

    @rule(keys=KEYS, keep=st.booleans())
    def insert(self, keys: list[Hashable], keep: bool) -> None:
        num_pages = len(keys) // SIZE
        if self.pool.num_free < num_pages:
            return
        pages = self.pool.allocate(num_pages)
        result = self.cache.insert(keys, [pages])
        prefixes = [tuple(keys[: (i + 1) * SIZE]) for i in range(num_pages)]
        new = [p for p in prefixes if p not in self.stored]
        assert result.num_tokens == num_pages * SIZE
        assert result.num_new_pages == len(new)
        for prefix, page in zip(prefixes, pages, strict=True):
            self.stored.setdefault(prefix, page)
        self.use(keys, num_pages)
        if keep:
            self.held.append(pages)
        else:
            self.pool.release(pages)

    @rule(keys=KEYS, limit=st.none() | st.integers(0, 12), lock=st.booleans())
    def match(self, keys: list[Hashable], limit: int | None, lock: bool) -> None:
        result = self.cache.match(keys, limit=limit)
        cap = len(keys) - 1 if limit is None else min(limit, len(keys) - 1)
        expected: list[int] = []
        while (end := (len(expected) + 1) * SIZE) <= cap and tuple(keys[:end]) in self.stored:
            expected.append(self.stored[tuple(keys[:end])])
        assert result.pages == [expected]
        assert result.num_tokens == len(expected) * SIZE
        self.use(keys, len(expected))
        if lock:
            self.cache.lock(result.node)
            self.locked.append((result.node, expected))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1))
        self.cache.unlock(self.locked.pop(index)[0])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(n=st.integers(0, 6))
    def evict(self, n: int) -> None:
        expected = min(n, self.cache.evictable(0))
        free = self.pool.num_free
        assert self.cache.evict(0, n) == expected
        assert self.pool.num_free == free + expected
        leaving: list[int] = []
        while len(leaving) < n and (ends := self.loose_ends()):
            leaving.append(self.stored.pop(min(ends, key=self.used.__getitem__)))
        assert self.told == leaving, "not the least recently used, or not as was told"
        self.told = []

    def loose_ends(self) -> list[tuple[Hashable, ...]]:
        """Of the stored prefixes: those with nothing behind them, and in nobody's hands."""
        inner = {prefix[:-SIZE] for prefix in self.stored}
        kept = {page for _, pages in self.locked for page in pages}
        kept.update(page for pages in self.held for page in pages)
        return [k for k, page in self.stored.items() if k not in inner and page not in kept]

    @rule()
    def clear(self) -> None:
        locked = {page for _, pages in self.locked for page in pages}
        self.cache.clear()
        assert self.cache.num_pages == (len(locked),)
        self.stored = {k: p for k, p in self.stored.items() if p in locked}

    def refs(self, page: int) -> int:
        return self.pool.ref_count(page)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        self.cache.check_invariants()
        assert self.cache.num_pages == (len(self.stored),)
        assert sorted(self.cache.pages(0)) == sorted(self.stored.values())
        for page in self.stored.values():
            holders = sum(page in pages for pages in self.held)
            assert self.refs(page) == 1 + holders

    @invariant()
    def locked_pages_are_never_evicted(self) -> None:
        stored = set(self.stored.values())
        for _, pages in self.locked:
            assert stored.issuperset(pages)

    def teardown(self) -> None:
        for node, _ in self.locked:
            self.cache.unlock(node)
        for pages in self.held:
            self.pool.release(pages)
        assert self.cache.evictable(0) == len(self.stored)
        assert self.cache.evict(0, NUM_PAGES) == len(self.stored)
        assert self.pool.num_free == NUM_PAGES
        assert self.cache.num_pages == (0,)


TestRadixCache = RadixMachine.TestCase
TestRadixCache.settings = settings(stateful_step_count=30, deadline=None)


def test_a_known_prompt_leaves_its_last_token_to_compute() -> None:
    _, cache = cache_of([1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4]).num_tokens == 2
    assert cache.match([1, 2, 3, 4, 5]).num_tokens == 4


def test_another_image_before_the_same_token_does_not_match() -> None:
    _, cache = cache_of([(A, 1), 2, 3, 4])
    assert cache.match([(B, 1), 2, 3, 4, 5]).num_tokens == 0
    assert cache.match([1, 2, 3, 4, 5]).num_tokens == 0
    assert cache.match([(A, 1), 2, 3, 4, 5]).num_tokens == 4


def test_adding_an_image_after_a_known_prefix_keeps_the_prefix() -> None:
    _, cache = cache_of([1, (A, 2), 3, 4])
    assert cache.match([1, (A, 2), 3, 4, (B, 5), 6]).num_tokens == 4


def test_the_least_recently_used_leaf_goes_first_and_from_its_end() -> None:
    _, cache = cache_of([1, 2, 3, 4], [5, 6, 7, 8])
    cache.match([1, 2, 3, 4, 0])
    assert cache.evict(0, 1) == 1
    assert cache.match([5, 6, 7, 8, 0]).num_tokens == 2
    assert cache.evict(0, 2) == 2
    assert cache.match([5, 6, 7, 8, 0]).num_tokens == 2
    assert cache.match([1, 2, 3, 4, 0]).num_tokens == 0


def test_a_lock_outlives_a_split_of_its_node() -> None:
    pool, cache = cache_of()
    node = store(pool, cache, [1, 2, 3, 4, 5, 6])
    cache.lock(node)
    store(pool, cache, [1, 2, 9, 9])
    assert cache.evict(0, NUM_PAGES) == 1
    assert cache.match([1, 2, 3, 4, 5, 6, 7]).num_tokens == 6
    cache.unlock(node)
    assert cache.evict(0, NUM_PAGES) == 3


def test_unlocking_twice_is_noticed() -> None:
    pool, cache = cache_of()
    node = store(pool, cache, [1, 2])
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(node)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 5))
def test_one_token_at_a_time_finds_the_same_as_all_at_once(keys: list[int], size: int) -> None:
    pool = PagePool(40)
    cache = RadixCache([pool], size)
    pages = pool.allocate(len(keys) // size)
    for end in range(len(keys) + 1):
        cache.insert(keys[:end], [pages[: end // size]])
    assert cache.match([*keys, 0]).pages == [pages]


def test_a_chat_of_thousands_of_turns_does_not_recurse() -> None:
    turns = 1500
    pool = PagePool(turns)
    cache = RadixCache([pool], 1)
    keys = list(range(turns))
    pages = pool.allocate(turns)
    for turn in range(turns):
        cache.insert(keys[: turn + 1], [pages[: turn + 1]])
        if turn % 1000 == 0:
            cache.check_invariants()
    pool.release(pages)
    assert cache.evictable(0) == turns
    assert cache.evict(0, turns) == turns


class CountedKey:
    """An integer key that counts how often any of its kind is hashed or compared."""

    uses = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        CountedKey.uses += 1
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        CountedKey.uses += 1
        return isinstance(other, CountedKey) and self.value == other.value


def test_matching_looks_at_each_key_a_constant_number_of_times() -> None:
    length, size = 1024, 16
    pool = PagePool(length)
    cache = RadixCache([pool], size)

    def run(end: int) -> list[CountedKey]:
        return [CountedKey(i) for i in range(end)] + [CountedKey(-1)] * size

    # Branches at every eighth page make many nodes on the longest path.
    for end in range(0, length + 1, 8 * size):
        cache.insert(run(end), [pool.allocate(end // size + 1)])
    keys = [*run(length), CountedKey(0)]
    CountedKey.uses = 0
    assert cache.match(keys).num_tokens == length + size
    assert CountedKey.uses <= 4 * len(keys)
