"""The figures a running engine shows: counters, gauges and latency histograms.

Owns names, units and the text form (Prometheus). Knows nothing of what it counts: the engine's
thread sets and adds while the server's loop renders, which prometheus_client makes safe.
"""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "mmserve:"

Pool = Literal["text", "vision"]
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

        self._add_pages()
        self._add_tiers()

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

    def _add_tiers(self) -> None:
        registry = self._registry
        hits = Counter(
            f"{PREFIX}tier_hit_tokens",
            "Tokens whose KV came up from a tier, by kind; then the prefix cache or vision pool "
            "has them, so they count as hits there, too",
            ("kind",),
            registry=registry,
        )
        self.tier_hits = {kind: hits.labels(kind) for kind in ("text", "image")}
        self._moved = Counter(
            f"{PREFIX}tier_moved_bytes",
            "KV that went to a tier (down) or came from it (up)",
            ("tier", "direction"),
            registry=registry,
        )
        self._refusals = Counter(
            f"{PREFIX}tier_refusals",
            "Objects of KV that were not used or not kept, and are computed again when needed",
            ("reason",),
            registry=registry,
        )
        self._tier_objects = Gauge(
            f"{PREFIX}tier_objects", "Objects of KV in a tier", ("tier",), registry=registry
        )
        self._tier_bytes = Gauge(
            f"{PREFIX}tier_bytes", "Bytes of KV in a tier", ("tier",), registry=registry
        )

    def moved(self, tier: str, direction: str, num_bytes: int) -> None:
        self._moved.labels(tier, direction).inc(num_bytes)

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def set_tier(self, tier: str, objects: int, num_bytes: int) -> None:
        self._tier_objects.labels(tier).set(objects)
        self._tier_bytes.labels(tier).set(num_bytes)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)
