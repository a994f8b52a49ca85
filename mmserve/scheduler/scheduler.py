"""The scheduler: decides what one step computes.

Owns the waiting and running queues, admission, chunked prefill and preemption; who holds which
pages meanwhile is kept in `Holdings`. Knows nothing of tensors, weights or sockets.

Progress: both queues are kept in the order in which sequences were seated (`turns.rank`; prefills
without output count as latest of all) and only a later one is preempted for an earlier one, so the
earliest always moves; a sequence takes all its images' pages in all groups or none, so two can
never wait for each other; and `check_admissible` has proved that each fits alone. A prefill without
output gets only what the real turns leave.

Who is seated, and whose prompt is computed, is fair between tenants (`Turns`). The earliest may
have to wait for the turn of its tenant, which comes, since only who gets something falls behind. A
tenant that has no seat takes another's latest, at most once a request, and never the earliest.

A sequence may be scheduled while its last token is pending (`Sequence.append_pending`). It may also
be preempted or finished then: its pages go to others at once, because whatever is launched later
runs later, and the prefix cache gets only tokens that are known.

An image computed in its context is never split, and neither is a prompt whose rows all see each
other. What does not fit into the rest of a step waits for the next one; but the first to come after
the decoding sequences, whose chunks are single rows, is taken whatever its size, so that it cannot
wait for ever. Only such a step exceeds `max_num_batched_tokens`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seqs

from mmserve.cache.layer_group import LayerGroup
from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.vision_index import VisionIndex
from mmserve.config import SchedulerConfig
from mmserve.placed import PlacedImage
from mmserve.request import Request
from mmserve.scheduler import admission, placing
from mmserve.scheduler.batch import Batch, Chunk, ContextImage, ImageJob, PageCopy
from mmserve.scheduler.beams import Beams
from mmserve.scheduler.counts import Counts
from mmserve.scheduler.holdings import Holdings
from mmserve.scheduler.pace import Pace
from mmserve.scheduler.turns import Turns, rank
from mmserve.sequence import Sequence, SequenceStatus
from mmserve.spec.draft import AnyDraft


class Scheduler:
    """One step's `Batch` at a time. Pages are counted in the text pools and the vision indexes, one
    of each by layer group.

    `in_context`, `head`: as sequences have it. `whole_prompts`: prompts' rows all see each other,
    images and text. `residual`: see `Holdings`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        groups: Seqs[LayerGroup],
        text: Seqs[PagePool],
        vision: Seqs[VisionIndex],
        radix: RadixCache | None,
        page_size: int,
        max_model_len: int,
        in_context: bool = False,
        head: int | None = None,
        whole_prompts: bool = False,
        residual: PagePool | None = None,
    ) -> None:
        self.config = config
        self.radix = radix
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.in_context, self.head = in_context, head
        self.whole_prompts = whole_prompts
        self.holdings = Holdings(
            groups,
            text=text,
            vision=vision,
            radix=radix,
            page_size=page_size,
            most_rows=None if whole_prompts else config.max_num_batched_tokens,
            residual=residual,
        )
        self.text, self.vision = self.holdings.text, self.holdings.vision
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.beams, self.turns = Beams(self.holdings, self.running), Turns()
        self._counts, self.pace = Counts(), Pace.of(config)
        self._image_rows = 0  # that an image to be encoded counts as, of the budget
        self._budget = 0  # tokens the step being scheduled may still take
        self._drafts: Mapping[str, AnyDraft] = {}  # of that step
        # Looking for a place walks the prefix cache, and fails again until something has come back.
        self._refused: tuple[str, int] | None = None  # the request and `Holdings.changes` then
        # Brings what a sequence could find to the pools before it is looked for; False: not now.
        self.lift: Callable[[Sequence], bool] = lambda seq: True

    # -- admission ------------------------------------------------------------------------------

    def check_admissible(self, request: Request, num_prompt: int, num_image: int) -> None:
        """Refuse at once what can never run. Counts are text and image tokens of the prompt.

        Raises ContextLengthExceededError (context, or a text or vision pool), or RequestError for
        a way of streaming, or of forgetting, that cannot be.
        """
        admission.check_streaming(request, whole_prompts=self.whole_prompts)
        marked = admission.check_marked(request, in_context=self.in_context)
        admission.check_context(request, num_prompt, num_image + marked, self.max_model_len)
        admission.check_text(self.holdings, num_prompt)
        admission.check_beams(self.holdings, request, num_prompt, self.config.max_num_seqs)
        admission.check_images(self.holdings, request, in_context=self.in_context, head=self.head)

    def add(self, seq: Sequence) -> None:
        """Queue by rank: a prefill without output waits behind every real turn."""
        self.beams.add(seq)
        self.turns.enter(seq, self.waiting, self.running)
        insort(self.waiting, seq, key=rank)

    def cut(self, seq: Sequence) -> int:
        """Lay out what stays of a sequence that has outgrown its window; text tokens dropped.

        It takes what it needs in the same moment, so that nobody can take its images meanwhile;
        where there is no room, it waits like one that was preempted.
        """
        runs = seq.status is SequenceStatus.RUNNING
        if runs:
            self.holdings.give_back(seq)
        dropped = seq.cut()
        self.holdings.changes += 1
        if runs and self.holdings.take(seq) is None:
            seq.status = SequenceStatus.PREEMPTED
            self.running.remove(seq)
            insort(self.waiting, seq, key=rank)
        return dropped

    def take_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    @property
    def text_capacity(self) -> int:
        """Text tokens, prompt and output, that a sequence may come to by the pools."""
        limits = filter(None, map(self.holdings.text_limit, self.holdings.text_groups))
        return min(limits, default=self.max_model_len)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step -------------------------------------------------------------------------------

    def schedule(self, drafts: Mapping[str, AnyDraft] | None = None) -> Batch:
        """Choose the next step: running sequences first, then as many waiting ones as fit.
        `drafts`, by request, no longer than `draft_room`: each is checked if there is room."""
        batch = Batch()
        self._drafts, self._budget = drafts or {}, self.config.max_num_batched_tokens
        if self.pace is not None:
            self._budget, self._image_rows = self.pace.plan(self.running, self.waiting)
        for seq in list(filter(self._outgrows, self.running)):
            if seq.status is SequenceStatus.RUNNING:  # beams leave together
                self._requeue(batch, seq)
        for prefill_only in (False, True):
            self._continue(batch, prefill_only)
            self._admit_waiting(batch, prefill_only)
        self.turns.chosen(batch, self.waiting)
        return batch

    def _continue(self, batch: Batch, prefill_only: bool) -> None:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self.running:
            if seq.request.prefill_only is prefill_only:
                left = len(seq.token_ids) - seq.num_computed_tokens
                single = left <= 1 and not self._lacking(seq)
                (decoding if single else prefilling).append(seq)
        # Decoding sequences come first, so that a long prefill cannot delay a token. What waits for
        # images does not, or later ones would take the turns at the tower from earlier ones.
        for seq in decoding:
            if seq.status is SequenceStatus.RUNNING:
                self._add_chunk(batch, seq)
        for seq in self.turns.fairly(prefilling):
            self._admit_waiting(batch, prefill_only, ahead_of=seq)
            if seq.status is SequenceStatus.RUNNING:
                self._add_chunk(batch, seq)

    def _admit_waiting(
        self, batch: Batch, prefill_only: bool, ahead_of: Sequence | None = None
    ) -> None:
        """`ahead_of`: only those of tenants that got less than its own."""
        while self.waiting and self._budget > 0:
            seq = self.turns.first(self.waiting)
            if ahead_of is not None and not self.turns.before(seq, ahead_of):
                return
            if seq.request.prefill_only is not prefill_only or not self._seat(batch, seq):
                return
            self.waiting.remove(seq)
            seq.status = SequenceStatus.RUNNING
            self.turns.seat(seq)
            insort(self.running, seq, key=rank)
            self._add_chunk(batch, seq)

    def _seat(self, batch: Batch, seq: Sequence) -> bool:
        """Admit a sequence; a real turn may take the place of a prefill without output."""
        limit = self.config.max_num_seqs
        if self.pace is not None and self.running:
            limit = self.pace.seats
        while self.beams.seats(seq) > limit or not self._admit(seq):
            last = self.running[-1] if self.running else seq
            if seq.request.prefill_only or not last.request.prefill_only:
                return self.beams.seats(seq) > limit and self._take_over(batch, seq)
            self._preempt(batch, last)
        return True

    def _take_over(self, batch: Batch, seq: Sequence) -> bool:
        """Seat a request of a tenant that has no seat, where nothing else is in its way."""
        kept = self.beams.members(self.running[0])
        other = self.turns.gives_way(seq, self.running, kept)
        if other is None or seq.request.prefill_only or seq.status is not SequenceStatus.WAITING:
            return False
        seats = self.beams.seats(seq) - len(self.beams.members(other))
        if seats > self.config.max_num_seqs or not self._admit(seq):
            return False
        self._preempt(batch, other)
        return True

    def _admit(self, seq: Sequence) -> bool:
        """Take the sequence's images and cached prefix; False leaves it as it was."""
        if self._refused == (seq.id, self.holdings.changes):
            return False
        if self._outgrows(seq):
            seq.enter(self._due(seq))
        missing = self.holdings.take(seq) if self.lift(seq) else None
        if missing is None:
            self._refused = (seq.id, self.holdings.changes)
            return False
        if seq.status is SequenceStatus.WAITING:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.missing_images = missing
            alone = {p.key: p.image.num_tokens for p in seq.images if not p.in_context}
            self.turns.spend(seq, sum(alone[key] for key in missing & alone.keys()))
            self._counts.prefix_queries += seq.num_tokens
            self._counts.prefix_hits += seq.num_cached_tokens
            self._counts.image_queries += len(seq.images_found)
            self._counts.image_hits += sum(seq.images_found)
        return True

    def _add_chunk(self, batch: Batch, seq: Sequence) -> None:
        """Schedule as much of the sequence as its images, the token budget and pages allow."""
        if seq.last_is_pending:
            return
        start = seq.num_computed_tokens
        images: list[ContextImage] = []
        lacking = self._lacking(seq)
        if self.whole_prompts and start < seq.num_prompt_tokens:
            end, images = placing.whole_prompt(self.holdings, batch, seq, lacking, self._budget)
        else:
            end = min(len(seq.token_ids), start + self._budget)
            if end - start > self.holdings.sure_step:
                end = start + self.holdings.longest_step(start, end - start)
            if lacking:
                lacking = self._encode(batch, seq, lacking)
                books = self.holdings, batch
                end, images = placing.in_context(*books, seq, lacking, end, self._budget)
        copies = None
        if end > start or images:
            copies = self._ensure_pages(batch, seq, end)
        if copies is None:
            return
        whole = start < end == len(seq.token_ids)
        samples = whole and not seq.request.prefill_only
        draft = self._drafts.get(seq.id) if samples and not images else None
        rows = end + (len(draft) if draft else 0)
        if draft and (len(draft) >= self._budget or self.holdings.grow(seq, rows) is None):
            draft = None  # nobody has to give way for it
        chunk = Chunk(seq, start, end - start, samples, tuple(images), copies, draft)
        batch.chunks.append(chunk)
        self._budget -= chunk.num_rows

    def _lacking(self, seq: Sequence) -> list[PlacedImage]:
        """The images that a sequence waits for; once there are none, none until it is preempted."""
        if seq.images_ready:
            return []
        lacking = self.holdings.lacking(seq, seq.num_computed_tokens)
        seq.images_ready = not lacking
        return lacking

    def _encode(self, batch: Batch, seq: Sequence, lacking: list[PlacedImage]) -> list[PlacedImage]:
        """Have images encoded that need no context; what is then left of the lacking ones."""
        scheduled = {job.key for job in batch.images}
        left = []
        for placed in lacking:
            if placed.in_context:
                left.append(placed)
            elif placed.key not in scheduled:
                first = batch.only_decodes and not batch.images  # is taken whatever it takes
                full = len(batch.images) >= self.config.max_images_per_step
                if full or (self._budget < self._image_rows and not first):
                    return [*left, placed]
                assert placed.pages is not None
                regime, pages = seq.course.regime, list(placed.pages)
                batch.images.append(ImageJob(seq, placed.image, placed.key, pages, regime))
                scheduled.add(placed.key)
                self._budget -= self._image_rows
        return left

    # -- pages ----------------------------------------------------------------------------------

    def _ensure_pages(
        self, batch: Batch, seq: Sequence, tokens: int
    ) -> tuple[PageCopy, ...] | None:
        """Give the sequence pages for `tokens` text tokens, preempting later ones if need be."""
        while (copies := self.holdings.grow(seq, tokens)) is None:
            self._preempt(batch, self.running[-1])
            if seq.status is not SequenceStatus.RUNNING:
                return None
        return copies

    def _preempt(self, batch: Batch, seq: Sequence) -> None:
        self._counts.preemptions += 1
        self._requeue(batch, seq)

    def _requeue(self, batch: Batch, seq: Sequence) -> None:
        """Back into the queue, and nothing more of it in this step; computed pages are findable."""
        members = self.beams.members(seq)
        for member in members:
            self.holdings.give_back(member)
            member.status = SequenceStatus.PREEMPTED
            self.running.remove(member)
        seq = self.beams.gather(seq)
        seq.status = SequenceStatus.PREEMPTED
        insort(self.waiting, seq, key=rank)
        self._budget += sum(c.num_rows for c in batch.chunks if c.seq in members)
        batch.chunks = [c for c in batch.chunks if c.seq not in members]
        # An image that only this sequence held has lost its pages with the last reference.
        batch.images = [j for j in batch.images if self.holdings.is_reserved(j.key)]

    def _outgrows(self, seq: Sequence) -> bool:
        """Whether all of a sequence has to be computed again, under the angles of its length."""
        if seq.course.regimes.trained is None:
            return False
        return self._due(seq) != seq.course.regime and not seq.last_is_pending

    def _due(self, seq: Sequence) -> int:
        return seq.course.due(seq.position(seq.num_tokens + self.beams.tail(seq)))

    # -- after a step ---------------------------------------------------------------------------

    def advance(self, chunk: Chunk) -> None:
        """Record that a chunk's KV is in the pools, for all that is launched later."""
        seq = chunk.seq
        seq.num_computed_tokens = chunk.start + chunk.count
        self.turns.spend(seq, chunk.num_rows)
        self.holdings.open_pages.settle(seq)
        for context in chunk.images:
            self.holdings.settle(context.placed.key, written=True)
        has_windows = self.holdings.has_windows
        # A prefill just ended, or a window is about to lose what others might yet find.
        if chunk.count > 1 and (chunk.samples or has_windows):
            self.holdings.cache_prefix(seq)
        if has_windows:
            self.holdings.pass_by(seq)
        self.beams.advanced(seq)

    def ended_prefills(self) -> list[Sequence]:
        """Prefills without output that have nothing left to compute."""
        found = []
        for seq in reversed(self.running):
            if not seq.request.prefill_only:
                break
            start = seq.num_computed_tokens
            if start == seq.num_tokens and not self.holdings.lacking(seq, start):
                found.append(seq)
        return found

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out of either queue and give back everything it holds."""
        seq.drop_pending()
        if seq.status is SequenceStatus.RUNNING:
            for member in self.beams.members(seq):
                self.holdings.give_back(member)
                self.running.remove(member)
                member.status = SequenceStatus.FINISHED
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.beams.end(seq)
        seq.status = SequenceStatus.FINISHED

    def check_invariants(self) -> None:
        """Every reference in the pools is explained by a running sequence or the radix cache."""
        self.holdings.check_invariants(self.running, self.waiting)
        for seq in self.running:
            assert seq.num_computed_tokens <= seq.num_tokens == len(seq.keys) + seq.num_pending
