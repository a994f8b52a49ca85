"""Pool, prefix cache and vision index as requests use them, against the bytes in their pages.

The model is the memory itself: what was last written into each page. So whatever is evicted, handed
on and written again, a hit must find what was stored under that very key and salt, and nobody's
pages may change under them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.vision_index import VisionIndex

SIZE = 2
TEXT_PAGES, VISION_PAGES = 10, 6
TOKENS = {bytes([i]) * 32: tokens for i, tokens in enumerate([1, 3, 4, 7])}

# Few different ones, so that beginnings meet, part inside a node and come back.
SALTS = st.sampled_from([b"", b"another tenant"])
WORDS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=3, max_size=11)
IMAGES: st.SearchStrategy[list[bytes]] = st.just([]) | st.lists(
    st.sampled_from(sorted(TOKENS)), max_size=3
)

Prefix = tuple[Hashable, ...]


@dataclass
class Held:
    """What one request has in its hands."""

    keys: Prefix
    pages: list[int] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)


class Memory(RuleBasedStateMachine):
    """`text`: page -> the prefix whose KV was last written there; `vision`: page -> digest."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TEXT_PAGES)
        self.radix = RadixCache([self.pool], SIZE)
        self.index = VisionIndex(VISION_PAGES, SIZE)
        self.text: dict[int, Prefix] = {}
        self.vision: dict[int, bytes] = {}
        self.requests: list[Held] = []

    @rule(salt=SALTS, words=WORDS, images=IMAGES)
    def begin(self, salt: bytes, words: list[int], images: list[bytes]) -> None:
        """Takes all that a request needs, or nothing."""
        request = Held(((salt, *images, words[0]), *words[1:]))
        found = self.radix.match(request.keys).pages[0]
        assert [self.text[page] for page in found] == self.prefixes(request)[: len(found)]
        self.pool.retain(found)
        lacking = len(request.keys) // SIZE - len(found)
        if lacking > self.pool.num_free:
            self.radix.evict(0, lacking - self.pool.num_free)
        acquired = None
        if lacking <= self.pool.num_free:
            acquired = self.index.acquire_all([(d, TOKENS[d]) for d in images])
        if acquired is None:
            self.pool.release(found)
            return
        request.pages = [*found, *self.pool.allocate(lacking)]
        request.images = images
        for digest in acquired.missing:
            self.vision.update(dict.fromkeys(acquired.pages[digest], digest))
            self.index.mark_ready(digest)
        written = zip(request.pages, self.prefixes(request), strict=True)
        self.text.update(list(written)[len(found) :])
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), aborted=st.booleans())
    def end(self, data: st.DataObject, aborted: bool) -> None:
        """An aborted one leaves nothing to be found."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        stored = sum(self.radix.num_pages)
        if not aborted:
            self.radix.insert(request.keys, [request.pages])
        self.pool.release(request.pages)
        for digest in request.images:
            self.index.release(digest)
        assert not aborted or sum(self.radix.num_pages) == stored

    @rule(n=st.integers(1, 4))
    def evict(self, n: int) -> None:
        self.radix.evict(0, n)

    @rule()
    def forget(self) -> None:
        self.radix.clear()
        self.index.clear()

    @rule(digest=st.sampled_from(sorted(TOKENS)), pinned=st.booleans())
    def pin(self, digest: bytes, pinned: bool) -> None:
        (self.index.pin if pinned else self.index.unpin)(digest)

    def prefixes(self, request: Held) -> list[Prefix]:
        """What each of its pages has to hold, in order."""
        ends = range(SIZE, len(request.keys) + 1, SIZE)
        return [request.keys[:end] for end in ends]

    @invariant()
    def everybody_still_has_what_they_took(self) -> None:
        for request in self.requests:
            assert [self.text[page] for page in request.pages] == self.prefixes(request)
            for digest in request.images:
                entry = self.index.lookup(digest)
                assert entry is not None and entry.ready
                assert {self.vision[page] for page in entry.pages} == {digest}

    @invariant()
    def what_is_stored_is_what_its_key_says(self) -> None:
        for node in self.radix.nodes():
            above, path = node.parent, [node.keys]
            while above is not None:
                path.append(above.keys)
                above = above.parent
            keys = tuple(key for part in reversed(path) for key in part)
            for i, page in enumerate(reversed(node.pages[0])):
                assert self.text[page] == keys[: len(keys) - i * SIZE]
        for digest, entry in self.index.stored():
            assert {self.vision[page] for page in entry.pages} == {digest}

    @invariant()
    def free_and_held_are_all_and_nothing_is_owned_twice(self) -> None:
        for books in (self.pool, self.radix, self.index):
            books.check_invariants()
        owners = Counter(self.radix.pages(0))
        assert not owners or max(owners.values()) == 1, "two prefixes are stored in one page"
        owners.update(page for request in self.requests for page in request.pages)
        assert all(self.pool.ref_count(p) == owners[p] for p in range(TEXT_PAGES))
        assert self.pool.num_free + len(owners) == TEXT_PAGES
        images = Counter(digest for request in self.requests for digest in request.images)
        assert {d: e.references for d, e in self.index.entries() if e.references} == images
        stored = [page for _, entry in self.index.entries() for page in entry.pages]
        assert self.index.num_free + len(set(stored)) == VISION_PAGES

    def teardown(self) -> None:
        for request in self.requests:
            self.pool.release(request.pages)
            for digest in request.images:
                self.index.release(digest)
        assert self.index.num_available == VISION_PAGES
        self.radix.evict(0, TEXT_PAGES)
        assert self.pool.num_free == TEXT_PAGES


TestMemory = Memory.TestCase
TestMemory.settings = settings(stateful_step_count=30, deadline=None)
