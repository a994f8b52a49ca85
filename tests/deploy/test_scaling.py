"""How many replicas there should be."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mmserve.deploy.figures import Figures, figures, with_replicas
from mmserve.deploy.scaling import QUEUE_S, TARGETS, VISION_USE, desired_replicas

TEXT = """# HELP mmserve:num_requests_waiting Requests queued
# TYPE mmserve:num_requests_waiting gauge
mmserve:num_requests_waiting 6.0
# HELP mmserve:kv_cache_usage_perc Share
# TYPE mmserve:kv_cache_usage_perc gauge
mmserve:kv_cache_usage_perc{pool="text"} 0.5
mmserve:kv_cache_usage_perc{pool="vision"} 0.25
"""


@dataclass
class Load:
    """What Ray tells."""

    current_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] | None


def wanted(count: int, queue_s: float, vision_use: float = 0.0) -> int:
    names = [str(n) for n in range(count)]
    figures = {QUEUE_S: queue_s, VISION_USE: vision_use}
    metrics = {name: dict.fromkeys(names, value) for name, value in figures.items()}
    return desired_replicas(Load(count, metrics))[0]


def test_waiting_beyond_the_target_asks_for_more_and_at_most_twice_as_many() -> None:
    assert wanted(4, TARGETS[QUEUE_S] * 1.5) == 6
    assert wanted(4, TARGETS[QUEUE_S] * 100) == 8


def test_a_vision_pool_in_use_asks_for_more_where_nobody_waits() -> None:
    assert wanted(4, 0.0, 1.0) == 5


def test_calm_gives_one_back_and_the_last_stays() -> None:
    assert wanted(4, 0.0) == 3
    assert wanted(1, 0.0) == 1


def test_without_figures_nothing_changes() -> None:
    assert desired_replicas(Load(3, None))[0] == desired_replicas(Load(3, {}))[0] == 3


@given(st.integers(2, 50), st.floats(0, 10), st.floats(0, 1))
def test_who_gives_one_back_does_not_ask_for_it_again(
    count: int, queue_s: float, vision_use: float
) -> None:
    """The same work on fewer replicas weighs more on each."""
    after = wanted(count, queue_s, vision_use)
    if after < count:
        heavier = count / after
        assert wanted(after, queue_s * heavier, vision_use * heavier) <= count - 1


def test_a_wait_is_what_is_queued_at_the_rate_of_what_ends() -> None:
    before, now = Figures(finished=10), Figures(waiting=6, finished=30)
    assert now.queue_s(before, 10.0) == 3.0
    assert Figures(waiting=2).queue_s(Figures(), 10.0) == 20.0


def test_figures_are_read_and_shown_with_their_replicas_names() -> None:
    assert figures(TEXT) == Figures(waiting=6.0, vision_use=0.25)
    text = with_replicas({"a": TEXT, "b": TEXT}).decode()
    assert text.count("# TYPE mmserve:kv_cache_usage_perc gauge") == 1
    assert 'mmserve:kv_cache_usage_perc{pool="vision",replica="b"} 0.25' in text
