"""Who holds which pages: what sequences take from the pools of all layer groups, and give back.

Owns the sequences' page tables, their references to images and what of them is still needed. Knows
nothing of queues, budgets or steps.

A row reads, in a group with a window, only so many tokens before it, text and visual ones. So what
no row still to be computed reads goes back at once: text pages, and images that are wholly passed.
"Still to be computed" counts from the last page border of known tokens, because that is where a
next turn finds this one in the prefix cache and goes on. The images to come are held from the
start, in all groups, so two sequences never wait for each other.

The law of a window's pool, then: a sequence that computes `count` text tokens in a step has at most
pages(window - 1) + pages(count) + 1 text pages there, and of the images before its first row those
that reach into the window of that page border, each in whole pages. (A prompt whose rows all see
each other is held until it is computed.)
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence

from mmserve.cache.layer_group import LayerGroup
from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.radix_node import HOLE, Needs
from mmserve.cache.vision_index import EntryState, VisionIndex
from mmserve.placed import PlacedImage
from mmserve.scheduler.batch import PageCopy
from mmserve.scheduler.marks import settle
from mmserve.scheduler.open_pages import OpenPages
from mmserve.sequence import Sequence as Seq


class Holdings:
    """`text`, `vision`: the pools by layer group; `radix`: of the groups that have text.

    `most_rows`: text tokens that one step computes of a sequence, at most; None: any number;
    `residual`: pages of text that is not stored yet, where a group has such.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        text: Sequence[PagePool],
        vision: Sequence[VisionIndex],
        radix: RadixCache | None,
        page_size: int,
        most_rows: int | None,
        residual: PagePool | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.text = tuple(text)
        self.vision = tuple(vision)
        self.radix = radix
        self.page_size = page_size
        self.most_rows = most_rows
        self.open_pages = OpenPages(self.groups, residual, page_size)
        self.changes = 0  # how often something has come back or become findable
        self.text_groups = [g for g, group in enumerate(groups) if group.text]
        self.image_groups = [g for g, group in enumerate(groups) if group.images]
        self._windows = [(g, x.window) for g, x in enumerate(groups) if x.window is not None]
        self._text_windows = [g for g, _ in self._windows if groups[g].text]
        self.has_windows = bool(self._windows)
        # Text tokens that a sequence alone always finds pages for.
        self.sure_step = min(map(self._beside_window, self._text_windows), default=sys.maxsize)

    # -- what fits ------------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def text_limit(self, group: int) -> int | None:
        """Text tokens that one sequence may come to by a group's pool; None: any number, because
        the window moves on within it."""
        if self.most_rows is not None and self._beside_window(group) > 0:
            return None
        return self.text[group].num_pages * self.page_size

    def _beside_window(self, group: int) -> int:
        """Text tokens of a step that surely fit into a group's pool beside the window."""
        window = self.groups[group].window
        if window is None:
            return 0
        pages = self.text[group].num_pages - self.pages_for(window - 1) - 1
        return max(pages, 0) * self.page_size

    def window_pages(self, group: int) -> int | None:
        """Text pages that one sequence has at most in a group, however long it is; None: any."""
        window = self.groups[group].window
        if window is None or self.most_rows is None:
            return None
        return self.pages_for(window - 1) + self.pages_for(self.most_rows) + 1

    def longest_step(self, start: int, wanted: int) -> int:
        """Text tokens from `start`, at most `wanted`, that a sequence alone finds pages for, where
        its whole text might not fit."""
        if wanted <= self.sure_step:
            return wanted
        rooms = (
            max(self._beside_window(g), self.text[g].num_pages * self.page_size - start)
            for g in self._text_windows
        )
        return min(wanted, *rooms)

    # -- what is needed -------------------------------------------------------------------------

    def lacking(self, seq: Seq, start: int) -> list[PlacedImage]:
        """The images, in order, whose KV some row still to be computed needs and nobody has
        written yet, with text computed up to `start`.

        An image computed in its context has rows of its own, and those need what is before it.
        """
        position = start + seq.visual_before(start)
        found = []
        for placed in reversed(seq.images):
            if self._lacks(seq, placed, position):
                found.append(placed)
                if placed.in_context:
                    position = min(position, placed.start)
        found.reverse()
        return found

    def _lacks(self, seq: Seq, placed: PlacedImage, position: int) -> bool:
        return any(
            self._sees(g, seq, position, placed) and not self.vision[g].is_ready(placed.key)
            for g in self.image_groups
        )

    def _sees(self, group: int, seq: Seq, position: int, placed: PlacedImage) -> bool:
        """Whether the row at a position, or a later one, reads of an image that begins before."""
        window = self.groups[group].window
        return window is None or placed.end > position + 1 - window or _sees_all(seq, position)

    def _next_row(self, seq: Seq, start: int) -> tuple[int, int]:
        """Text and visual index of the first row to compute, with text computed up to `start`."""
        if seq.in_context and not seq.images_ready:
            lacking = [p for p in self.lacking(seq, start) if p.in_context]
            if lacking and lacking[0].text_index <= start:
                return lacking[0].text_index, lacking[0].visual_index
        return start, seq.visual_before(start)

    def window_texts(self, seq: Seq, start: int) -> list[int] | None:
        """By group with text: the first text token to be read from, with `start` of them cached.

        None where an image behind which text is cached has to be computed: a window would need
        the text before it as well as the text at the end, and all in between.
        """
        row = self._next_row(seq, start)
        if row[0] < start:
            return None
        windows = (self.groups[g].window for g in self.text_groups)
        if _sees_all(seq, sum(row)):
            return [0 for _ in windows]
        return [0 if window is None else seq.window_start(*row, window)[0] for window in windows]

    # -- taking ---------------------------------------------------------------------------------

    def take(self, seq: Seq) -> frozenset[bytes] | None:
        """Give a sequence its images and its cached prefix; the keys of images not stored yet.

        None, and nothing has changed: not now.
        """
        seq.images_ready = not seq.images
        tables, start = self._match(seq)
        wanted = self.wanted(seq, start)
        sizes = [[(p.key, p.num_stored) for p in placed] for placed in wanted]
        if not all(v.can_acquire(s) for v, s in zip(self.vision, sizes, strict=True)):
            return None
        for g in self.text_groups:
            self.text[g].retain(held_pages(tables[g]))
        if not all(self._has_room(g, seq, start) for g in self.text_groups):
            for g in self.text_groups:
                self.text[g].release(held_pages(tables[g]))
            return None
        missing: set[bytes] = set()
        for placed in seq.images:
            placed.pages = [[] for _ in self.groups]
        for g, images in enumerate(wanted):
            acquired = self.vision[g].acquire_all(sizes[g], seq.id)
            assert acquired is not None
            missing.update(acquired.missing)
            for placed in images:
                assert placed.pages is not None
                placed.pages[g] = acquired.pages[placed.key]
        seq.tables = tables
        seq.num_computed_tokens = start
        return frozenset(missing)

    def _needs(self, seq: Seq) -> Needs | None:
        return (lambda start: self.window_texts(seq, start)) if self._text_windows else None

    def reach(self, seq: Seq) -> int:
        """Text tokens that are cached of a sequence as it is laid out now; takes nothing."""
        if self.radix is None:
            return 0
        return self.radix.match(seq.keys, self._needs(seq)).num_tokens

    def _match(self, seq: Seq) -> tuple[list[list[int]], int]:
        tables: list[list[int]] = [[] for _ in self.groups]
        radix = self.radix
        needs = self._needs(seq)

        def reach(keys: Sequence[Hashable]) -> int:
            return radix.match(keys, needs).num_tokens if radix else 0

        # An answer that was interrupted goes on as it began, while what it began with is there.
        borders = [at or 0 for at in seq.marks.values()]
        if not borders or reach(seq.keys) < max(borders):
            settle(seq, reach)
        if radix is None:
            return tables, 0
        matched = radix.match(seq.keys, needs)
        for g, pages in zip(self.text_groups, matched.pages, strict=True):
            tables[g] = pages
        return tables, matched.num_tokens

    def wanted(self, seq: Seq, start: int) -> list[list[PlacedImage]]:
        """By group: the images to hold. One that is to be computed is written in every group."""
        lacking = set(map(id, self.lacking(seq, start)))
        position = sum(self._next_row(seq, start))
        wanted: list[list[PlacedImage]] = [[] for _ in self.groups]
        for g in self.image_groups:
            for placed in seq.images:
                if id(placed) in lacking or self._sees(g, seq, position, placed):
                    wanted[g].append(placed)
        return wanted

    def _has_room(self, group: int, seq: Seq, start: int) -> bool:
        """Whether pages for the prompt, or for a window's next step, can be had."""
        end = seq.num_tokens
        if self.text_limit(group) is None and self.most_rows is not None:
            end = start + self.longest_step(start, min(end - start, self.most_rows))
        missing = self.pages_for(end) - self.pages_for(start)
        free = self.text[group].num_free
        return missing <= free or missing <= free + self._evictable(group)

    def _evictable(self, group: int) -> int:
        return self.radix.evictable(self.text_groups.index(group)) if self.radix else 0

    def cached_pages(self, group: int) -> int:
        """Text pages of a group that only the prefix cache holds. Walks it."""
        return self._evictable(group) if self.groups[group].text else 0

    def grow(self, seq: Seq, tokens: int) -> tuple[PageCopy, ...] | None:
        """Pages for so many text tokens, all that are to be written its own; which of them have to
        be copied. None, and none is taken: somebody has to give way."""
        need = self.pages_for(tokens) - len(seq.tables[self.text_groups[0]])
        shared = self._shared_page(seq)
        if need <= 0 and shared is None:
            return self.open_pages.grow(seq, tokens, None)
        need = max(need, 0) + (shared is not None)
        for number, g in enumerate(self.text_groups):
            pool = self.text[g]
            while need > pool.num_free:
                if not self.radix or not self.radix.evict(number, need - pool.num_free):
                    return None
        copies = []
        for g in self.text_groups:
            pages = self.text[g].allocate(need)
            if shared is not None:
                old, new, *pages = seq.tables[g][shared], *pages
                seq.tables[g] = [*seq.tables[g][:shared], new]  # another list: it is not the same
                self.text[g].release([old])
                if not self.groups[g].residual:
                    copies.append(PageCopy(g, old, new))
            seq.tables[g].extend(pages)
        return (*copies, *self.open_pages.grow(seq, tokens, shared))

    def _shared_page(self, seq: Seq) -> int | None:
        """The number of its last page, where its next token is written and others read it. (The
        prefix cache holds whole pages, so it is none of them.)"""
        page, inside = divmod(seq.num_computed_tokens, self.page_size)
        g = self.text_groups[0]
        if not inside or self.text[g].ref_count(seq.tables[g][page]) == 1:
            return None
        assert len(seq.tables[g]) == page + 1, "a sequence that shares its end has grown"
        return page

    # -- giving back ----------------------------------------------------------------------------

    def pass_by(self, seq: Seq) -> None:
        """Give back what neither a row still to be computed reads nor one from the last page border
        of known tokens."""
        known = min(seq.num_computed_tokens, seq.num_tokens - seq.num_pending)
        row = self._next_row(seq, known - known % self.page_size)
        if _sees_all(seq, sum(row)):
            row = self._next_row(seq, known)
        for g, window in self._windows:
            table = seq.tables[g]
            end = min(seq.window_start(*row, window)[0] // self.page_size, len(table))
            first = end
            while first and table[first - 1] != HOLE:  # what is further back has gone before
                first -= 1
            if first < end:
                self.text[g].release(table[first:end])
                table[first:end] = [HOLE] * (end - first)
                self.changes += 1
            for placed in seq.images:
                if not placed.pages or not placed.pages[g] or self._sees(g, seq, sum(row), placed):
                    continue
                if not placed.in_context and any(self.writes(placed)):
                    continue  # it is still to be encoded, and then written in every group
                self.vision[g].release(placed.key)
                placed.pages[g] = []
                self.changes += 1

    def give_back(self, seq: Seq) -> None:
        """Everything. Whole pages of text stay findable until evicted."""
        self.cache_prefix(seq)
        self.drop(seq)

    def drop(self, seq: Seq) -> None:
        """Everything, and nobody is to look for it."""
        for g in self.text_groups:
            self.text[g].release(held_pages(seq.tables[g]))
        self.open_pages.drop(seq)
        for placed in seq.images:
            for g in self.image_groups:
                if placed.pages and placed.pages[g]:
                    self.vision[g].release(placed.key)
            placed.pages = None
        seq.tables = [[] for _ in self.groups]
        seq.num_computed_tokens = 0
        self.changes += 1

    def cache_prefix(self, seq: Seq) -> None:
        """Make the sequence's whole pages of known, computed tokens findable by later ones."""
        full = seq.num_computed_tokens // self.page_size
        if not self.radix or not full:
            return
        pages = [seq.tables[g][:full] for g in self.text_groups]
        self.radix.insert(seq.keys[: full * self.page_size], pages, seq.id)
        self.changes += 1

    # -- images ---------------------------------------------------------------------------------

    def writes(self, placed: PlacedImage) -> tuple[bool, ...]:
        """By group: whether a held image's KV is missing there."""
        return tuple(
            bool(pages) and not self.vision[g].is_ready(placed.key)
            for g, pages in enumerate(placed.pages or [])
        )

    def is_stored(self, key: bytes) -> bool:
        """Whether an image's KV can be read in every group that has images."""
        return all(self.vision[g].is_ready(key) for g in self.image_groups)

    def is_reserved(self, key: bytes) -> bool:
        """Whether an image has pages in every group that has images, written or not."""
        return all(self.vision[g].lookup(key) is not None for g in self.image_groups)

    def awaits(self, seq: Seq, key: bytes) -> bool:
        """Whether a sequence holds an image that is not written yet."""
        return any(p.key == key and any(self.writes(p)) for p in seq.images)

    def settle(self, key: bytes, *, written: bool) -> None:
        """An image's KV is complete wherever it was missing, or never will be."""
        for g in self.image_groups:
            entry = self.vision[g].lookup(key)
            if entry is not None and entry.state is EntryState.WRITING:
                (self.vision[g].mark_ready if written else self.vision[g].discard)(key)

    # -- checks ---------------------------------------------------------------------------------

    def check_invariants(self, running: Sequence[Seq], waiting: Sequence[Seq]) -> None:
        """Every reference in the pools is explained by a running sequence or the prefix cache."""
        for seq in running:
            assert len(seq.tables) == len(self.groups)
            covered = {len(seq.tables[g]) for g in self.text_groups}
            assert len(covered) == 1, "a sequence has pages for unlike lengths"
            assert seq.num_computed_tokens <= covered.pop() * self.page_size
        for seq in waiting:
            assert not any(seq.tables) and all(p.pages is None for p in seq.images)
        self.open_pages.check_invariants(running)
        if self.radix:
            self.radix.check_invariants()
        for g in range(len(self.groups)):
            self.text[g].check_invariants()
            self.vision[g].check_invariants()
            held: dict[int, int] = {}
            cached = g in self.text_groups and self.radix is not None
            stored = self.radix.pages(self.text_groups.index(g)) if self.radix and cached else []
            for page in [*stored, *(p for seq in running for p in held_pages(seq.tables[g]))]:
                held[page] = held.get(page, 0) + 1
            for page in range(self.text[g].num_pages):
                assert self.text[g].ref_count(page) == held.get(page, 0), page


def _sees_all(seq: Seq, position: int) -> bool:
    """Whether the row at a position is one of a prompt that sees all of itself, past windows."""
    prompt = seq.num_prompt_tokens + seq.num_image_tokens
    return seq.whole_prompt and bool(seq.images) and position < prompt


def held_pages(pages: Iterable[int]) -> list[int]:
    """Those that a window has not passed."""
    return [page for page in pages if page != HOLE]
