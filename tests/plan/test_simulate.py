"""Routing of made-up conversations: the issue's case, and what no simulation may get wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mmserve.plan.simulate import Arrivals, Outcome, change, simulate
from mmserve.plan.traffic import Traffic

SESSIONS = 12_000
PLENTY = 10**6  # images a replica


def outcomes(replicas: int, pool_images: int = PLENTY, seed: int = 0) -> dict[str, Outcome]:
    arrivals = Arrivals.make(Traffic(repeat=0.5), SESSIONS, replicas, seed)
    return {outcome.policy: outcome for outcome in simulate(arrivals, pool_images)}


@pytest.mark.parametrize("replicas", [3, 8, 40])
def test_half_the_images_repeat_and_each_is_encoded_once_or_hardly_more(replicas: int) -> None:
    found = outcomes(replicas)
    aware, robin = found["image-aware"], found["round robin"]
    assert 1 <= aware.encodes <= 1.1
    assert robin.encodes > 2.5
    assert robin.hit_rate < aware.hit_rate <= aware.best_hit_rate
    assert aware.hit_rate > 0.97 * aware.best_hit_rate


@pytest.mark.parametrize("replicas", [3, 40])
def test_nobody_has_more_than_about_twice_the_mean(replicas: int) -> None:
    for outcome in outcomes(replicas).values():
        assert 1 <= outcome.skew_p99 <= outcome.skew_max < 2.2


def test_one_image_that_all_show_is_spread_rather_than_waited_for() -> None:
    images = np.zeros((SESSIONS, 1), np.int64)
    aware, *_ = simulate(Arrivals(images, 8), PLENTY)
    assert aware.skew_max < 3.0
    assert aware.encodes <= 8


def test_the_same_seed_gives_the_same_and_another_another() -> None:
    assert outcomes(3, seed=1) == outcomes(3, seed=1)
    assert outcomes(3, seed=1) != outcomes(3, seed=2)


def test_one_replica_is_all_policies_alike_and_finds_all_that_can_be() -> None:
    found = list(outcomes(1).values())
    assert len({dataclasses.replace(outcome, policy="") for outcome in found}) == 1
    assert found[0].hit_rate == found[0].best_hit_rate and found[0].encodes == 1


def test_a_small_pool_forgets() -> None:
    assert outcomes(3, 50)["image-aware"].hit_rate < outcomes(3)["image-aware"].hit_rate
    assert outcomes(3, 0)["image-aware"].hit_rate == 0


@pytest.mark.parametrize("images", [0, 1, 3])
def test_any_number_of_images_has_a_route(images: int) -> None:
    arrivals = Arrivals.make(Traffic(images=images), 2_000, 4, 0)
    for outcome in simulate(arrivals, PLENTY):
        assert 0 <= outcome.hit_rate <= max(outcome.best_hit_rate, 0)


@pytest.mark.parametrize("replicas", [1, 5, 50])
def test_a_replica_less_or_more_moves_its_share(replicas: int) -> None:
    moved = change(Arrivals.make(Traffic(), SESSIONS, replicas, 0), live_bytes=100.0)
    assert moved.lost_share == pytest.approx(1 / replicas, rel=0.25)
    assert moved.added_share == pytest.approx(1 / (replicas + 1), rel=0.25)
    assert moved.lost_bytes == 100 * moved.lost_share
