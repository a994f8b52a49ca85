"""What a request could use comes up from the tiers into the pools.

Owns what is looked for, and the way of objects into pages that the prefix cache and the vision pool
then know. Knows nothing of files, or of how long anything takes.

What comes up is cached, and nothing more: nobody holds it, and the request finds it as it finds
what was there before. So a request that never runs leaves nothing to give back.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.radix_node import HOLE, MatchResult
from mmserve.engine.kv_objects import KVObjects
from mmserve.placed import PlacedImage
from mmserve.scheduler.holdings import Holdings
from mmserve.sequence import Sequence as Seq
from mmserve.tiers.cost import Costs
from mmserve.tiers.kv_object import KVObject, Parts
from mmserve.tiers.names import RUN_PAGES, image_name, run_names
from mmserve.tiers.stack import Fetch, Tier, TierStack

logger = logging.getLogger(__name__)


class Wish(NamedTuple):
    """An object that a request could use, and where it is."""

    name: bytes
    tier: Tier
    num_bytes: int  # about
    num_tokens: int


@dataclass
class Lifted:
    """What has come up since the start."""

    text_tokens: int = 0
    image_tokens: int = 0
    images: int = 0


class Lifter:
    def __init__(
        self, stack: TierStack, holdings: Holdings, objects: KVObjects, costs: Costs
    ) -> None:
        self._stack, self._holdings, self._objects = stack, holdings, objects
        self._costs = costs
        self.seed = objects.owner.seed
        self.run_tokens = RUN_PAGES * holdings.page_size
        self._names: dict[str, tuple[list[Hashable], list[bytes]]] = {}  # by request
        self._fetched: dict[str, Fetch] = {}
        self.lifted = Lifted()

    # -- before a request is queued -------------------------------------------------------------

    def lacks(self, seq: Seq) -> tuple[list[Wish], list[Wish]]:
        """Runs of text and images that it could use, are in a tier, and not in the pools."""
        text: list[Wish] = []
        end = 0
        if self._holdings.radix is not None:
            known = self._holdings.reach(seq)
            names = self.names(seq)
            for name in names[known // self.run_tokens :]:
                tier = self._stack.where(name)
                if tier is None:
                    break
                text.append(Wish(name, tier, self.run_bytes, self.run_tokens))
            end = max(known, known // self.run_tokens * self.run_tokens + _tokens(text))
        images = []
        for placed in self._absent(seq, end):
            name = image_name(self.seed, placed.key)
            if tier := self._stack.where(name):
                images.append(Wish(name, tier, self.image_bytes(placed), placed.num_stored))
        return text, images

    def known(self, seq: Seq) -> int:
        """Its text tokens that are in the pools, or in a tier behind those."""
        text, _ = self.lacks(seq)
        reach = self._holdings.reach(seq)
        return max(reach, reach // self.run_tokens * self.run_tokens + _tokens(text))

    def unheld(self, seq: Seq, start: int) -> list[PlacedImage]:
        """Images that rows from text token `start` on need, and neither pools nor tiers have."""
        absent = self._absent(seq, start)
        return [p for p in absent if self._stack.where(image_name(self.seed, p.key)) is None]

    def hand(self, request_id: str, fetch: Fetch) -> None:
        """What comes, or has come, for a request."""
        self._fetched[request_id] = fetch

    def holds(self, request_id: str) -> bool:
        """Whether something that comes, or has come, for a request is still held for it."""
        return request_id in self._fetched

    def forget(self, request_id: str) -> None:
        self._fetched.pop(request_id, None)
        self._names.pop(request_id, None)

    def names(self, seq: Seq) -> list[bytes]:
        """Of a sequence's whole runs; kept until it is admitted."""
        keys, names = self._names.get(seq.id, (None, []))
        if keys is not seq.keys:  # else they are laid out anew
            names = run_names(self.seed, seq.keys, self.run_tokens)
            self._names[seq.id] = (seq.keys, names)
        return names

    @property
    def page_bytes(self) -> int:
        """Of text, in all layers."""
        return self.run_bytes // RUN_PAGES

    @property
    def run_bytes(self) -> int:
        """Of a run of text, in all layers."""
        every = tuple(range(RUN_PAGES))
        groups = self._holdings.text_groups
        return self._objects.owner.num_bytes(Parts("text", 0, tuple((g, every) for g in groups)))

    def image_bytes(self, placed: PlacedImage) -> int:
        every = tuple(range(self._holdings.pages_for(placed.num_stored)))
        groups = self._holdings.image_groups
        return self._objects.owner.num_bytes(Parts("image", 0, tuple((g, every) for g in groups)))

    def _absent(self, seq: Seq, start: int) -> list[PlacedImage]:
        """The images that rows from text token `start` on need, and nobody has or writes."""
        vision = [self._holdings.vision[g] for g in self._holdings.image_groups]
        found: dict[bytes, PlacedImage] = {}
        for placed in self._holdings.lacking(seq, start):
            entries = [pool.lookup(placed.key) for pool in vision]
            if all(entry is None or entry.ready for entry in entries):
                found.setdefault(placed.key, placed)
        return list(found.values())

    # -- when objects have come, or a request is admitted ---------------------------------------

    def lift_ahead(self, seq: Seq) -> None:
        """Bring up the text that is at hand while the rest is still read, so that the two take no
        longer than one, and host memory need not hold it all at once. Should others push it out
        again, it is looked for in host memory once more, or computed."""
        radix = self._holdings.radix
        # A window would take pages that nobody reads when the rest is there.
        if radix is None or self._holdings.has_windows:
            return
        try:
            if reach := self._reach(seq, radix):
                self._lift_text(seq, radix, reach)
        except RuntimeError as error:
            return logger.warning("an object of KV found no memory: %s", error)
        known = radix.find(seq.keys).num_tokens // self.run_tokens
        for name in self.names(seq)[:known]:
            self._fetched[seq.id].drop(name)

    def lift(self, seq: Seq) -> bool:
        """Bring up what is at hand of what a sequence could use, as far as there is room now; what
        there is none for is computed, and nobody waits for it."""
        try:
            self._lift(seq)
        except RuntimeError as error:  # PyTorch's, for memory: the rest is computed
            logger.warning("an object of KV found no memory: %s", error)
            self.forget(seq.id)
        return True

    def _lift(self, seq: Seq) -> None:
        radix = self._holdings.radix
        reach = self._reach(seq, radix) if radix else 0
        found_room = self._lift_images(seq, reach or self._holdings.reach(seq))
        if radix and reach:
            found_room &= self._lift_text(seq, radix, reach)
        if found_room:
            self.forget(seq.id)

    def _at_hand(self, seq: Seq, name: bytes) -> KVObject | None:
        fetch = self._fetched.get(seq.id)
        return (fetch and fetch.got(name)) or self._stack.get(name)

    def _reach(self, seq: Seq, radix: RadixCache) -> int:
        """Tokens of text, in whole pages, that it might find with what is at hand; 0 where that is
        no more than it would find anyway."""
        names, size = self.names(seq), self._holdings.page_size
        limit = (len(seq.keys) - 1) // size * size
        known = radix.find(seq.keys).num_tokens
        run = known // self.run_tokens
        while run < len(names) and self._at_hand(seq, names[run]):
            run += 1
        reach = min(max(known, run * self.run_tokens), limit)
        return reach if reach > self._holdings.reach(seq) else 0

    def _lift_text(self, seq: Seq, radix: RadixCache, reach: int) -> bool:
        """False where there was no room."""
        found = radix.find(seq.keys)
        radix.lock(found.node)
        try:
            matched, size = self._holdings.reach(seq), self._holdings.page_size
            for end in range(reach // size, matched // size, -1):
                sources = self._sources(seq, found, end)
                if sources is not None:
                    return self._place(seq, radix, found, end, sources)
            return True
        finally:
            radix.unlock(found.node)

    def _sources(
        self, seq: Seq, found: MatchResult, end: int
    ) -> dict[int, dict[int, KVObject]] | None:
        """By group with text: the pages that one who goes on from page `end` lacks, and the objects
        that have them. None: some are nowhere."""
        firsts = self._holdings.window_texts(seq, end * self._holdings.page_size)
        if firsts is None:
            return None
        names = self.names(seq)
        wanted: dict[int, dict[int, KVObject]] = {}
        items: dict[int, KVObject | None] = {}
        for number, group in enumerate(self._holdings.text_groups):
            wanted[number] = {}
            known = found.pages[number]
            for page in range(firsts[number] // self._holdings.page_size, end):
                if page < len(known) and known[page] != HOLE:
                    continue
                run, place = divmod(page, RUN_PAGES)
                if run not in items:
                    items[run] = self._at_hand(seq, names[run]) if run < len(names) else None
                item = items[run]
                if item is None or place not in dict(item.parts.pages).get(group, ()):
                    return None
                wanted[number][page] = item
        return wanted

    def _place(
        self,
        seq: Seq,
        radix: RadixCache,
        found: MatchResult,
        end: int,
        sources: dict[int, dict[int, KVObject]],
    ) -> bool:
        """Write what is wanted into new pages and make them findable. False: there is no room."""
        size, groups = self._holdings.page_size, self._holdings.text_groups
        items = {p // RUN_PAGES: item for of in sources.values() for p, item in of.items()}
        num_bytes = sum(item.num_bytes for item in items.values())
        tokens = size * max(len(of) for of in sources.values())
        if not self._costs.worth({"host": num_bytes}, tokens, 0):
            return True
        new = self._allocate(radix, [len(sources[number]) for number in range(len(groups))])
        if new is None:
            return False
        try:
            taken = [dict(zip(sources[n], pages, strict=True)) for n, pages in enumerate(new)]
            for run, item in items.items():
                places = range(run * RUN_PAGES, (run + 1) * RUN_PAGES)
                pages = {
                    g: {p % RUN_PAGES: taken[n][p] for p in places if p in taken[n]}
                    for n, g in enumerate(groups)
                }
                self._objects.write(item, pages)
            tables = [
                [taken[n].get(p, known[p] if p < len(known) else HOLE) for p in range(end)]
                for n, known in enumerate(found.pages)
            ]
            radix.insert(seq.keys[: end * size], tables, seq.id)
        finally:
            for g, own in zip(groups, new, strict=True):
                self._holdings.text[g].release(own)
        self.lifted.text_tokens += tokens
        self._stack.came_up(num_bytes)
        return True

    def _allocate(self, radix: RadixCache, counts: list[int]) -> list[list[int]] | None:
        """New pages by group with text; what is cached and not in use gives way. None: too few."""
        pools = [self._holdings.text[g] for g in self._holdings.text_groups]
        for number, (pool, count) in enumerate(zip(pools, counts, strict=True)):
            if count > pool.num_free and count > pool.num_free + radix.evictable(number):
                return None
        for number, (pool, count) in enumerate(zip(pools, counts, strict=True)):
            while count > pool.num_free:
                if not radix.evict(number, count - pool.num_free):
                    return None
        return [pool.allocate(count) for pool, count in zip(pools, counts, strict=True)]

    # -- images ---------------------------------------------------------------------------------

    def _lift_images(self, seq: Seq, start: int) -> bool:
        """Those that rows from text token `start` on need; False where there was no room."""
        absent = self._absent(seq, start)
        names = [image_name(self.seed, placed.key) for placed in absent]
        pairs = zip(absent, (self._at_hand(seq, name) for name in names), strict=True)
        at_hand = [(placed, item) for placed, item in pairs if item is not None]
        if not at_hand:
            return True
        vision, wanted = self._holdings.vision, self._holdings.wanted(seq, start)
        sizes = [{p.key: p.num_stored for p in of} for of in wanted]
        if not all(pool.can_acquire([*of.items()]) for pool, of in zip(vision, sizes, strict=True)):
            return False
        held: list[tuple[int, bytes]] = []  # nothing that it needs gives way to another
        try:
            for g in self._holdings.image_groups:
                for key in sizes[g]:
                    if vision[g].is_ready(key):
                        vision[g].acquire(key)
                        held.append((g, key))
            for placed, item in at_hand:
                self._place_image(placed, item, held)
        finally:
            for g, key in held:
                vision[g].release(key)
        return True

    def _place_image(
        self, placed: PlacedImage, item: KVObject, held: list[tuple[int, bytes]]
    ) -> None:
        vision, key = self._holdings.vision, placed.key
        absent = [g for g in self._holdings.image_groups if not vision[g].is_ready(key)]
        there = dict(item.parts.pages).keys()
        if item.parts.num_tokens != placed.num_stored or not there >= set(absent):
            return
        pages: dict[int, dict[int, int]] = {}
        for g in absent:
            pages[g] = dict(enumerate(vision[g].reserve(key, placed.num_stored)))
            held.append((g, key))  # unwritten, it is forgotten when it is released
        self._objects.write(item, pages)
        for g in absent:
            vision[g].mark_ready(key)
        self.lifted.images += 1
        self.lifted.image_tokens += placed.num_stored
        self._stack.came_up(item.num_bytes)


def _tokens(wishes: list[Wish]) -> int:
    return sum(wish.num_tokens for wish in wishes)
