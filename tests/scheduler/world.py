"""The scheduler with a make-believe model, over layer groups of any kind.

What a step reads (`Memory`) is compared with what should be there, so a page that is shared
wrongly, given back too early or never written is found at once. The next token is a function of the
last slot read. A world that overlaps lets a step's tokens land only when the next one is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmserve.cache.layer_group import LayerGroup
from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.vision_index import VisionEntry, VisionIndex
from mmserve.config import SchedulerConfig
from mmserve.request import (
    EVERYBODY,
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    Tenant,
    TextSegment,
)
from mmserve.scheduler.batch import Batch, Chunk
from mmserve.scheduler.scheduler import Scheduler
from mmserve.scheduler.turns import rank
from mmserve.sequence import Sequence, SequenceStatus
from tests.scheduler.memory import PAGE, Memory, history, layout

VOCAB = 1000
ENOUGH = 5000  # steps; any traffic of these tests is done long before


def image(number: int, num_tokens: int = 6) -> ImageInput:
    return ImageInput(number.to_bytes(32, "big"), b"", num_tokens)


def prompt(*parts: int | ImageInput, base: int = 0) -> tuple[Segment, ...]:
    """A number is so many text tokens, which differ with `base`."""
    segments: list[Segment] = []
    at = base
    for part in parts:
        if isinstance(part, ImageInput):
            segments.append(ImageSegment(part))
        else:
            segments.append(TextSegment(tuple(range(at, at + part))))
            at += part
    return tuple(segments)


FULL = LayerGroup((0,))
SELF, CROSS = LayerGroup((0,), images=False), LayerGroup((1,), text=False)


def window(size: int) -> LayerGroup:
    return LayerGroup((1,), window=size)


@dataclass
class World:
    """Pool sizes in pages, of each group that uses it. `failing`: digests whose encoding fails."""

    text_pages: int = 64
    vision_pages: int = 16
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    prefix_caching: bool = True
    max_model_len: int = 4096
    failing: set[bytes] = field(default_factory=set)
    overlaps: bool = False
    groups: tuple[LayerGroup, ...] = (FULL,)
    in_context: bool = False
    whole_prompts: bool = False
    head: int | None = None  # of an image: tokens that are computed in context

    def __post_init__(self) -> None:
        self.text = [PagePool(self.text_pages if g.text else 1) for g in self.groups]
        self.vision = [VisionIndex(self.vision_pages if g.images else 1, PAGE) for g in self.groups]
        readers = [(pool, g) for pool, g in zip(self.text, self.groups, strict=True) if g.text]
        self.radix = None
        if self.prefix_caching:
            windowed = [g.window is not None for _, g in readers]
            self.radix = RadixCache([pool for pool, _ in readers], PAGE, windowed)
        self.scheduler = Scheduler(
            self.config,
            groups=self.groups,
            text=self.text,
            vision=self.vision,
            radix=self.radix,
            page_size=PAGE,
            max_model_len=self.max_model_len,
            in_context=self.in_context,
            whole_prompts=self.whole_prompts,
            head=self.head,
        )
        self.memory = Memory(self.groups)
        self.live: list[Sequence] = []
        self.done: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.encoded: list[bytes] = []  # keys, in order, as often as it was done
        self.flight: list[tuple[Sequence, int]] = []  # what has been chosen and not yet seen
        self.preemptions = 0
        self.steps = 0
        self._arrival = 0

    def sequence(self, request: Request) -> Sequence:
        return Sequence(
            request,
            in_context=self.in_context,
            whole_prompt=self.whole_prompts,
            head=self.head,
        )

    def submit(
        self,
        segments: tuple[Segment, ...],
        max_tokens: int = 3,
        *,
        prefill_only: bool = False,
        tenant: Tenant = EVERYBODY,
    ) -> Sequence:
        """Raises what admission raises."""
        self._arrival += 1
        request = Request(
            str(self._arrival),
            segments,
            SamplingParams(max_tokens=max_tokens),
            prefill_only,
            arrival=self._arrival,
            tenant=tenant,
        )
        seq = self.sequence(request)
        self.scheduler.check_admissible(request, seq.num_prompt_tokens, seq.num_image_tokens)
        self.live.append(seq)
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.scheduler.finish(seq)
        self.check()

    def step(self) -> Batch:
        """One step of the engine, with every rule about a step checked."""
        self.steps += 1
        batch = self.scheduler.schedule()
        self.check()
        self._check_batch(batch)
        for job in batch.images:
            self._encode(job.key, job.pages)
        for context in [x for chunk in batch.chunks for x in chunk.images]:
            entries = [self.vision[g].lookup(context.placed.key) for g in self._image_groups]
            if context.placed.image.digest in self.failing and any(entries):
                self._fail(context.placed.key)
        batch.chunks = [c for c in batch.chunks if not c.seq.finished]
        chosen = self._compute(batch.chunks)
        before, self.flight = self.flight, []
        for chunk in batch.chunks:
            seq = chunk.seq
            for context in chunk.images:
                self.encoded.append(context.placed.key)
            self.scheduler.advance(chunk)
            if seq in self.scheduler.running:  # not one that has become its beams
                self._check_what_is_kept(seq)
            if chunk.samples:
                self._launch(seq, chosen[seq])
        for seq in self.scheduler.ended_prefills():
            assert seq.request.prefill_only and seq.num_computed_tokens == seq.num_tokens
            assert len(self._rows_to_come(seq, seq.num_tokens)) == 1, "it ends without an image"
            self._end(seq)
        self.check()
        self._land(before)
        if not self.overlaps:
            self._land(self.flight)
            self.flight = []
        self.preemptions += self.scheduler.take_counts().preemptions
        self.check()
        return batch

    def _launch(self, seq: Sequence, token: int) -> None:
        """A step chooses the token."""
        seq.append_pending(len(self.flight))
        self.flight.append((seq, token))

    def _land(self, flight: list[tuple[Sequence, int]]) -> None:
        for seq, token in flight:
            if not seq.finished:
                seq.settle(token)
                if self._complete(seq):
                    self._end(seq)

    def _end(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.live.remove(seq)
        self.done.append(seq)

    def run(self, limit: int = ENOUGH) -> None:
        """Step until nothing is left to do; no step may pass without work done."""
        while self.scheduler.has_work:
            landing, failed = bool(self.flight), len(self.failed)
            moved = bool(self.step()) or landing or len(self.failed) > failed
            assert moved, "a step did nothing while there was work"
            assert self.steps < limit, "no end in sight"
        assert not self.live

    def check(self) -> None:
        """The books of all pools, and that every sequence holds all that it will read."""
        self.scheduler.check_invariants()
        held: list[dict[bytes, int]] = [{} for _ in self.groups]
        for seq in self.scheduler.running:
            rows = self._rows_to_come(seq, seq.num_computed_tokens)
            tokens = [*layout(seq), seq.num_tokens]
            for g, group in enumerate(self.groups):
                reads = {id(t): t for t in (tokens[p] for p in self.memory.reads(seq, rows, group))}
                for token in reads.values():
                    if isinstance(token, int) and token < seq.num_computed_tokens:
                        self.memory.slot(seq, g, token)
                for placed in seq.images:
                    assert placed.pages is not None
                    assert placed.pages[g] or id(placed) not in reads, "a part of its images"
                    if placed.pages[g]:
                        held[g][placed.key] = held[g].get(placed.key, 0) + 1
        for index, counts in zip(self.vision, held, strict=True):
            references = {key: e.references for key, e in index._entries.items() if e.references}
            assert references == counts, "an image is held by nobody that runs"
        ranks = [rank(seq) for seq in self.scheduler.waiting]
        assert ranks == sorted(ranks), "the queue is out of order"

    def assert_idle(self) -> None:
        """All pools are where they are when nothing runs: free, or kept for reuse."""
        for number, g in enumerate(self._texts):
            cached = self.radix.num_pages[number] if self.radix else 0
            assert self.text[g].num_free + cached == self.text[g].num_pages
            assert not self.radix or self.radix.evictable(number) == cached
        for index in self.vision:
            assert index.num_referenced == 0 and index.num_available == index.num_pages
        if self.radix:
            self.radix.clear()
        for pool in self.text:
            assert pool.num_free == pool.num_pages

    def assert_right(self) -> None:
        """Every finished sequence has the output it gets alone."""
        for seq in self.done:
            count = seq.num_output_tokens
            assert count == (0 if seq.request.prefill_only else seq.request.params.max_tokens)
            assert seq.output_token_ids == self.expected_output(seq.request, count)

    def expected_output(self, request: Request, count: int) -> list[int]:
        """The tokens a request gets from an engine that has only this to do."""
        alone = Request("", request.segments, SamplingParams(), tenant=request.tenant)
        seq = self.sequence(alone)
        for _ in range(count):
            seq.append(history(seq)[-1] % VOCAB)
        return seq.output_token_ids

    @property
    def _texts(self) -> list[int]:
        return [g for g, group in enumerate(self.groups) if group.text]

    def _complete(self, seq: Sequence) -> bool:
        return seq.num_output_tokens == seq.request.params.max_tokens

    def _encode(self, key: bytes, pages: list[list[int]]) -> None:
        holdings = self.scheduler.holdings
        if not holdings.is_reserved(key):
            return  # its only holder has just ended with another image that failed
        if key in self.failing:
            self._fail(key)
            return
        self.memory.encode(pages, key)
        self.encoded.append(key)
        holdings.settle(key, written=True)

    def _fail(self, key: bytes) -> None:
        """What was made of an image cannot be had: whoever waits for it ends."""
        holdings = self.scheduler.holdings
        members = self.scheduler.beams.members
        ending = [s for s in self.live if any(holdings.awaits(m, key) for m in members(s))]
        holdings.settle(key, written=False)
        for seq in ending:
            self.scheduler.finish(seq)
            self.live.remove(seq)
            self.failed.append(seq)

    def _compute(self, chunks: list[Chunk]) -> dict[Sequence, int]:
        """In every layer all rows are written before any is read. The tokens that are chosen."""
        names = {}
        self.memory.copy([copy for chunk in chunks for copy in chunk.copies])
        for chunk in chunks:
            landing = [token for other, token in self.flight if other is chunk.seq]
            names[chunk.seq] = history(chunk.seq, landing)
            self.memory.write(chunk, names[chunk.seq])
        for chunk in chunks:
            self.memory.read(chunk, names[chunk.seq])
        self.memory.end_step()
        g = self._texts[0]
        slots = {
            c.seq: self.memory.slot(c.seq, g, c.start + c.count - 1) for c in chunks if c.samples
        }
        return {seq: self.memory.text[g][slot] % VOCAB for seq, slot in slots.items()}

    # -- the rules of a step --------------------------------------------------------------------

    def _check_batch(self, batch: Batch) -> None:
        config = self.config
        self._check_budget(batch)
        assert len(batch.images) <= config.max_images_per_step
        assert len(self.scheduler.running) <= config.max_num_seqs
        computed: set[bytes] = set()
        for job in batch.images:
            entries = [self._entry(g, job.key) for g in self._image_groups]
            assert not all(e.ready for e in entries), "an image nobody waits for is encoded"
            assert [e.pages for e in entries] == [job.pages[g] for g in self._image_groups], (
                "an image is encoded into another's pages"
            )
            assert job.key not in computed, "an image is encoded twice"
            computed.add(job.key)
        seqs = [c.seq for c in batch.chunks]
        assert len(seqs) == len(set(seqs)), "a sequence has two chunks in one step"
        for chunk in batch.chunks:
            self._check_chunk(chunk)
            self._check_windows(chunk)
            for context in chunk.images:
                assert context.placed.key not in computed, "an image is computed twice"
                computed.add(context.placed.key)

    def _check_budget(self, batch: Batch) -> None:
        limit = self.config.max_num_batched_tokens
        assert batch.num_tokens + self.scheduler._budget == limit
        if batch.num_tokens > limit:
            whole = [c for c in batch.chunks if c.num_rows > 1 or c.images]
            assert len(whole) == 1, "a step that is too large has two chunks of many rows"
            assert self.whole_prompts or (len(whole[0].images), whole[0].count) == (1, 0)

    def _check_chunk(self, chunk: Chunk) -> None:
        seq, end = chunk.seq, chunk.start + chunk.count
        assert seq.status is SequenceStatus.RUNNING and seq in self.scheduler.running
        assert chunk.start == seq.num_computed_tokens and chunk.num_rows > 0
        assert end <= seq.num_tokens and end <= len(seq.tables[self._texts[0]]) * PAGE
        assert not seq.last_is_pending, "a token is computed that nobody may choose from"
        whole = chunk.count > 0 and end == seq.num_tokens
        assert chunk.samples == (whole and not seq.request.prefill_only)
        assert not chunk.images or self.in_context
        if self.whole_prompts:
            assert end >= seq.num_prompt_tokens, "a part of a prompt is computed"
        places = [seq.images.index(c.placed) for c in chunk.images]
        assert places == sorted(set(places)), "images are out of order"
        for context in chunk.images:
            assert any(context.writes), "an image is computed for nothing"
            for g, (pages, writes) in enumerate(
                zip(context.placed.pages or [], context.writes, strict=True)
            ):
                ready = bool(pages) and self._entry(g, context.placed.key).ready
                assert writes == (bool(pages) and not ready), "an image is written in vain"

    def _check_windows(self, chunk: Chunk) -> None:
        """The law of windows: what they hold has a bound that no length enters, but that of a
        prompt whose rows see all of it."""
        if self.whole_prompts and chunk.start < chunk.seq.num_prompt_tokens:
            return
        for g, group in enumerate(self.groups):
            if group.window is not None:
                pages = sum(page >= 0 for page in chunk.seq.tables[g])
                whole = -(-(group.window - 1) // PAGE) + -(-chunk.count // PAGE)
                assert pages <= whole + 1

    def _check_what_is_kept(self, seq: Sequence) -> None:
        """No window keeps what is not read from the last page border on, to the page and image."""
        known = min(seq.num_computed_tokens, seq.num_tokens - seq.num_pending)
        start = known - known % PAGE
        if self.whole_prompts and seq.images and start < seq.num_prompt_tokens:
            start = known
        rows = self._rows_to_come(seq, start)
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            first = max(min(rows) + 1 - group.window, 0)
            texts = [t for t in layout(seq)[first:] if isinstance(t, int)]
            begin = min([*texts, start])
            held = [i for i, page in enumerate(seq.tables[g]) if page >= 0]
            assert held == list(range(begin // PAGE, len(seq.tables[g]))) or not group.text
            for placed in seq.images:
                assert placed.pages is not None
                waits = not placed.in_context and any(self.scheduler.holdings.writes(placed))
                kept = placed.end > first or waits
                assert bool(placed.pages[g]) == (group.images and kept)

    def _rows_to_come(self, seq: Sequence, start: int) -> set[int]:
        keys = {p.key for p in seq.images}
        ready = {(g, k) for g, v in enumerate(self.vision) for k in keys if v.is_ready(k)}
        return self.memory.rows_to_come(seq, start, ready)

    @property
    def _image_groups(self) -> list[int]:
        return [g for g, group in enumerate(self.groups) if group.images]

    def _entry(self, group: int, key: bytes) -> VisionEntry:
        entry = self.vision[group].lookup(key)
        assert entry is not None
        return entry
