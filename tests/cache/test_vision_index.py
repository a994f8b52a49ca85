"""VisionIndex against a plain model of images, over random sequences of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmserve.cache.page_pool import PagePoolExhausted
from mmserve.cache.vision_index import EntryState, VisionIndex

NUM_PAGES = 8
SIZE = 4
TOKENS = {bytes([i]) * 32: tokens for i, tokens in enumerate([1, 5, 9, 16])}
DIGEST = st.sampled_from(sorted(TOKENS))


def pages_of(digest: bytes) -> int:
    return -(-TOKENS[digest] // SIZE)


class IndexMachine(RuleBasedStateMachine):
    """`sequences` are the holders: each has all of its images, once per occurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.index = VisionIndex(NUM_PAGES, SIZE)
        self.sequences: list[list[bytes]] = []
        self.pinned: set[bytes] = set()
        self.idle: list[bytes] = []  # ready and unreferenced, in order of release
        self.told: list[bytes] = []  # of which the listener heard that they give way
        self.index.on_evict = self.told.append

    def references(self) -> Counter[bytes]:
        return Counter(digest for sequence in self.sequences for digest in sequence)

    def state(self, digest: bytes) -> EntryState | None:
        entry = self.index.lookup(digest)
        return entry.state if entry else None

    @rule(digests=st.lists(DIGEST, max_size=4))
    def acquire_all(self, digests: list[bytes]) -> None:
        before = {d: self.state(d) for d in TOKENS}
        stats = (self.index.stats.hits, self.index.stats.misses)
        new = [d for d in dict.fromkeys(digests) if before[d] is None]
        room = self.index.num_free + sum(pages_of(d) for d in self.idle if d not in digests)
        possible = sum(map(pages_of, new)) <= room and not any(
            before[d] is EntryState.FAILED for d in digests
        )
        result = self.index.acquire_all([(d, TOKENS[d]) for d in digests])
        assert (result is not None) == possible
        if result is None:
            assert {d: self.state(d) for d in TOKENS} == before
            assert (self.index.stats.hits, self.index.stats.misses) == stats
            return
        assert result.missing == new
        assert {d: len(p) for d, p in result.pages.items()} == {d: pages_of(d) for d in digests}
        assert self.index.stats.misses == stats[1] + len(new)
        assert self.index.stats.hits == stats[0] + len(digests) - len(new)
        self.sequences.append(digests)
        self.idle = [d for d in self.idle if d not in digests]
        self.give_way()

    def give_way(self) -> None:
        gone = {d for d in self.idle if self.state(d) is None}
        assert self.told == self.in_order()[: len(gone)], (
            "not the least recently used, pinned ones last"
        )
        assert set(self.told) == gone, "what went was not told"
        self.told.clear()
        self.idle = [d for d in self.idle if d not in gone]

    def in_order(self) -> list[bytes]:
        """Idle images, the first to go first."""
        return sorted(self.idle, key=lambda d: d in self.pinned)  # stable

    @rule(digest=DIGEST)
    def reserve(self, digest: bytes) -> None:
        if self.state(digest) is not None:
            return
        before = {d: self.state(d) for d in TOKENS}
        room = self.index.num_free + sum(map(pages_of, self.idle))
        if pages_of(digest) > room:
            with pytest.raises(PagePoolExhausted):
                self.index.reserve(digest, TOKENS[digest])
            assert {d: self.state(d) for d in TOKENS} == before and not self.told
            return
        assert len(self.index.reserve(digest, TOKENS[digest])) == pages_of(digest)
        self.sequences.append([digest])
        self.give_way()

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        """Somebody goes on with what another has."""
        self.sequences.append([data.draw(st.sampled_from(sorted(self.references())))])
        self.index.retain(self.sequences[-1][0])

    @rule(digest=DIGEST)
    def drop(self, digest: bytes) -> None:
        assert self.index.drop(digest) == (digest in self.idle)
        self.idle = [d for d in self.idle if d != digest]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.idle = [d for d in self.idle if d in self.pinned]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        self.end(data.draw(st.integers(0, len(self.sequences) - 1)))

    def end(self, index: int) -> None:
        for digest in self.sequences.pop(index):
            before = self.state(digest)
            self.index.release(digest)
            gone = not self.references()[digest] and self.left_of(digest) == 0
            if gone and before is not EntryState.READY:
                assert self.state(digest) is None
            elif gone:
                self.idle.append(digest)

    def left_of(self, digest: bytes) -> int:
        entry = self.index.lookup(digest)
        return entry.references if entry else 0

    def in_state(self, state: EntryState) -> list[bytes]:
        return [digest for digest in TOKENS if self.state(digest) is state]

    @precondition(lambda self: self.in_state(EntryState.WRITING))
    @rule(data=st.data(), failed=st.integers(0, 3).map(lambda n: n == 3))
    def finish_write(self, data: st.DataObject, failed: bool) -> None:
        digest = data.draw(st.sampled_from(self.in_state(EntryState.WRITING)))
        if failed:
            self.index.discard(digest)
        else:
            self.index.mark_ready(digest)

    @rule(digest=DIGEST)
    def acquire(self, digest: bytes) -> None:
        state = self.state(digest)
        pages = self.index.acquire(digest)
        assert (pages is None) == (state in (None, EntryState.FAILED))
        if pages is not None:
            self.sequences.append([digest])
            self.idle = [d for d in self.idle if d != digest]

    @rule(digest=DIGEST)
    def pin(self, digest: bytes) -> None:
        self._moved(digest, digest in self.pinned)
        self.index.pin(digest)
        self.pinned.add(digest)

    @rule(digest=DIGEST)
    def unpin(self, digest: bytes) -> None:
        self._moved(digest, digest not in self.pinned)
        self.index.unpin(digest)
        self.pinned.discard(digest)

    def _moved(self, digest: bytes, already: bool) -> None:
        """An idle image that is pinned or unpinned counts as used last."""
        if digest in self.idle and not already:
            self.idle.remove(digest)
            self.idle.append(digest)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.index.check_invariants()
        references = self.references()
        for digest in TOKENS:
            entry = self.index.lookup(digest)
            assert (entry.references if entry else 0) == references[digest]
        assert self.index.num_referenced == sum(map(pages_of, references))
        assert self.index.num_free + self.index.num_used == NUM_PAGES
        assert self.index.num_available - self.index.num_free == sum(map(pages_of, self.idle))
        stored = [d for d, _ in self.index.stored()]
        held = [d for d in self.in_state(EntryState.READY) if references[d]]
        assert sorted(stored[: len(held)]) == held
        assert stored[len(held) :] == self.in_order()[::-1], (
            "pinned ones first, the last used first"
        )

    def teardown(self) -> None:
        while self.sequences:
            self.end(0)
        for digest in self.pinned:
            self.index.unpin(digest)
        assert self.index.num_referenced == 0
        assert self.index.num_available == NUM_PAGES
        self.index.clear()
        assert self.index.num_free == NUM_PAGES


TestVisionIndex = IndexMachine.TestCase
TestVisionIndex.settings = settings(stateful_step_count=30, deadline=None)


def digest(i: int) -> bytes:
    return bytes([i]) * 32


def ready(index: VisionIndex, i: int, num_tokens: int) -> None:
    index.reserve(digest(i), num_tokens)
    index.mark_ready(digest(i))
    index.release(digest(i))


def test_reserving_too_much_names_the_numbers_and_evicts_nothing() -> None:
    index = VisionIndex(4, SIZE)
    ready(index, 0, 2 * SIZE)
    index.reserve(digest(1), SIZE)
    with pytest.raises(PagePoolExhausted) as caught:
        index.reserve(digest(2), 4 * SIZE)
    error = caught.value
    assert (error.requested, error.available, error.total) == (4, 3, 4)
    assert index.lookup(digest(0)) is not None


def test_the_least_recently_used_image_is_evicted_first() -> None:
    index = VisionIndex(3, SIZE)
    for i in range(3):
        ready(index, i, SIZE)
    assert index.acquire(digest(0)) is not None
    index.release(digest(0))
    index.reserve(digest(3), SIZE)
    assert index.lookup(digest(1)) is None
    assert index.lookup(digest(0)) is not None
    assert index.stats.evictions == 1


def test_what_can_be_read_is_listed_by_use() -> None:
    index = VisionIndex(5, SIZE)
    for i in range(4):
        ready(index, i, SIZE)
    index.reserve(digest(4), SIZE)  # not written yet
    index.pin(digest(1))
    assert index.acquire(digest(0)) is not None
    assert [key for key, _ in index.stored()] == [digest(i) for i in (0, 1, 3, 2)]


def test_a_pinned_image_goes_last_but_keeps_nobody_from_running() -> None:
    index = VisionIndex(3, SIZE)
    index.pin(digest(0))  # before it is stored
    for i in range(3):
        ready(index, i, SIZE)
    index.reserve(digest(3), 2 * SIZE)
    assert index.is_ready(digest(0)) and not index.is_ready(digest(1))
    index.reserve(digest(4), SIZE)
    assert not index.is_ready(digest(0)), "nothing else was left"
    index.discard(digest(4))
    index.release(digest(4))
    ready(index, 0, SIZE)
    index.clear()
    assert index.is_ready(digest(0)), "it is pinned as it was before it went"
    index.unpin(digest(0))
    index.clear()
    assert not index.is_ready(digest(0))


def test_an_image_counts_how_often_it_was_found() -> None:
    index = VisionIndex(2, SIZE)
    ready(index, 0, SIZE)
    for _ in range(3):
        assert index.acquire(digest(0)) is not None
    entry = index.lookup(digest(0))
    assert entry is not None and entry.hits == 3


def test_many_sequences_that_each_need_half_the_pool_all_finish() -> None:
    index = VisionIndex(2, SIZE)
    waiting = [[digest(2 * i), digest(2 * i + 1)] for i in range(16)]
    running: list[list[bytes]] = []
    steps = 0
    while waiting or running:
        steps += 1
        assert steps < 100, "standstill"
        while waiting and (held := index.acquire_all([(d, SIZE) for d in waiting[0]])):
            for missing in held.missing:
                index.mark_ready(missing)
            running.append(waiting.pop(0))
        for image in running.pop(0):
            index.release(image)
    assert index.num_available == 2


def test_a_failed_write_is_shared_by_its_holders_and_then_tried_anew() -> None:
    index = VisionIndex(2, SIZE)
    index.reserve(digest(0), SIZE)
    assert index.acquire(digest(0)) is not None
    index.discard(digest(0))
    assert index.acquire(digest(0)) is None
    assert index.acquire_all([(digest(0), SIZE)]) is None
    index.release(digest(0))
    index.release(digest(0))
    held = index.acquire_all([(digest(0), SIZE)])
    assert held is not None and held.missing == [digest(0)]
