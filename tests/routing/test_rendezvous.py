"""The laws of rendezvous hashing: what moves when replicas come, go or are busy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.routing.rendezvous import LIMIT, Rendezvous, key_of, load_weights

KEYS = np.array([key_of(str(n)) for n in range(20_000)], np.uint32)
names = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=12, unique=True)
keys = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


@settings(max_examples=40, deadline=None)
@given(names, keys, st.data())
def test_a_lost_replica_moves_its_own_keys_and_no_other(
    replicas: list[str], some: list[int], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(replicas))
    left = [name for name in replicas if name != lost]
    before, after = Rendezvous(replicas).homes(some), Rendezvous(left).homes(some)
    for old, new in zip(before, after, strict=True):
        assert replicas[old] in (lost, left[new])


@settings(max_examples=40, deadline=None)
@given(names, keys, st.data())
def test_a_replica_of_less_weight_gives_keys_and_takes_none(
    replicas: list[str], some: list[int], data: st.DataObject
) -> None:
    busy = data.draw(st.integers(0, len(replicas) - 1))
    weights = np.ones(len(replicas))
    weights[busy] = data.draw(st.floats(0.01, 0.99))
    router = Rendezvous(replicas)
    for old, new in zip(router.homes(some), router.homes(some, weights), strict=True):
        assert old == new or old == busy


@settings(max_examples=20, deadline=None)
@given(names, keys)
def test_the_order_of_the_names_does_not_matter(replicas: list[str], some: list[int]) -> None:
    shuffled = sorted(replicas)
    one, other = Rendezvous(replicas).homes(some), Rendezvous(shuffled).homes(some)
    assert [replicas[n] for n in one] == [shuffled[n] for n in other]


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 3, 4), (0.1, 1, 1, 8)])
def test_every_replica_has_the_share_of_its_weight(weights: tuple[float, ...]) -> None:
    homes = Rendezvous(["a", "b", "c", "d"]).homes(KEYS, weights)
    shares = np.bincount(homes, minlength=4) / len(KEYS)
    for share, weight in zip(shares, weights, strict=True):
        expected = weight / sum(weights)
        assert abs(share - expected) < 4 * math.sqrt(expected / len(KEYS))


def test_many_keys_are_placed_as_each_alone() -> None:
    router = Rendezvous([str(n) for n in range(1000)])
    homes = router.homes(KEYS[:3000])  # several blocks
    assert [router.homes([key])[0] for key in KEYS[:3000:101]] == homes[::101].tolist()


def test_a_request_goes_where_most_of_its_images_live_and_without_any_by_its_text() -> None:
    router = Rendezvous(["a", "b", "c"])
    home = {text: router.choose([text], "") for text in map(str, range(50))}
    at_a = [text for text, name in home.items() if name == "a"][:2]
    at_b = [text for text, name in home.items() if name == "b"][:1]
    assert router.choose([*at_b, *at_a], "") == "a"
    assert router.choose([at_b[0], at_a[0]], "") == "b"
    assert router.choose([], at_a[0]) == "a"


def test_load_counts_for_the_capacity_that_carries_it() -> None:
    assert load_weights([10, 20], [1, 2]).tolist() == [1, 2]
    assert load_weights([0, 0, 0]).tolist() == [1, 1, 1]


def test_who_is_over_the_limit_has_next_to_no_weight_and_the_calm_have_all() -> None:
    loads = np.array([100.0] * 9 + [100 * LIMIT * 2])
    weights = load_weights(loads)
    assert (weights[:9] == 1).all() and 0 < weights[9] < 1e-3


@pytest.mark.parametrize("weights", [(1, 1), (1, 0, 1), (1, -1, 1)])
def test_weights_that_fit_no_replicas_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="3 replicas"):
        Rendezvous(["a", "b", "c"]).homes([1], weights)


@pytest.mark.parametrize("bad", [[], ["a", "a"]])
def test_replicas_need_names_of_their_own(bad: list[str]) -> None:
    with pytest.raises(ValueError, match="names"):
        Rendezvous(bad)
