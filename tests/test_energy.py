"""The meter over a counter that a test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mmserve.energy import EnergyMeter, Part, Reader, Weights, Work
from mmserve.metrics import ENERGY_PARTS, Metrics

WEIGHTS = Weights(image_miss=10, image_hit=2)


class Board:
    """A counter in joules, and a clock that moves with it at one watt."""

    def __init__(self) -> None:
        self.joules = 1000.0

    def meter(self) -> EnergyMeter:
        reader: Reader = lambda: self.joules  # noqa: E731
        return EnergyMeter(reader, WEIGHTS, clock=lambda: self.joules)


def test_a_step_s_joules_go_to_its_tokens_and_images_by_weight() -> None:
    board = Board()
    meter = board.meter()
    board.joules += 16
    meter.share(
        [
            Work(Part.DECODE, 2, "a"),
            Work(Part.PROMPT, 2, "b"),
            Work(Part.IMAGE_HIT, 1, "b"),
            Work(Part.IMAGE_MISS, 1),
        ]
    )
    assert meter.joules == {
        Part.DECODE: 2,
        Part.PROMPT: 2,
        Part.IMAGE_HIT: 2,
        Part.IMAGE_MISS: 10,
        Part.IDLE: 0,
    }
    assert (meter.close("a"), meter.close("b")) == (2, 4)
    assert meter.per_unit(Part.DECODE) == 1
    assert meter.per_unit(Part.IMAGE_MISS) == 10


def test_a_counter_that_stands_still_pays_later_for_all_steps_since() -> None:
    board = Board()
    meter = board.meter()
    for _ in range(3):
        meter.share([Work(Part.DECODE, 1, "a")])
    assert meter.per_unit(Part.DECODE) is None
    board.joules += 8
    meter.share([Work(Part.DECODE, 1, "b")])
    assert meter.per_unit(Part.DECODE) == 2
    assert (meter.close("a"), meter.close("b")) == (6, 2)


def test_a_request_that_ends_between_two_readings_is_charged_at_the_last_rate() -> None:
    board = Board()
    meter = board.meter()
    board.joules += 4
    meter.share([Work(Part.DECODE, 2, "a")])
    meter.share([Work(Part.DECODE, 3, "a")])
    assert meter.close("a") == pytest.approx(4 + 3 * 2)
    assert meter.close("a") == 0
    board.joules += 6
    meter.share([])
    assert meter.joules[Part.DECODE] == 10  # the board's figures stay what the counter said


def test_a_pause_is_nobody_s() -> None:
    board = Board()
    meter = board.meter()
    board.joules += 4
    meter.share([Work(Part.DECODE, 2, "a")])
    meter.share([Work(Part.DECODE, 1, "a")])
    board.joules += 100
    meter.idle()
    assert meter.joules[Part.IDLE] == 98
    assert meter.close("a") == 6


def test_without_a_counter_everything_is_zero() -> None:
    meter = EnergyMeter(None, WEIGHTS)
    assert not meter.enabled
    meter.share([Work(Part.DECODE, 2, "a")])
    meter.idle()
    assert meter.close("a") == 0
    assert meter.per_unit(Part.DECODE) is None
    assert set(meter.joules.values()) == {0.0}


WORKS = st.lists(
    st.builds(Work, st.sampled_from(Part), st.integers(1, 50), st.sampled_from(["a", "b", None])),
    min_size=1,
)


@given(st.lists(st.tuples(WORKS, st.floats(0, 100)), min_size=1))
def test_no_joule_is_lost_or_made(steps: list[tuple[list[Work], float]]) -> None:
    board = Board()
    meter = board.meter()
    for works, moved in steps:
        board.joules += moved
        meter.share(works)
    board.joules += 1
    meter.idle()
    assert sum(meter.joules.values()) == pytest.approx(board.joules - 1000)
    closed = [meter.close(name) for name in ("a", "b")]
    assert all(joules >= 0 for joules in closed)
    assert sum(closed) <= sum(meter.joules.values()) + 1e-6


def test_the_metrics_show_joules_by_part() -> None:
    board, metrics = Board(), Metrics()
    meter = EnergyMeter(
        lambda: board.joules,
        WEIGHTS,
        on_spend=lambda part, joules: metrics.energy_joules[part.value].inc(joules),
        clock=lambda: board.joules,
    )
    board.joules += 12
    meter.share([Work(Part.DECODE, 2, "a"), Work(Part.IMAGE_MISS, 1, "a")])
    metrics.request_energy_joules.observe(meter.close("a"))
    families = text_string_to_metric_families(metrics.render().decode())
    samples = {(s.name, s.labels.get("part")): s.value for f in families for s in f.samples}
    assert samples["mmserve:energy_joules_total", "decode"] == 2
    assert samples["mmserve:energy_joules_total", "image_miss"] == 10
    assert samples["mmserve:request_energy_joules_sum", None] == 12


def test_the_metrics_know_every_part() -> None:
    assert {part.value for part in Part} == set(ENERGY_PARTS)
