"""The scheduler: decides what one step computes, and who holds which pages meanwhile.

Owns the waiting and running queues, admission, chunked prefill, preemption and the sequences' page
references. Knows nothing of tensors, weights or sockets.

Progress: both queues are kept in order of arrival (prefills without output count as latest of all)
and only a later sequence is preempted for an earlier one, so the earliest always moves; a sequence
takes all its images' pages or none, so two can never wait for each other; and `check_admissible`
has proved that each fits alone. A prefill without output gets only what the real turns leave.

A sequence may be scheduled while its last token is pending (`Sequence.append_pending`). It may also
be preempted or finished then: its pages go to others at once, because whatever is launched later
runs later, and the prefix cache gets only tokens that are known.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.vision_index import VisionIndex
from mmserve.config import SchedulerConfig
from mmserve.errors import ContextLengthExceededError
from mmserve.request import Request, Sequence, SequenceStatus
from mmserve.scheduler.batch import Batch, Chunk, ImageJob


def _rank(seq: Sequence) -> tuple[bool, float]:
    return seq.request.prefill_only, seq.request.arrival


@dataclass
class Counts:
    """What happened since the counts were last taken."""

    preemptions: int = 0
    prefix_queries: int = 0  # text tokens
    prefix_hits: int = 0  # text tokens
    image_queries: int = 0  # images
    image_hits: int = 0  # images


class Scheduler:
    """One step's `Batch` at a time. Pages are counted in the text pool and the vision index."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        text: PagePool,
        vision: VisionIndex,
        radix: RadixCache | None,
        page_size: int,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.text = text
        self.vision = vision
        self.radix = radix
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._counts = Counts()
        self._budget = 0  # text tokens the step being scheduled may still take
        # Looking for a place costs a walk of the prefix cache, and the same sequence is refused
        # again until something has come back.
        self._changes = 0
        self._refused: tuple[str, int] | None = None  # the request and `_changes` then

    # -- admission ------------------------------------------------------------------------------

    def check_admissible(self, request: Request, num_prompt: int, num_image: int) -> None:
        """Refuse at once what can never run. Counts are text and image tokens of the prompt.

        Raises ContextLengthExceededError (context, text pool or vision pool).
        """
        asked = num_prompt + num_image
        share = f"{num_image} of them for images" if num_image else "no images"
        room = self.max_model_len - (0 if request.prefill_only else 1)
        if asked > room:
            raise ContextLengthExceededError(
                f"The prompt has {asked} tokens ({share}); the context limit is "
                f"{self.max_model_len}, and one is needed for the answer."
            )
        if num_prompt + 1 > self.text_capacity:
            raise ContextLengthExceededError(
                f"The prompt has {num_prompt} text tokens; the text KV pool holds "
                f"{self.text_capacity}."
            )
        images = {image.digest: image.num_tokens for image in request.images}
        pages = sum(-(-tokens // self.page_size) for tokens in images.values())
        if pages > self.vision.num_pages:
            raise ContextLengthExceededError(
                f"The {len(images)} images need {pages} vision pages; "
                f"the vision KV pool has {self.vision.num_pages}."
            )

    def add(self, seq: Sequence) -> None:
        """Queue by rank: a prefill without output waits behind every real turn."""
        insort(self.waiting, seq, key=_rank)

    def take_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    @property
    def text_capacity(self) -> int:
        """Text tokens the pool holds."""
        return self.text.num_pages * self.page_size

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step -------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose the next step: running sequences first, then as many waiting ones as fit."""
        batch = Batch()
        self._budget = self.config.max_num_batched_tokens
        for prefill_only in (False, True):
            self._continue(batch, prefill_only)
            self._admit_waiting(batch, prefill_only)
        return batch

    def _continue(self, batch: Batch, prefill_only: bool) -> None:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self.running:
            if seq.request.prefill_only is prefill_only:
                single = seq.num_tokens - seq.num_computed_tokens <= 1
                (decoding if single else prefilling).append(seq)
        # Decoding sequences come first, so that a long prefill cannot delay a token.
        for seq in decoding + prefilling:
            if seq.status is SequenceStatus.RUNNING:
                self._add_chunk(batch, seq)

    def _admit_waiting(self, batch: Batch, prefill_only: bool) -> None:
        while self.waiting and self._budget > 0:
            seq = self.waiting[0]
            if seq.request.prefill_only is not prefill_only or not self._seat(batch, seq):
                return
            self.waiting.remove(seq)
            seq.status = SequenceStatus.RUNNING
            insort(self.running, seq, key=_rank)
            self._add_chunk(batch, seq)

    def _seat(self, batch: Batch, seq: Sequence) -> bool:
        """Admit a sequence; a real turn may take the place of a prefill without output."""
        while len(self.running) >= self.config.max_num_seqs or not self._admit(seq):
            last = self.running[-1] if self.running else seq
            if seq.request.prefill_only or not last.request.prefill_only:
                return False
            self._preempt(batch, last)
        return True

    def _admit(self, seq: Sequence) -> bool:
        """Take the sequence's images and cached prefix; False leaves it as it was."""
        if self._refused == (seq.id, self._changes):
            return False
        wanted = [(p.key, p.image.num_tokens) for p in seq.images]
        acquired = self.vision.acquire_all(wanted)
        if acquired is None:
            self._refused = (seq.id, self._changes)
            return False
        matched = self.radix.match(seq.keys) if self.radix else None
        pages = list(matched.pages) if matched else []
        self.text.retain(pages)
        missing = self._pages_for(seq.num_tokens) - len(pages)
        if missing > self.text.num_free and missing > self.text.num_free + self._evictable():
            self.text.release(pages)
            self._release_images(seq)
            self._refused = (seq.id, self._changes)
            return False
        for placed in seq.images:
            placed.pages = [acquired.pages[placed.key]]
        seq.images_ready = not seq.images
        seq.tables = [pages]
        seq.num_computed_tokens = len(pages) * self.page_size
        if seq.status is SequenceStatus.WAITING:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.missing_images = frozenset(acquired.missing)
            self._counts.prefix_queries += seq.num_tokens
            self._counts.prefix_hits += seq.num_cached_tokens
            self._counts.image_queries += len(seq.images)
            self._counts.image_hits += len(seq.images) - len(acquired.missing)
        return True

    def _add_chunk(self, batch: Batch, seq: Sequence) -> None:
        """Schedule as much of the sequence as its images, the token budget and pages allow."""
        if seq.last_is_pending:
            return
        end = seq.num_tokens if seq.images_ready else self._add_images(batch, seq)
        start = seq.num_computed_tokens
        count = min(end - start, self._budget)
        if count <= 0 or not self._ensure_pages(batch, seq, start + count):
            return
        whole = start + count == seq.num_tokens
        batch.chunks.append(Chunk(seq, start, count, whole and not seq.request.prefill_only))
        self._budget -= count

    def _add_images(self, batch: Batch, seq: Sequence) -> int:
        """Have missing images encoded; where the text ends whose images are all there by then."""
        scheduled = {job.key for job in batch.images}
        ready = True
        for placed in seq.images:
            if self.vision.is_ready(placed.key):
                continue
            ready = False
            if placed.key in scheduled:
                continue
            if len(batch.images) >= self.config.max_images_per_step:
                return placed.text_index
            assert placed.pages is not None
            batch.images.append(ImageJob(placed.image, placed.key, placed.pages))
            scheduled.add(placed.key)
        seq.images_ready = ready
        return seq.num_tokens

    # -- pages ----------------------------------------------------------------------------------

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _evictable(self) -> int:
        return self.radix.evictable_pages if self.radix else 0

    def _ensure_pages(self, batch: Batch, seq: Sequence, tokens: int) -> bool:
        """Give the sequence pages for `tokens` text tokens, preempting later ones if need be."""
        need = self._pages_for(tokens) - len(seq.tables[0])
        while need > self.text.num_free:
            if self.radix and self.radix.evict(need - self.text.num_free):
                continue
            victim = self.running[-1]
            self._preempt(batch, victim)
            if victim is seq:
                return False
        if need > 0:
            seq.tables[0].extend(self.text.allocate(need))
        return True

    def _preempt(self, batch: Batch, seq: Sequence) -> None:
        """Back into the queue, and nothing more of it in this step.

        Its computed pages stay findable until evicted.
        """
        self._counts.preemptions += 1
        self._give_back(seq)
        seq.status = SequenceStatus.PREEMPTED
        self.running.remove(seq)
        insort(self.waiting, seq, key=_rank)
        self._budget += sum(c.count for c in batch.chunks if c.seq is seq)
        batch.chunks = [c for c in batch.chunks if c.seq is not seq]
        # An image that only this sequence held has lost its pages with the last reference.
        batch.images = [j for j in batch.images if self.vision.lookup(j.key)]

    def _give_back(self, seq: Sequence) -> None:
        self.cache_prefix(seq)
        self.text.release(seq.tables[0])
        seq.tables = [[]]
        seq.num_computed_tokens = 0
        self._release_images(seq)
        self._changes += 1

    def _release_images(self, seq: Sequence) -> None:
        for placed in seq.images:
            self.vision.release(placed.key)
            placed.pages = None

    def cache_prefix(self, seq: Sequence) -> None:
        """Make the sequence's whole pages of known, computed tokens findable by later ones."""
        full = seq.num_computed_tokens // self.page_size
        if self.radix and full:
            self.radix.insert(seq.keys[: full * self.page_size], seq.tables[0][:full])
            self._changes += 1

    # -- after a step ---------------------------------------------------------------------------

    def advance(self, chunk: Chunk) -> None:
        """Record that a chunk's KV is in the pool, for all that is launched later."""
        seq = chunk.seq
        seq.num_computed_tokens = chunk.start + chunk.count
        if chunk.samples and chunk.count > 1:  # a prefill just ended
            self.cache_prefix(seq)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out of either queue and give back everything it holds."""
        seq.drop_pending()
        if seq.status is SequenceStatus.RUNNING:
            self._give_back(seq)
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED

    def check_invariants(self) -> None:
        """Every reference in the pools is explained by a running sequence or the radix cache."""
        self.text.check_invariants()
        self.vision.check_invariants()
        held: dict[int, int] = {}
        for seq in self.running:
            assert seq.num_computed_tokens <= len(seq.tables[0]) * self.page_size
            assert seq.num_computed_tokens <= seq.num_tokens == len(seq.keys) + seq.num_pending
            for page in seq.tables[0]:
                held[page] = held.get(page, 0) + 1
        if self.radix:
            self.radix.check_invariants()
            for page in self.radix.pages():
                held[page] = held.get(page, 0) + 1
        for page in range(self.text.num_pages):
            assert self.text.ref_count(page) == held.get(page, 0), page
        for seq in self.waiting:
            assert not seq.tables[0] and all(p.pages is None for p in seq.images)
