"""The figures a running engine shows: counters, gauges and latency histograms.

Owns names, units and the text form (Prometheus). Knows nothing of what it counts: the engine's
thread sets and adds while the server's loop renders, which prometheus_client makes safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "mmserve:"

Pool = Literal["text", "vision"]
M = TypeVar("M", Counter, Gauge)
POOLS: tuple[Pool, ...] = ("text", "vision")
ENERGY_PARTS = ("decode", "prompt", "image_miss", "image_hit", "idle")

# Seconds. Below the first edge a figure is as good as none on any machine that decodes.
_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_WHOLE_REQUEST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
_JOULES = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000)


class Metrics:
    """One set of metrics with a registry of its own, so that two engines do not collide.

    Every attribute is a prometheus_client metric: `.inc(n)`, `.set(value)`, `.observe(seconds)`.
    A counter `x` is shown as `mmserve:x_total`.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        self.num_requests_running = self._gauge("num_requests_running", "Sequences in the batch")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests queued")
        self.sequence_tokens_mean = self._gauge(
            "sequence_tokens_mean", "Text and image tokens of the last 1000 requests that ended"
        )
        self.sequence_tokens_p99 = self._gauge(
            "sequence_tokens_p99", "Of a hundred such requests, at most one was longer"
        )
        self.num_preemptions = self._counter("num_preemptions", "Sequences set back to waiting")

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, text and image")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.prefill_seconds = self._counter("prefill_seconds", "Step time spent on prompts")
        self.decode_seconds = self._counter("decode_seconds", "Step time spent on new tokens")

        self.prefix_cache_queries = self._counter("prefix_cache_queries", "Text tokens looked up")
        self.prefix_cache_hits = self._counter("prefix_cache_hits", "Text tokens found")
        self.mm_cache_queries = self._counter("mm_cache_queries", "Images looked up")
        self.mm_cache_hits = self._counter("mm_cache_hits", "Images found")
        self.image_decodes = self._counter("image_decodes", "Image files decoded to pixels")
        self.vision_encoder_runs = self._counter("vision_encoder_runs", "Images encoded")
        self.vision_kv_writes = self._counter("vision_kv_writes", "Images written to the pool")

        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN
        )
        self.inter_token_latency_seconds = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request", _BETWEEN_TOKENS
        )
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end", _WHOLE_REQUEST
        )
        self.request_energy_joules = self._histogram(
            "request_energy_joules", "Of the board, spent on one request", _JOULES
        )
        energy = Counter(
            f"{PREFIX}energy_joules",
            "Of the board; decode over generation_tokens is the price of a token, image_miss over "
            "vision_encoder_runs and image_hit over mm_cache_hits those of an image",
            ("part",),
            registry=self._registry,
        )
        self.energy_joules = {part: energy.labels(part) for part in ENERGY_PARTS}

        self._beam_bytes = self._labelled(
            Counter,
            "beam_kv_bytes",
            "KV of beam searches, summed over every eighth step: held by the beams together, and "
            "what as many copies would have been",
            "kind",
        )
        self._add_pages()
        self._add_cold()
        self._add_tiers()
        self._add_drafts()
        self._add_stages()

    def _add_pages(self) -> None:
        usage = Gauge(
            f"{PREFIX}kv_cache_usage_perc",
            "Share of a pool's pages in use by requests; 1 is all of them",
            ("pool",),
            registry=self._registry,
        )
        pages = Gauge(
            f"{PREFIX}pages",
            "Pages by state: active (a request holds it), cached (kept for reuse), free",
            ("pool", "state"),
            registry=self._registry,
        )
        # Looking up a labelled child takes a lock and a dictionary; the engine sets these at
        # every step, so the children are kept.
        self._usage = {pool: usage.labels(pool) for pool in POOLS}
        self._pages = {
            pool: [pages.labels(pool, state) for state in ("active", "cached", "free")]
            for pool in POOLS
        }

    def set_pages(self, pool: Pool, *, active: int, cached: int, free: int) -> None:
        """The state of one KV pool, in pages."""
        for gauge, value in zip(self._pages[pool], (active, cached, free), strict=True):
            gauge.set(value)
        total = active + cached + free
        self._usage[pool].set(active / total if total else 0.0)

    def _add_cold(self) -> None:
        self._steps = self._labelled(
            Counter, "vision_kv_steps", "Images that stepped down to a format", "dtype"
        )
        self.cold_images_read = self._counter(
            "cold_images_read", "Images brought back to the pool from fewer bits"
        )
        self._cold_images = self._labelled(Gauge, "cold_images", "Images held so", "dtype")
        self._cold_bytes = self._labelled(Gauge, "cold_bytes", "Bytes of their KV", "dtype")

    def image_stepped(self, dtype: str) -> None:
        self._steps.labels(dtype).inc()

    def show_cold(self, dtype: str, held: Callable[[], tuple[int, int]]) -> None:
        """`held`: images and bytes, asked whenever figures are shown, on any thread."""
        self._cold_images.labels(dtype).set_function(lambda: held()[0])
        self._cold_bytes.labels(dtype).set_function(lambda: held()[1])

    def _add_tiers(self) -> None:
        self._hits = self._labelled(
            Counter,
            "tier_hit_tokens",
            "Tokens whose KV came up from a tier, by kind; then the prefix cache or vision pool "
            "has them, so they count as hits there, too",
            "kind",
        )
        self._moved = self._labelled(
            Counter,
            "tier_moved_bytes",
            "KV that went to a tier (down) or came from it (up)",
            "tier",
            "direction",
        )
        self._kv_refusals = self._labelled(
            Counter,
            "kv_refusals",
            "KV that was refused or not kept, from a tier or a file, and why",
            "source",
            "reason",
        )
        self._tier_objects = self._labelled(Gauge, "tier_objects", "Objects of KV", "tier")
        self._tier_bytes = self._labelled(Gauge, "tier_bytes", "Bytes of KV", "tier")
        self._tier_pages = self._labelled(
            Gauge, "tier_pages", "The same in pages of all layers, about", "tier"
        )
        self._refusals = self._labelled(
            Counter, "request_refusals", "Requests refused, by what their users are told", "reason"
        )
        self.hit_rate = self._labelled(
            Gauge,
            "cache_hit_rate",
            "Since the start, of what was looked up: text tokens found in the prefix cache, images "
            "found in the vision pool, and of all prompt tokens those that came up from a tier",
            "cause",
        )

    def _add_drafts(self) -> None:
        labels = "drafter", "images"
        self._drafts = self._labelled(Counter, "spec_decode_num_drafts", "Drafts checked", *labels)
        self._draft_tokens = self._labelled(
            Counter, "spec_decode_num_draft_tokens", "Tokens drafted", *labels
        )
        self._draft_hits = self._labelled(
            Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were right", *labels
        )
        self._draft_places = self._labelled(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were right, by how far ahead they were, from 0",
            *labels,
            "position",
        )
        self.spec_decode_seconds_saved = self._gauge(
            "spec_decode_seconds_saved",
            "By steps with drafts, as plain steps of as many sequences were measured to take",
        )

    def _add_stages(self) -> None:
        self._stage_choices = self._labelled(
            Counter, "stage_choices", "New requests by who computes their prompts", "stage"
        )
        self._stage_jobs = self._labelled(
            Counter, "stage_jobs", "Jobs of stage workers, by how they ended", "stage", "end"
        )
        self._stage_bytes = self._labelled(
            Counter, "stage_moved_bytes", "KV that came from stage workers", "stage"
        )
        self._stage_seconds = self._labelled(
            Counter, "stage_seconds", "From asking a stage worker to its end, all jobs", "stage"
        )

    def stage_chosen(self, stage: str) -> None:
        """local | encode | prefill."""
        self._stage_choices.labels(stage).inc()

    def stage_ended(self, kind: str, how: str, seconds: float) -> None:
        self._stage_jobs.labels(kind, how).inc()
        self._stage_seconds.labels(kind).inc(seconds)

    def stage_moved(self, kind: str, num_bytes: int) -> None:
        self._stage_bytes.labels(kind).inc(num_bytes)

    def drafted(self, drafter: str, images: bool, tokens: int, right: int) -> None:
        """A draft was checked; `images`: with some in its context."""
        labels = drafter, "yes" if images else "no"
        self._drafts.labels(*labels).inc()
        self._draft_tokens.labels(*labels).inc(tokens)
        self._draft_hits.labels(*labels).inc(right)
        for position in range(right):
            self._draft_places.labels(*labels, str(position)).inc()

    def beams_shared(self, held: int, copied: int) -> None:
        """A beam search has ended; bytes, summed over every eighth step."""
        self._beam_bytes.labels("held").inc(held)
        self._beam_bytes.labels("copied").inc(copied)

    def tier_hits(self, kind: str, tokens: int) -> None:
        self._hits.labels(kind).inc(tokens)

    def moved(self, tier: str, direction: str, num_bytes: int) -> None:
        self._moved.labels(tier, direction).inc(num_bytes)

    def refused(self, reason: str) -> None:
        """An object of a tier."""
        self._kv_refusals.labels("tier", reason).inc()

    def file_refused(self, reason: str) -> None:
        """A KV file that was to be taken in."""
        self._kv_refusals.labels("file", reason).inc()

    def request_refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def show_tier(self, tier: str, used: Callable[[], tuple[int, int]], page_bytes: int) -> None:
        """`used`: objects and bytes, asked whenever figures are shown, on any thread."""
        self._tier_objects.labels(tier).set_function(lambda: used()[0])
        self._tier_bytes.labels(tier).set_function(lambda: used()[1])
        self._tier_pages.labels(tier).set_function(lambda: used()[1] // page_bytes)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def values(self) -> dict[str, float]:
        """Every sample under the name it has in the Prometheus text, labels included."""
        return {
            _sample_name(sample.name, sample.labels): sample.value
            for metric in self._registry.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        }

    def _labelled(self, kind: type[M], name: str, text: str, *labels: str) -> M:
        return kind(PREFIX + name, text, labels, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)


def _sample_name(name: str, labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name
