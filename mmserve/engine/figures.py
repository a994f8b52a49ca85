"""What a running engine shows of itself: which figures are taken, and when.

Owns the way from scheduler, steps and requests to `Metrics`. Changes nothing of what it looks at;
knows nothing of how figures are shown.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from functools import partial

from mmserve.engine.kv_lift import Lifted
from mmserve.engine.kv_tiers import KVTiers
from mmserve.engine.live import Live, Row
from mmserve.engine.live_beams import LiveBeams
from mmserve.metrics import Metrics
from mmserve.scheduler.batch import Batch
from mmserve.scheduler.counts import Counts
from mmserve.scheduler.scheduler import Scheduler
from mmserve.tiers.cost import Costs
from mmserve.tiers.stack import TIERS

RECENT = 1000  # requests
LEAST_PRICED = 32  # text tokens of prompts in one step
OBSERVE_EVERY_S = 0.25  # counting evictable pages walks the whole prefix tree


class Figures:
    def __init__(
        self, metrics: Metrics, scheduler: Scheduler, tiers: KVTiers | None, costs: Costs
    ) -> None:
        """`costs`: told of every step."""
        self._metrics, self._scheduler, self._tiers = metrics, scheduler, tiers
        self._costs = costs
        self._total, self._lifted = Counts(), Lifted()  # since the start
        self._prompt_tokens = 0  # text and image, of requests that have ended
        self._lengths: deque[int] = deque(maxlen=RECENT)  # text and image tokens of those
        if tiers is not None:
            for tier in TIERS:
                used = partial(tiers.stack.used, tier)
                metrics.show_tier(tier, used, tiers.lifter.page_bytes)
        self._landed_at = 0.0
        self._observed_at = 0.0

    def observe_token(self, live: Row, now: float) -> None:
        """A token has landed, and the request's clock does not know it yet."""
        before = live.clock.last_token
        if before is None:
            elapsed = now - live.request.arrival
            self._metrics.time_to_first_token_seconds.observe(elapsed)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - before)

    def observe_end(self, live: Live) -> None:
        if self._scheduler.pace is not None and live.clock.scheduled is not None:
            self._scheduler.pace.ended(time.monotonic() - live.clock.scheduled)
        elapsed = time.monotonic() - live.request.arrival
        self._metrics.e2e_request_latency_seconds.observe(elapsed)
        self._prompt_tokens += live.seq.num_prompt_tokens + live.seq.num_image_tokens
        self._lengths.append(live.seq.length)
        if isinstance(live, LiveBeams):
            self._metrics.beams_shared(*live.shared)

    def count(self, batch: Batch, started: float) -> float:
        """Share a landed step's time out by tokens: new tokens to decoding, the rest to prefill;
        its seconds.

        A step that was launched while another was in the air is charged from that one's landing,
        so the sum is the time in which anything was in the air.
        """
        now = time.monotonic()
        seconds = now - max(started, self._landed_at)
        self._landed_at = now
        if self._scheduler.pace is not None:
            self._scheduler.pace.measured(batch.num_tokens, len(batch.images), seconds)
        decoding = sum(c.num_rows for c in batch.chunks if c.decodes)
        share = decoding / batch.num_tokens if decoding and not batch.images else 0.0
        self._metrics.decode_seconds.inc(seconds * share)
        self._metrics.prefill_seconds.inc(seconds * (1 - share))
        self._price(batch, seconds * (1 - share))
        return seconds

    def _price(self, batch: Batch, seconds: float) -> None:
        """What prompts cost, as far as a step shows it: with few rows it only reads weights."""
        chunks = [c for c in batch.chunks if not c.decodes]
        text = sum(c.count for c in chunks)
        seen = sum(c.num_rows for c in chunks) - text
        seen += sum(job.image.num_tokens for job in batch.images)
        if seen or text >= LEAST_PRICED:
            self._costs.computed(text, seen, seconds)

    def observe(self, now: float, *, idle: bool) -> None:
        """The state of queues and pools, every now and then; always of an `idle` engine."""
        if not idle and now - self._observed_at <= OBSERVE_EVERY_S:
            return
        self._observed_at = now
        scheduler, metrics = self._scheduler, self._metrics
        metrics.num_requests_running.set(len(scheduler.running))
        metrics.num_requests_waiting.set(scheduler.num_waiting)
        new = scheduler.take_counts()
        metrics.num_preemptions.inc(new.preemptions)
        metrics.prefix_cache_queries.inc(new.prefix_queries)
        metrics.prefix_cache_hits.inc(new.prefix_hits)
        metrics.mm_cache_queries.inc(new.image_queries)
        metrics.mm_cache_hits.inc(new.image_hits)
        self._observe_pages()
        self._observe_lengths()
        if self._tiers is not None:
            self._observe_tiers(self._tiers)
        self._observe_rates(new)

    def _observe_lengths(self) -> None:
        if lengths := sorted(self._lengths):
            self._metrics.sequence_tokens_mean.set(sum(lengths) / len(lengths))
            self._metrics.sequence_tokens_p99.set(lengths[-(-99 * len(lengths) // 100) - 1])

    def _observe_tiers(self, tiers: KVTiers) -> None:
        lifted, before = tiers.lifter.lifted, self._lifted
        self._metrics.tier_hits("text", lifted.text_tokens - before.text_tokens)
        self._metrics.tier_hits("image", lifted.image_tokens - before.image_tokens)
        self._lifted = replace(lifted)

    def _observe_rates(self, new: Counts) -> None:
        """What came up from a tier is no merit of the pools, though it is found in them then."""
        total, lifted = self._total, self._lifted
        for name, value in vars(new).items():
            setattr(total, name, getattr(total, name) + value)
        tokens = lifted.text_tokens + lifted.image_tokens
        for cause, found, of in (
            ("prefix", total.prefix_hits - lifted.text_tokens, total.prefix_queries),
            ("image", total.image_hits - lifted.images, total.image_queries),
            ("tier", tokens, self._prompt_tokens),
        ):
            self._metrics.hit_rate.labels(cause).set(min(max(found / max(of, 1), 0.0), 1.0))

    def _observe_pages(self) -> None:
        """By kind of pool, all layer groups' together."""
        holdings = self._scheduler.holdings
        groups = range(len(holdings.groups))
        total = sum(holdings.text[g].num_pages for g in groups)
        free = sum(holdings.text[g].num_free for g in groups)
        cached = sum(holdings.cached_pages(g) for g in groups)
        self._metrics.set_pages("text", active=total - free - cached, cached=cached, free=free)
        held = sum(index.num_referenced for index in holdings.vision)
        idle = sum(index.num_used for index in holdings.vision) - held
        free = sum(index.num_free for index in holdings.vision)
        self._metrics.set_pages("vision", active=held, cached=idle, free=free)


def describe(scheduler: Scheduler) -> str:
    """One line for the log of a step loop that stands still."""
    free = [
        f"{pool.num_free} of {pool.num_pages} {kind}"
        for kind, pools in (("text", scheduler.text), ("vision", scheduler.vision))
        for pool in pools
    ]
    return (
        f"{len(scheduler.running)} running, {scheduler.num_waiting} waiting, "
        f"{' and '.join(free)} pages free"
    )
