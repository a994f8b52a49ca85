"""A short run of the fuzz targets: every seed as it is, and each damaged in some ways."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_holds(name: str) -> None:
    target, seeds = TARGETS[name]
    for seed in seeds():
        target(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_seeds_hold(name: str) -> None:
    target, make = TARGETS[name]
    seeds = make()

    @given(
        seed=st.sampled_from(seeds),
        cuts=st.lists(
            st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=12)), max_size=4
        ),
    )
    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    def holds(seed: bytes, cuts: list[tuple[float, int, bytes]]) -> None:
        for place, removed, added in cuts:
            at = int(place * len(seed))
            seed = seed[:at] + added + seed[at + removed :]
        target(seed)

    holds()
