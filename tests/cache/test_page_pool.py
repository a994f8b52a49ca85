"""PagePool against a plain dictionary of counts, over random sequences of calls."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmserve.cache.page_pool import PagePool, PagePoolExhausted

NUM_PAGES = 8


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.counts: dict[int, int] = {}

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def allocate(self, n: int) -> None:
        free = NUM_PAGES - len(self.counts)
        if n > free:
            with pytest.raises(PagePoolExhausted) as caught:
                self.pool.allocate(n)
            error = caught.value
            assert (error.requested, error.available, error.total) == (n, free, NUM_PAGES)
            return
        pages = self.pool.allocate(n)
        lowest = sorted(set(range(NUM_PAGES)) - set(self.counts))[:n]
        assert pages == lowest
        self.counts.update(dict.fromkeys(pages, 1))

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.retain([page])
        self.counts[page] += 1

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.release([page])
        self.counts[page] -= 1
        if not self.counts[page]:
            del self.counts[page]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == NUM_PAGES - len(self.counts)
        assert [self.pool.ref_count(p) for p in range(NUM_PAGES)] == [
            self.counts.get(p, 0) for p in range(NUM_PAGES)
        ]


TestPagePool = PoolMachine.TestCase


def test_a_free_page_can_be_neither_retained_nor_released() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="free"):
        pool.retain([0])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([1])


def test_a_page_both_free_and_held_is_noticed() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool._free.append(page)
    with pytest.raises(AssertionError, match=r"disagree on pages \[0\]"):
        pool.check_invariants()
