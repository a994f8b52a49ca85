"""Between an engine's pools and the tiers below them: what goes down, and what comes up when.

Owns what is still to be copied and what requests wait for. Everything runs on the engine's thread.
Knows nothing of how pages are copied, where objects lie, or how they get there.

Down: pages that are about to be evicted, to host memory; and, where a tier outlives the process,
what a durable request has left behind, a little with each step: nothing else ever gets there. Up:
what a request could use and the pools lack. What is in host memory comes when the request is
admitted; for what lies deeper it waits, outside the queue, if that is cheaper than computing, and
not longer than computing would take; meanwhile the pools already take what has come.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from mmserve.cache.radix_node import HOLE, RadixNode
from mmserve.engine.kv_lift import Lifter
from mmserve.engine.kv_objects import KVObjects
from mmserve.engine.staging import Staging
from mmserve.kvfile.header import Kind
from mmserve.scheduler.holdings import Holdings
from mmserve.sequence import Sequence as Seq
from mmserve.tiers.cost import Costs
from mmserve.tiers.kv_object import KVObject
from mmserve.tiers.names import RUN_PAGES, image_name, run_names
from mmserve.tiers.stack import Fetch, Tier, TierStack

logger = logging.getLogger(__name__)

COPY_BYTES = 8 << 20  # written behind at once, for one search of the prefix cache: 7B's run
BUSY_BYTES = COPY_BYTES // 4  # that each step of a busy engine saves up for it
AHEAD = 64  # objects that have come since, for which the pools are gone to before all are there
LEAST_WAIT_S = 0.25  # for objects, however fast computing is
MOST_WAIT_S = 10.0  # and however slow, or where nobody knows
REST_S = 0.002  # of an engine with nothing else to do
CLOSE_S = 10.0  # for what is still to be written when all ends
MOST_LEFT = 256  # ended requests whose KV is still to be written; with more, the first ones lose


@dataclass
class Waiting:
    """A sequence that waits for objects: since when, until when, and for how much of each tier."""

    seq: Seq
    fetch: Fetch
    since: float
    until: float
    sizes: dict[str, int]
    num_lifted: int = 0  # objects that had come when the pools last took them


@dataclass
class Left:
    """What an ended request has left: of its text, the runs from `next` on are to be looked at."""

    keys: list[Hashable]
    names: list[bytes]
    images: list[bytes]  # keys
    next: int = 0


class KVTiers:
    """`clock`: seconds."""

    def __init__(
        self,
        stack: TierStack,
        holdings: Holdings,
        objects: KVObjects,
        costs: Costs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack, self.costs = stack, costs
        self._holdings, self._objects, self._clock = holdings, objects, clock
        self._seed = objects.owner.seed
        self.run_tokens = RUN_PAGES * holdings.page_size
        self.lifter = Lifter(stack, holdings, objects, costs)
        self._waiting: dict[str, Waiting] = {}
        self._left: deque[Left] = deque(maxlen=MOST_LEFT)
        self._credit = 0  # bytes that may be copied; an object may take more than there are
        self.staging: Staging | None = None  # who may compute what no tier has
        if not stack.keeps:
            return
        if holdings.radix is not None:
            holdings.radix.on_evict = self._keep_text
        for g in holdings.image_groups:
            holdings.vision[g].on_evict = self._evicted

    # -- down -----------------------------------------------------------------------------------

    def note_end(self, seq: Seq) -> None:
        """A request ends: it waits for nothing more, and what it leaves in the pools is to outlive
        the process if it is durable."""
        if waiting := self._waiting.pop(seq.id, None):
            waiting.fetch.cancel()
        self.lifter.forget(seq.id)
        if self.stack.goes_deep and seq.request.durable and seq.num_computed_tokens:
            names = run_names(self._seed, seq.keys, self.run_tokens)
            if len(self._left) == MOST_LEFT:
                self.stack.lose("queue_full")
            self._left.append(Left(seq.keys, names, [placed.key for placed in seq.images]))

    @property
    def has_work(self) -> bool:
        """Whether somebody waits, or something is still to be copied."""
        return bool(self._waiting or self._left)

    def tick(self, *, busy: bool) -> None:
        """Behind each step: copy a little of what has been left. Where nothing can be done but to
        wait for files, wait a moment."""
        saved = self._credit + (BUSY_BYTES if busy else COPY_BYTES)
        self._credit = min(saved, COPY_BYTES)
        can_copy = self._left and not self.stack.is_behind
        if self._waiting and not busy and not can_copy:
            next(iter(self._waiting.values())).fetch.wait(REST_S)
        elif self._left and not busy and not can_copy:
            self.stack.rest(REST_S)
        if self._credit == COPY_BYTES:
            self._copy_on()

    @property
    def _may_copy(self) -> bool:
        return self._credit > 0 and not self.stack.is_behind

    def _copy_on(self) -> None:
        """Copy of what has been left as much as may be now."""
        while self._left and self._may_copy:
            if self._copy(self._left[0]):
                self._left.popleft()

    def _copy(self, left: Left) -> bool:
        """Copy what is not below yet, as far as may be; whether that is all."""
        while left.images and self._may_copy:
            self._keep_image(left.images.pop(), durable=True)
        pages: list[list[int]] | None = None
        while left.next < len(left.names) and self._may_copy:
            name, start = left.names[left.next], left.next * RUN_PAGES
            if not self.stack.lies_deep(name) and not self._keep_longer(name):
                pages = pages or self._pages(left.keys)
                run = [own[start : start + RUN_PAGES] for own in pages]
                if len(run[0]) < RUN_PAGES:
                    return True  # the rest has gone
                self._put_run(name, run, durable=True)
            left.next += 1
        return left.next == len(left.names) and not left.images

    def _pages(self, keys: list[Hashable]) -> list[list[int]]:
        """By group with text: what is still there."""
        radix = self._holdings.radix
        return [[]] if radix is None else radix.find(keys).pages

    def _keep_longer(self, name: bytes) -> bool:
        """Whether an object is in host memory; it is to outlive the process now."""
        item = self.stack.get(name)
        if item is not None:
            self._hand(replace(item, durable=True))
        return item is not None

    def _hand(self, item: KVObject) -> None:
        """Down, at once."""
        if item.durable:
            self._credit -= item.num_bytes
        self.stack.put(item)

    def _put_run(self, name: bytes, pages: list[list[int]], *, durable: bool = False) -> None:
        """`pages`: of a whole run, by group with text."""
        by_group = dict(zip(self._holdings.text_groups, pages, strict=True))
        if any(page != HOLE for own in pages for page in own):
            self._put(name, "text", self.run_tokens, by_group, durable=durable)

    def _keep_text(self, node: RadixNode, start: int, end: int) -> None:
        """A node is about to lose these of its pages: keep the runs that they are of."""
        if node.memo is None:
            node.memo = self._names_of(node)
        depth, names = node.memo
        whole = (depth + node.num_pages) // RUN_PAGES  # what has lost its end was kept then
        for n in range((depth + start) // RUN_PAGES, -(-(depth + end) // RUN_PAGES)):
            if n < whole and n in names and self.stack.where(names[n]) is None:
                self._put_run(names[n], _pages_of(node, depth, n))

    def _names_of(self, node: RadixNode) -> tuple[int, dict[int, bytes]]:
        """Pages above a node, and the names of the runs that end in it, by number."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        keys = [key for step in reversed(path) for key in step.keys]
        depth = len(keys) // self._holdings.page_size - node.num_pages
        names = run_names(self._seed, keys, self.run_tokens)
        return depth, {n: names[n] for n in range(depth // RUN_PAGES, len(names))}

    def _evicted(self, key: bytes) -> None:
        self._keep_image(key)

    def _keep_image(self, key: bytes, *, durable: bool = False) -> None:
        """An image's KV is about to go, or is to outlive the process: keep it, if it is whole."""
        name = image_name(self._seed, key)
        if self.stack.lies_deep(name) if durable else self.stack.where(name) is not None:
            return
        if self._keep_longer(name):
            return
        vision = self._holdings.vision
        entries = {g: vision[g].lookup(key) for g in self._holdings.image_groups}
        there = {g: entry for g, entry in entries.items() if entry is not None and entry.ready}
        if len(there) == len(entries):
            tokens = next(iter(there.values())).num_tokens
            pages = {g: entry.pages for g, entry in there.items()}
            self._put(name, "image", tokens, pages, durable=durable)

    def _put(
        self,
        name: bytes,
        kind: Kind,
        num_tokens: int,
        pages: Mapping[int, Sequence[int]],
        *,
        durable: bool,
    ) -> None:
        """Copy pages out. Where there is no memory for that, they are lost, and no step fails."""
        try:
            item = self._objects.read(name, kind, num_tokens, pages, durable=durable)
        except RuntimeError:
            logger.warning("an object of KV found no memory", exc_info=True)
            return self.stack.lose("unwritable")
        self._hand(item)

    # -- up -------------------------------------------------------------------------------------

    def ask(self, seq: Seq) -> bool:
        """Whether a new request waits for what lies deep; it is then among the `ready` ones later,
        unless it ends before."""
        text, images = self.lifter.lacks(seq)
        sizes: dict[str, int] = {}
        for wish in (*text, *images):
            sizes[wish.tier] = sizes.get(wish.tier, 0) + wish.num_bytes
        deep = [wish for wish in (*text, *images) if wish.tier != "host"]
        tokens = sum(w.num_tokens for w in text), sum(w.num_tokens for w in images)
        if not deep or not self.costs.worth(sizes, *tokens):
            return self._send_away(seq)
        fetch = self.stack.fetch([wish.name for wish in deep])
        self.lifter.hand(seq.id, fetch)
        now, compute = self._clock(), self.costs.compute_s(*tokens)
        patience = MOST_WAIT_S if compute is None else min(max(compute, LEAST_WAIT_S), MOST_WAIT_S)
        deep_sizes = {tier: size for tier, size in sizes.items() if tier != "host"}
        self._waiting[seq.id] = Waiting(seq, fetch, now, now + patience, deep_sizes)
        return True

    def _send_away(self, seq: Seq) -> bool:
        """Whether it waits for what another process computes."""
        found = self.staging.ask(seq) if self.staging is not None else None
        if found is None:
            return False
        fetch, patience = found
        self.lifter.hand(seq.id, fetch)
        now = self._clock()
        self._waiting[seq.id] = Waiting(seq, fetch, now, now + patience, {})
        return True

    def ready(self) -> list[Seq]:
        """Those whose objects have come, or that have waited long enough."""
        now = self._clock()
        ended = [w for w in self._waiting.values() if w.fetch.finished or now >= w.until]
        for waiting in ended:
            del self._waiting[waiting.seq.id]
            if waiting.fetch.finished and len(waiting.sizes) == 1:
                ((tier, size),) = waiting.sizes.items()
                self.costs.loaded(tier, size, now - waiting.since)
            waiting.fetch.cancel()
        for waiting in self._waiting.values():
            if waiting.fetch.num_ended - waiting.num_lifted >= AHEAD:
                waiting.num_lifted = waiting.fetch.num_ended
                self.lifter.lift_ahead(waiting.seq)
        return [waiting.seq for waiting in ended]

    # -- the rest -------------------------------------------------------------------------------

    def image_tier(self, key: bytes) -> Tier | None:
        """The highest tier that has an image. Any thread may ask."""
        return self.stack.where(image_name(self._seed, key))

    def close(self) -> None:
        """Copy what has been left, and wait until it is written; not for long."""
        if self.staging is not None:
            self.staging.close()
        until = self._clock() + CLOSE_S
        while self._left and self._clock() < until:
            self._credit = COPY_BYTES
            self._copy_on()
            if self.stack.is_behind:
                self.stack.rest(REST_S)
        self.stack.close(max(until - self._clock(), 0.0))


def _pages_of(node: RadixNode, depth: int, run: int) -> list[list[int]]:
    """By group: the pages of a run that ends in a node, above which there are `depth` pages."""
    start, end = run * RUN_PAGES - depth, (run + 1) * RUN_PAGES - depth
    pages = [own[max(start, 0) : end] for own in node.pages]
    while start < 0:
        assert node.parent is not None
        node = node.parent
        start, end = start + node.num_pages, node.num_pages
        before = [own[max(start, 0) : end] for own in node.pages]
        missing = RUN_PAGES - len(pages[0])
        pages = [(a + b)[-len(b) - missing :] for a, b in zip(before, pages, strict=True)]
    return pages
