"""Percentiles, differences of counters, and the figures of a phase, by hand and by law."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.bench.stats import (
    Quantiles,
    Record,
    parse_counters,
    percentile,
    quantiles,
    ratio,
    summarise,
)
from mmserve.metrics import Metrics
from mmserve.request import Timings, Usage

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


def record(*token_s: float, prompt_tokens: int = 10) -> Record:
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=len(token_s))
    return Record(0.01, token_s, usage, Timings(queue_ms=1.0, image_ms=20.0, prompt_ms=50.0))


@pytest.mark.parametrize(
    ("q", "expected"), [(0.5, 50), (0.9, 90), (0.99, 99), (0.01, 1), (1.0, 100), (0.905, 91)]
)
def test_percentiles_of_one_to_a_hundred(q: float, expected: int) -> None:
    assert percentile([float(v) for v in range(100, 0, -1)], q) == expected


def test_a_high_percentile_of_few_values_is_their_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


@given(VALUES, st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_its_share_does_not_exceed(
    values: list[float], percent: int
) -> None:
    found = percentile(values, percent / 100)
    assert found in values
    assert 100 * sum(v <= found for v in values) >= percent * len(values)
    assert 100 * sum(v < found for v in values) < percent * len(values)


def test_quantiles_are_scaled_and_zero_where_there_is_nothing() -> None:
    assert quantiles([0.001, 0.002]) == Quantiles(1.0, 2.0, 2.0)
    assert quantiles([]) == Quantiles(0.0, 0.0, 0.0)


def test_a_ratio_to_nothing_is_none() -> None:
    assert ratio(1.0, 0.0) is None
    assert ratio(1.0, 4.0) == 0.25


def test_counters_are_read_from_the_text_the_server_shows() -> None:
    metrics = Metrics()
    metrics.vision_encoder_runs.inc(3)
    metrics.decode_seconds.inc(1.5)
    metrics.set_pages("text", active=1, cached=2, free=3)
    counters = parse_counters(metrics.render().decode())
    assert counters["vision_encoder_runs"] == 3
    assert counters["decode_seconds"] == 1.5
    assert not any("{" in name for name in counters)


def test_the_figures_of_a_phase() -> None:
    metrics = Metrics()
    metrics.vision_encoder_runs.inc(7)
    before = parse_counters(metrics.render().decode())
    metrics.vision_encoder_runs.inc(2)
    metrics.image_decodes.inc(4)
    metrics.prefix_cache_queries.inc(40)
    metrics.prefix_cache_hits.inc(10)
    metrics.prefill_seconds.inc(3)
    metrics.decode_seconds.inc(2)
    after = parse_counters(metrics.render().decode())
    records = [record(0.1, 0.2, 0.4), record(0.3, 0.4, 0.5, prompt_tokens=30)]
    got = summarise("load", records, 2.0, before, after, 123.0, 0.25)
    assert (got.phase, got.requests, got.seconds) == ("load", 2, 2.0)
    assert (got.peak_rss_mb, got.others_cpu) == (123.0, 0.25)
    assert (got.ttft_ms.p50, got.ttft_ms.p90) == pytest.approx((100, 300))
    assert (got.inter_token_ms.p50, got.inter_token_ms.p99) == pytest.approx((100, 200))
    assert got.output_tokens_per_s == pytest.approx(3.0)
    assert got.stream_tokens_per_s == pytest.approx((2 / 0.3 + 2 / 0.2) / 2)
    assert got.requests_per_s == pytest.approx(1.0)
    assert got.prompt_tokens == pytest.approx(20)
    assert got.prefix_hit_rate == pytest.approx(0.25)
    assert got.vision_hit_rate is None
    assert (got.vision_encoder_runs, got.image_decodes) == (2, 4)
    assert got.prefill_decode_ratio == pytest.approx(1.5)
    assert got.ttft_parts_ms == pytest.approx(
        {"prepare": 10.0, "queue": 1.0, "images": 20.0, "text": 30.0}
    )


def test_single_token_answers_have_a_first_token_and_no_rate() -> None:
    counters = parse_counters(Metrics().render().decode())
    got = summarise("load", [record(0.1)], 1.0, counters, counters, 0.0, None)
    assert got.inter_token_ms == Quantiles(0.0, 0.0, 0.0)
    assert got.stream_tokens_per_s == 0.0
    assert got.prefill_decode_ratio is None
