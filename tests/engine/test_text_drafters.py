"""SPECULATIVE = PLAIN with the drafters that need no weights, and what they bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine.drafting import Drafting
from mmserve.engine.engine import Engine
from mmserve.request import TokenEvent
from mmserve.spec.chained import ChainedDrafter
from mmserve.spec.drafter import Drafter
from mmserve.spec.lookahead import LookaheadDrafter
from mmserve.spec.ngram import NgramDrafter
from mmserve.spec.suffix import SuffixDrafter
from tests.engine.driver import Driver
from tests.engine.test_drafting import KINDS_OF_PROMPTS, LONG, PARAMS, Ask, said, segments
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import build_tiny, tiny_config

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(1 << 20),
    "suffix tree": lambda: SuffixDrafter(1 << 20, width=3, least=0.05),
    "lookahead": LookaheadDrafter,
    "chained": lambda: ChainedDrafter(
        [SuffixDrafter(1 << 20, sure=0.6), LookaheadDrafter(4, 3, 3)], [16, 5]
    ),
}


def assist(d: Driver, drafter: Drafter, length: int = 16) -> None:
    """Have the driver's engine draft from now on."""
    engine = d.engine
    engine.drafting = Drafting(drafter, length, engine.scheduler.holdings, engine.metrics)


def answer(d: Driver, request: str) -> list[TokenEvent]:
    """But for what was cached: that depends on what else ran just before."""
    return [replace(event, usage=None) for event in said(d, request)]


def compare(plain: Driver, assisted: Driver, asks: Sequence[Ask], rounds: int = 2) -> list[int]:
    """All at once on either engine, and again; tokens that were drafted right in each round."""
    right = []
    for _ in range(rounds):
        for d in (plain, assisted):
            known = set(d.events)
            for n, (parts, params) in enumerate(asks):
                d.submit(segments(d, parts, n), params)
            d.run()
        for request in plain.events:
            assert answer(assisted, request) == answer(plain, request)
        timings = (assisted.events[r][-1].timings for r in assisted.events if r not in known)
        right.append(sum(t.accepted or 0 for t in timings if t))
    assisted.assert_idle()
    return right


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", ["greedy", "both", "formed"])
def test_an_answer_is_what_it_would_have_been(name: str, params: str) -> None:
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    assisted.engine.overlaps = True
    assist(assisted, DRAFTERS[name]())
    compare(plain, assisted, [(parts, PARAMS[params]) for parts in KINDS_OF_PROMPTS.values()])


@given(
    st.sampled_from(sorted(DRAFTERS)),
    st.lists(
        st.tuples(
            st.sampled_from([*KINDS_OF_PROMPTS.values()]), st.sampled_from([*PARAMS.values()])
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 20),
    st.integers(1, 64),
    st.sampled_from([10, 20, 60]),
)
@settings(max_examples=12, deadline=None)
def test_whatever_the_pressure_the_chunks_and_the_company(
    name: str, asks: Sequence[Ask], length: int, budget: int, text_pages: int
) -> None:
    options: dict[str, Any] = {
        "text_pages": text_pages,
        "max_num_batched_tokens": budget,
        "dtype": "int8",
    }
    plain, assisted = (Driver(build_tiny(tiny_config(**options))) for _ in range(2))
    assist(assisted, DRAFTERS[name](), length)
    compare(plain, assisted, asks)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_see_the_same_behind_a_window_of_guesses(kind: str) -> None:
    plain, assisted = (Driver(Engine(tiny_config(), windowed_model(KINDS[kind]))) for _ in range(2))
    assist(assisted, LookaheadDrafter())
    compare(plain, assisted, [(parts, LONG) for parts in KINDS_OF_PROMPTS.values()], 1)


@pytest.mark.parametrize("name", ["suffix", "suffix tree", "chained"])
def test_what_was_asked_before_is_answered_in_a_few_steps(name: str) -> None:
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    assist(assisted, DRAFTERS[name]())
    asks = [(parts, LONG) for parts in KINDS_OF_PROMPTS.values()]
    _, again = compare(plain, assisted, asks)
    tokens = sum(len(plain.tokens(r)) for r in plain.events) // 2
    assert again > 0.8 * tokens
