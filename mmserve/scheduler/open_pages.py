"""Which pages of the residual hold text whose own page is not full.

Owns what sequences take of that pool and give back. Where text pages are stored as a whole, a
sequence's newest tokens stand there as the model computed them: those of its last page, and during
a step of every page that the step writes. A page is *settled*, and given back, once more than it
holds is computed for sure: a draft may fill a page and turn out wrong, and then what of it was
right is still needed.

The pool has room for whatever one step can write (`most_open`), so nobody ever waits for it. Knows
nothing of queues or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.cache.layer_group import LayerGroup
from mmserve.cache.page_pool import PagePool
from mmserve.scheduler.batch import PageCopy
from mmserve.sequence import Sequence as Seq


def most_open(page_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Pages that can be open at once. Before a step each sequence has its last one, and perhaps one
    that a wrong draft has left; the rows of a step fill pages in order, so beyond these there are
    no more than they would fill together."""
    return 2 * max_num_seqs + -(-max_num_batched_tokens // page_size)


class OpenPages:
    """`pool`: of the pages, one book for all groups, which number them alike; None where no group
    has a residual."""

    def __init__(self, groups: Sequence[LayerGroup], pool: PagePool | None, page_size: int) -> None:
        self._groups = [g for g, group in enumerate(groups) if group.residual]
        self.pool, self._page_size = pool, page_size
        assert (pool is not None) == bool(self._groups)

    def grow(self, seq: Seq, tokens: int, shared: int | None) -> tuple[PageCopy, ...]:
        """Open what is to be written up to so many text tokens. `shared`: the number of the page
        that others have, too, of which the sequence gets its own: what is to be copied for it."""
        if self.pool is None:
            return ()
        copies = []
        if shared is not None:
            [new], old = self.pool.allocate(1), seq.open_pages[shared]
            copies = [PageCopy(g, old, new, residual=True) for g in self._groups]
            self.pool.release([old])
            seq.open_pages[shared] = new
        size = self._page_size
        for number in range(seq.num_computed_tokens // size, -(-tokens // size)):
            if number not in seq.open_pages:
                seq.open_pages[number] = self.pool.allocate(1)[0]
        return tuple(copies)

    def settle(self, seq: Seq) -> None:
        """Give back what is full by the tokens that are computed."""
        if seq.open_pages:
            first = seq.num_computed_tokens // self._page_size
            for number in [n for n in seq.open_pages if n < first]:
                self._release([seq.open_pages.pop(number)])

    def retain(self, seq: Seq) -> None:
        """It is another one's copy: it holds the same pages."""
        if self.pool is not None:
            self.pool.retain(seq.open_pages.values())

    def drop(self, seq: Seq) -> None:
        """Everything."""
        self._release(list(seq.open_pages.values()))
        seq.open_pages.clear()

    def _release(self, pages: list[int]) -> None:
        if self.pool is not None:
            self.pool.release(pages)

    def check_invariants(self, running: Sequence[Seq]) -> None:
        """Every page is held by those who are running, and who has begun a page has it open."""
        if self.pool is None:
            assert not any(seq.open_pages for seq in running)
            return
        self.pool.check_invariants()
        held = [page for seq in running for page in seq.open_pages.values()]
        for page in range(self.pool.num_pages):
            assert self.pool.ref_count(page) == held.count(page), page
        for seq in running:
            number, inside = divmod(seq.num_computed_tokens, self._page_size)
            assert not inside or number in seq.open_pages, "a page that was begun is not open"
