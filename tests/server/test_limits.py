"""Limits of a minute and at once, by a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.server.errors import RateLimitError, error_headers
from mmserve.server.limits import RATE_HEADERS, Limits, Meter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def meter(**limits: int) -> tuple[Meter, Clock]:
    clock = Clock()
    return Meter(Limits(**limits), clock), clock


def test_so_many_requests_a_minute_are_taken_and_no_more() -> None:
    counts, clock = meter(requests=6)
    for _ in range(6):
        counts.request()
    with pytest.raises(RateLimitError) as refused:
        counts.request()
    assert refused.value.retry_after_s == pytest.approx(10.0)
    assert error_headers(refused.value)["retry-after"] == "10"
    clock.now += 10
    counts.request()
    with pytest.raises(RateLimitError):
        counts.request()


def test_an_answer_that_nobody_knew_the_length_of_is_paid_off_before_the_next() -> None:
    counts, clock = meter(tokens=600)
    counts.request(100)
    counts.spend(800)
    with pytest.raises(RateLimitError, match="600 tokens a minute"):
        counts.request(10)
    clock.now += 32
    counts.request(10)


def test_a_prompt_of_more_than_a_minutes_tokens_waits_for_a_whole_minute() -> None:
    counts, clock = meter(tokens=60)
    counts.request(1)
    with pytest.raises(RateLimitError):
        counts.request(500)
    clock.now += 1
    counts.request(500)


def test_a_refusal_costs_nothing() -> None:
    counts, _ = meter(requests=5, tokens=10)
    counts.request(10)
    for _ in range(20):
        with pytest.raises(RateLimitError):
            counts.request(10)
    assert counts.headers()["x-ratelimit-remaining-requests"] == "4"


def test_so_many_run_at_once() -> None:
    counts, _ = meter(concurrency=2)
    counts.begin()
    counts.begin()
    with pytest.raises(RateLimitError, match="may have 2"):
        counts.check()
    counts.end()
    counts.check()


def test_what_is_left_is_told_in_the_words_of_openais_clients() -> None:
    counts, clock = meter(requests=60, tokens=1200)
    counts.request(300)
    clock.now += 0.5
    assert counts.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "0.500s",
        "x-ratelimit-limit-tokens": "1200",
        "x-ratelimit-remaining-tokens": "910",
        "x-ratelimit-reset-tokens": "14.500s",
    }
    assert set(counts.headers()) == set(RATE_HEADERS)
    counts.spend(3000)
    assert counts.headers()["x-ratelimit-reset-tokens"] == "2m44.5s"


def test_other_limits_do_not_forget_what_was_used() -> None:
    counts, _ = meter(requests=2)
    counts.request()
    counts.request()
    counts.change(Limits(requests=3))
    counts.request()
    with pytest.raises(RateLimitError):
        counts.request()
    counts.change(Limits())
    for _ in range(9):
        counts.request()
    assert counts.headers() == {}


@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=40))
def test_in_no_minute_more_is_begun_than_the_limit_and_a_burst(
    limit: int, asked: list[tuple[float, int]]
) -> None:
    counts, clock = meter(tokens=limit)
    taken: list[tuple[float, int]] = []
    for pause, tokens in asked:
        clock.now += pause
        try:
            counts.request(tokens)
        except RateLimitError:
            continue
        taken.append((clock.now, tokens))
    largest = max((tokens for _, tokens in taken), default=0)
    for start, _ in taken:
        within = sum(tokens for at, tokens in taken if start <= at < start + 60)
        assert within <= 2 * limit + largest
