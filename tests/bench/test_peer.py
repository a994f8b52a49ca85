"""Speeds of streams that ran together or in turn."""

from __future__ import annotations

import pytest

from mmserve.bench.peer import Speed

STREAMS = [(0.1, 0.2, 0.3), (0.3, 0.5, 0.7)]  # 10 and 5 tokens/s after the first


def test_rates_of_streams_that_run_together_add_up() -> None:
    speed = Speed.of(STREAMS, 1.0, together=True)
    assert speed.decode_tokens_per_s == pytest.approx(15)
    assert speed.ttft_ms == pytest.approx(200)
    assert speed.total_tokens_per_s == pytest.approx(6)


def test_streams_one_after_another_decode_at_the_rate_of_one() -> None:
    assert Speed.of(STREAMS, 1.0, together=False).decode_tokens_per_s == pytest.approx(7.5)


def test_the_median_run_is_taken_figure_by_figure() -> None:
    runs = [Speed(1, 30, 5), Speed(2, 10, 6), Speed(9, 20, 4)]
    assert Speed.median(runs) == Speed(2, 20, 5)
