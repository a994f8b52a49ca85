"""Figures from records: percentiles, rates, and counters read as differences.

Owns the arithmetic. Knows nothing of engines or of how figures are printed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmserve.request import Timings, Usage


@dataclass(frozen=True)
class Record:
    """One answered request as its client saw it, in seconds from the moment it was asked."""

    prepare_s: float  # images identified and decoded, prompt rendered
    token_s: tuple[float, ...]  # when each token arrived
    usage: Usage
    timings: Timings

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Quantiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """The figures of one phase. Rates that divide by nothing are None."""

    phase: str
    requests: int
    seconds: float
    ttft_ms: Quantiles
    inter_token_ms: Quantiles
    output_tokens_per_s: float
    stream_tokens_per_s: float  # median request: tokens after the first over their time
    requests_per_s: float
    prompt_tokens: float  # mean of a request, text and image
    prefix_hit_rate: float | None  # text tokens found over text tokens looked up
    vision_hit_rate: float | None  # images
    vision_encoder_runs: int
    image_decodes: int
    prefill_decode_ratio: float | None  # seconds of engine steps
    ttft_parts_ms: dict[str, float]  # means; with `prepare` they make up TTFT
    peak_rss_mb: float
    others_cpu: float | None  # share of all cores that other processes took meanwhile


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the share q of all values do not exceed (nearest rank)."""
    assert values and 0 < q <= 1
    return sorted(values)[math.ceil(q * len(values)) - 1]


def quantiles(values: Sequence[float], scale: float = 1e3) -> Quantiles:
    """p50, p90 and p99 of values times `scale`; zeros where there are none."""
    if not values:
        return Quantiles(0.0, 0.0, 0.0)
    return Quantiles(*(scale * percentile(values, q) for q in (0.5, 0.9, 0.99)))


def parse_counters(text: str) -> dict[str, float]:
    """Unlabelled samples of the Prometheus text form, by name without our prefix and `_total`."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith("mmserve:") and "{" not in name:
            out[name.removeprefix("mmserve:").removesuffix("_total")] = float(value)
    return out


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def summarise(
    phase: str,
    records: Sequence[Record],
    seconds: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
    peak_rss_mb: float,
    others_cpu: float | None,
) -> Summary:
    """`before` and `after` are `parse_counters` around the phase of `seconds`."""
    assert records
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    tokens = sum(len(r.token_s) for r in records)
    gaps = [gap for r in records for gap in r.gaps_s]
    rates = [len(r.gaps_s) / sum(r.gaps_s) for r in records if r.gaps_s]
    mean = statistics.fmean
    return Summary(
        phase=phase,
        requests=len(records),
        seconds=seconds,
        ttft_ms=quantiles([r.ttft_s for r in records]),
        inter_token_ms=quantiles(gaps),
        output_tokens_per_s=tokens / seconds,
        stream_tokens_per_s=statistics.median(rates) if rates else 0.0,
        requests_per_s=len(records) / seconds,
        prompt_tokens=mean(r.usage.prompt_tokens for r in records),
        prefix_hit_rate=ratio(moved["prefix_cache_hits"], moved["prefix_cache_queries"]),
        vision_hit_rate=ratio(moved["mm_cache_hits"], moved["mm_cache_queries"]),
        vision_encoder_runs=int(moved["vision_encoder_runs"]),
        image_decodes=int(moved["image_decodes"]),
        prefill_decode_ratio=ratio(moved["prefill_seconds"], moved["decode_seconds"]),
        ttft_parts_ms={
            "prepare": mean(1e3 * r.prepare_s for r in records),
            "queue": mean(r.timings.queue_ms for r in records),
            "images": mean(r.timings.image_ms for r in records),
            "text": mean(r.timings.prompt_ms - r.timings.image_ms for r in records),
        },
        peak_rss_mb=peak_rss_mb,
        others_cpu=others_cpu,
    )
