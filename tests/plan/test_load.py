"""The balance of arrivals and work."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.plan.hardware import MACHINES
from mmserve.plan.load import Balance, balance
from mmserve.plan.model import find_model
from mmserve.plan.roofline import Pools, Roofline, size_pools
from mmserve.plan.traffic import Traffic


@cache
def roofline() -> Roofline:
    return Roofline(find_model("idefics2-8b"), MACHINES["h200"])


def planned(traffic: Traffic, replicas: int = 1, most: int = 64) -> Balance:
    line = roofline()
    pools = size_pools(line.model, line.hardware, traffic)
    return balance(line, traffic, pools, replicas, most)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 50), st.floats(1.01, 3))
def test_more_requests_make_larger_batches_and_later_tokens(rate: float, more: float) -> None:
    few, many = planned(Traffic(requests_per_s=rate)), planned(Traffic(requests_per_s=rate * more))
    assert few.batch <= many.batch and few.first_loaded_s <= many.first_loaded_s
    assert few.busy < many.busy


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 10))
def test_as_many_sequences_decode_as_arrivals_and_lengths_make(rate: float) -> None:
    """Little's law: rate times the time an answer decodes, in what prefill leaves."""
    traffic, load = Traffic(requests_per_s=rate), planned(Traffic(requests_per_s=rate))
    line, context = roofline(), traffic.text_tokens(2.5) + 64
    images = traffic.images * traffic.new_share / traffic.turns
    first = line.first_token_seconds(200, images, context - 200 - images * 64)
    step = line.step_seconds(load.batch, context)
    assert load.batch == pytest.approx(rate * 150 * step / (1 - rate * first), rel=1e-3)


def test_replicas_share_the_requests() -> None:
    one, four = planned(Traffic(requests_per_s=4)), planned(Traffic(requests_per_s=16), 4)
    assert one == four


def test_open_conversations_come_to_a_rate_that_thinking_bounds() -> None:
    load = planned(Traffic(requests_per_s=None, sessions=20, think_s=20))
    assert 0.5 < load.requests_per_s < 1.0
    crowd = planned(Traffic(requests_per_s=None, sessions=100_000, think_s=20))
    assert crowd.busy == pytest.approx(1.0)


def test_more_than_the_machine_can_do_is_seen() -> None:
    load = planned(Traffic(requests_per_s=1_000))
    assert load.busy > 1 and load.batch == load.most_batch == 64
    assert load.tokens_per_s < 1_000 * 150


def test_known_images_come_sooner_than_new_ones() -> None:
    load = planned(Traffic(images=5))
    assert 10 * load.first_known_s < load.first_new_s


def test_no_room_for_one_conversation_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for one whole conversation"):
        balance(roofline(), Traffic(), Pools(1, 1, 0, 0, 0), 1, 64)
