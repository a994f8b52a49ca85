"""The scheduler with a make-believe model: pools hold names of what was computed, not numbers.

A text slot holds a hash of every key up to its token, a vision page the digest of its image. What a
step reads is compared with what should be there, so a page that is shared wrongly, given back too
early or never written is found at once. The next token is a function of the last slot read. A world
that overlaps lets a step's tokens land only when the next one is under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.vision_index import VisionIndex
from mmserve.config import SchedulerConfig
from mmserve.request import (
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    Sequence,
    SequenceStatus,
    TextSegment,
)
from mmserve.scheduler.batch import Batch
from mmserve.scheduler.scheduler import Scheduler

PAGE = 4
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


def history(seq: Sequence, pending: Iterable[int] = ()) -> list[int]:
    """What the slot of each of the sequence's tokens must hold; `pending`: what will land."""
    value, names = 0, []
    keys = list(seq.keys)
    for token in pending:
        before = () if len(keys) > len(seq.keys) else tuple(seq._before_next)
        keys.append((*before, token) if before else token)
    for key in keys:
        value = hash((value, key))
        names.append(value)
    return names


def expected_output(segments: tuple[Segment, ...], count: int) -> list[int]:
    """The tokens a request gets from an engine that has only this to do."""
    seq = Sequence(Request("", segments, SamplingParams()))
    for _ in range(count):
        seq.append(history(seq)[-1] % VOCAB)
    return seq.output_token_ids


@dataclass
class World:
    """Pool sizes in pages. `failing`: digests whose encoding fails."""

    text_pages: int = 64
    vision_pages: int = 16
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    prefix_caching: bool = True
    max_model_len: int = 4096
    failing: set[bytes] = field(default_factory=set)
    overlaps: bool = False

    def __post_init__(self) -> None:
        self.text = PagePool(self.text_pages)
        self.vision = VisionIndex(self.vision_pages, PAGE)
        self.radix = RadixCache(self.text, PAGE) if self.prefix_caching else None
        self.scheduler = Scheduler(
            self.config,
            text=self.text,
            vision=self.vision,
            radix=self.radix,
            page_size=PAGE,
            max_model_len=self.max_model_len,
        )
        self.text_kv: dict[int, int] = {}  # slot -> history
        self.vision_kv: dict[int, bytes] = {}  # page -> digest
        self.live: list[Sequence] = []
        self.done: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.encoded: list[bytes] = []
        self.flight: list[tuple[Sequence, int]] = []  # what has been chosen and not yet seen
        self.preemptions = 0
        self.steps = 0
        self._arrival = 0

    def submit(
        self, segments: tuple[Segment, ...], max_tokens: int = 3, *, prefill_only: bool = False
    ) -> Sequence:
        """Raises what admission raises."""
        self._arrival += 1
        request = Request(
            str(self._arrival),
            segments,
            SamplingParams(max_tokens=max_tokens),
            prefill_only,
            arrival=self._arrival,
        )
        seq = Sequence(request)
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
            self._encode(job.key, *job.pages)
        batch.chunks = [c for c in batch.chunks if not c.seq.finished]
        for chunk in batch.chunks:
            self._read_and_write(chunk.seq, chunk.start, chunk.start + chunk.count)
        before, self.flight = self.flight, []
        for chunk in batch.chunks:
            seq, end = chunk.seq, chunk.start + chunk.count
            self.scheduler.advance(chunk)
            if chunk.samples:
                slot = seq.tables[0][(end - 1) // PAGE] * PAGE + (end - 1) % PAGE
                seq.append_pending(len(self.flight))
                self.flight.append((seq, self.text_kv[slot] % VOCAB))
            elif self._complete(seq):
                self._end(seq)
        self.check()
        self._land(before)
        if not self.overlaps:
            self._land(self.flight)
            self.flight = []
        self.preemptions += self.scheduler.take_counts().preemptions
        self.check()
        return batch

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
            landing = bool(self.flight)
            assert self.step() or landing, "a step did nothing while there was work"
            assert self.steps < limit, "no end in sight"
        assert not self.live

    def check(self) -> None:
        self.scheduler.check_invariants()
        held: dict[bytes, int] = {}
        for seq in self.scheduler.running:
            for placed in seq.images:
                assert placed.pages is not None, "a running sequence holds a part of its images"
                held[placed.key] = held.get(placed.key, 0) + 1
        for digest, count in held.items():
            entry = self.vision.lookup(digest)
            assert entry is not None and entry.references == count
        pages = sum(self.vision.pages_for(entry.num_tokens) for entry in self._entries(held))
        assert self.vision.num_referenced == pages, "an image is held by nobody that runs"
        ranks = [(s.request.prefill_only, s.request.arrival) for s in self.scheduler.waiting]
        assert ranks == sorted(ranks), "the queue is out of order"

    def assert_idle(self) -> None:
        """Both pools are where they are when nothing runs: free, or kept for reuse."""
        cached = self.radix.num_pages if self.radix else 0
        assert self.text.num_free + cached == self.text.num_pages
        assert self.vision.num_referenced == 0
        assert self.vision.num_available == self.vision.num_pages
        if self.radix:
            assert self.radix.evictable_pages == cached
            self.radix.clear()
        assert self.text.num_free == self.text.num_pages

    def assert_right(self) -> None:
        """Every finished sequence has the output it gets alone."""
        for seq in self.done:
            count = seq.num_output_tokens
            assert count == (0 if seq.request.prefill_only else seq.request.params.max_tokens)
            assert seq.output_token_ids == expected_output(seq.request.segments, count)

    def _entries(self, digests: dict[bytes, int]) -> list[ImageInput]:
        known = {p.key: p.image for s in self.scheduler.running for p in s.images}
        return [known[digest] for digest in digests]

    def _complete(self, seq: Sequence) -> bool:
        if seq.request.prefill_only:
            return seq.num_computed_tokens == seq.num_tokens
        return seq.num_output_tokens == seq.request.params.max_tokens

    def _encode(self, digest: bytes, pages: list[int]) -> None:
        entry = self.vision.lookup(digest)
        if entry is None:
            return  # its only holder has just ended with another image that failed
        if digest in self.failing:
            self.vision.discard(digest)
            for seq in list(self.scheduler.running):
                if any(p.key == digest for p in seq.images):
                    self.scheduler.finish(seq)
                    self.live.remove(seq)
                    self.failed.append(seq)
            return
        assert entry.pages == pages
        for page in pages:
            self.vision_kv[page] = digest
        self.encoded.append(digest)
        self.vision.mark_ready(digest)

    def _check_batch(self, batch: Batch) -> None:
        config = self.config
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert batch.num_tokens + self.scheduler._budget == config.max_num_batched_tokens
        assert len(batch.images) <= config.max_images_per_step
        assert len(self.scheduler.running) <= config.max_num_seqs
        jobs = {}
        for job in batch.images:
            entry = self.vision.lookup(job.key)
            assert entry is not None and not entry.ready, "an image nobody waits for is encoded"
            assert [entry.pages] == job.pages, "an image is encoded into another's pages"
            assert job.key not in jobs, "an image is encoded twice"
            jobs[job.key] = job
        ids = [c.seq.id for c in batch.chunks]
        assert len(ids) == len(set(ids)), "a sequence has two chunks in one step"
        for chunk in batch.chunks:
            seq, end = chunk.seq, chunk.start + chunk.count
            assert seq.status is SequenceStatus.RUNNING and seq in self.scheduler.running
            assert chunk.start == seq.num_computed_tokens and chunk.count > 0
            assert end <= seq.num_tokens and end <= len(seq.tables[0]) * PAGE
            assert not seq.last_is_pending, "a token is computed that nobody may choose from"
            assert chunk.samples == (end == seq.num_tokens and not seq.request.prefill_only)
            for placed in seq.images:
                entry = self.vision.lookup(placed.key)
                assert entry is not None and placed.pages == [entry.pages]
                if placed.text_index < end:
                    there = entry.ready or placed.key in jobs
                    assert there, "text behind an image that is not there"

    def _read_and_write(self, seq: Sequence, start: int, end: int) -> None:
        names = history(seq, [token for other, token in self.flight if other is seq])
        slots = [seq.tables[0][i // PAGE] * PAGE + i % PAGE for i in range(end)]
        read = [self.text_kv.get(slot) for slot in slots[:start]]
        assert read == names[:start], "other text stands in the sequence's pages"
        for placed in seq.images:
            if placed.text_index < end:
                assert placed.pages is not None
                found = {self.vision_kv.get(page) for page in placed.pages[0]}
                assert found == {placed.key}, "another image stands in the pages"
        self.text_kv.update(zip(slots[start:], names[start:end], strict=True))
