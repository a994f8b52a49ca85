"""SPECULATIVE = PLAIN: whatever is guessed, an answer is what it would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.engine.drafting import Drafting
from mmserve.engine.engine import Engine
from mmserve.engine.model_runner import Logits
from mmserve.request import Constraint, SamplingParams, Segment, Streaming, TokenEvent
from mmserve.scheduler.batch import Batch
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.guessing import Guesser
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import build_tiny, tiny_config

LONG = replace(GREEDY, max_tokens=40, ignore_eos=True)
SAMPLED = replace(LONG, temperature=1.1, seed=7)
PARAMS = {
    "greedy": LONG,
    "ends": replace(GREEDY, max_tokens=40),
    "sampled": SAMPLED,
    "top": replace(SAMPLED, top_k=9, top_p=0.8, min_p=0.02, logprobs=3),
    "penalised": replace(LONG, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
    "both": replace(SAMPLED, presence_penalty=0.7, repetition_penalty=0.8, logit_bias={40: 2.0}),
    "stops": replace(LONG, stop=("a", "Q", "7 ")),
    "formed": replace(
        SAMPLED, ignore_eos=False, constraint=Constraint("regex", "(ab|ba|[0-9]{3}-)*x")
    ),
}
Parts = tuple[int | str, ...]
Ask = tuple[Parts, SamplingParams]
KINDS_OF_PROMPTS: dict[str, Parts] = {
    "text": (30,),
    "one image": (9, "a", 12),
    "ten images": (3, *"abcde", 4, *"fghia", 5),
    "an image at the end": (17, "a"),
    "an image at the beginning": ("b", 15),
}


@dataclass(frozen=True)
class Guesses:
    skill: float
    length: int = 8
    seed: int = 0
    branches: int = 0


def segments(d: Driver, parts: Parts, seed: int = 0) -> tuple[Segment, ...]:
    return tuple(
        d.image(picture(ord(part))) if isinstance(part, str) else words(1000 * seed + i, part)
        for i, part in enumerate(parts)
    )


def assist(d: Driver, answers: dict[str, list[int]], how: Guesses) -> Guesser:
    """Have the driver's engine draft from now on."""
    engine = d.engine
    guesser = Guesser(answers, how.skill, how.seed, how.branches)
    engine.drafting = Drafting(guesser, how.length, engine.scheduler.holdings, engine.metrics)
    return guesser


def said(d: Driver, request: str) -> list[TokenEvent]:
    """What left the engine, but for times."""
    return [replace(event, timings=None) for event in d.events[request]]


def compare(
    plain: Driver,
    assisted: Driver,
    asks: Sequence[Ask],
    how: Guesses,
) -> Guesser:
    """All at once on either engine."""
    for n, (parts, params) in enumerate(asks):
        plain.submit(segments(plain, parts, n), params)
    plain.run()
    answers = {request: plain.tokens(request) for request in plain.events}
    guesser = assist(assisted, answers, how)
    for n, (parts, params) in enumerate(asks):
        assisted.submit(segments(assisted, parts, n), params)
    assisted.run()
    for request in plain.events:
        assert said(assisted, request) == said(plain, request)
    assert not guesser.live
    assisted.assert_idle()
    return guesser


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("branches", [0, 3])
@pytest.mark.parametrize("overlaps", [False, True])
def test_an_answer_is_what_it_would_have_been(
    name: str, skill: float, overlaps: bool, branches: int
) -> None:
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    assisted.engine.overlaps = overlaps
    asks = [(parts, PARAMS[name]) for parts in KINDS_OF_PROMPTS.values()]
    guesser = compare(plain, assisted, asks, Guesses(skill, branches=branches))
    assert (guesser.right > 0) is (skill > 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*KINDS_OF_PROMPTS.values()]), st.sampled_from([*PARAMS.values()])
        ),
        min_size=1,
        max_size=5,
    ),
    st.builds(
        Guesses,
        st.sampled_from([0.3, 0.8, 1.0]),
        st.integers(1, 20),
        st.integers(0, 99),
        st.sampled_from([0, 1, 4]),
    ),
    st.integers(1, 64),
    st.sampled_from([10, 20, 60]),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_whatever_the_pressure_the_chunks_and_the_company(
    asks: Sequence[Ask],
    how: Guesses,
    budget: int,
    text_pages: int,
    overlaps: bool,
) -> None:
    options: dict[str, Any] = {
        "text_pages": text_pages,
        "max_num_batched_tokens": budget,
        "dtype": "int8",
    }
    plain, assisted = (Driver(build_tiny(tiny_config(**options))) for _ in range(2))
    assisted.engine.overlaps = overlaps
    compare(plain, assisted, asks, how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branches", [0, 2])
def test_windows_see_the_same_behind_a_draft(kind: str, branches: int) -> None:
    plain, assisted = (Driver(Engine(tiny_config(), windowed_model(KINDS[kind]))) for _ in range(2))
    asks = [(parts, LONG) for parts in KINDS_OF_PROMPTS.values()]
    assert compare(plain, assisted, asks, Guesses(0.8, 12, branches=branches)).right


def test_a_streaming_sequence_is_cut_where_it_would_have_been() -> None:
    streaming = Streaming(window=40, sinks=4, keep=16)
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    params = replace(LONG, max_tokens=120)
    request = plain.submit((words(1, 30),), params, streaming=streaming)
    plain.run()
    guesser = assist(assisted, {request: plain.tokens(request)}, Guesses(0.9))
    assert assisted.submit((words(1, 30),), params, streaming=streaming) == request
    assisted.run()
    assert said(assisted, request) == said(plain, request)
    usage = plain.last(request).usage
    assert guesser.right > 40 and usage is not None and usage.dropped_tokens > 40


def test_a_draft_takes_nobodys_pages() -> None:
    """Where the pool is full, steps go on without drafts."""
    options: dict[str, Any] = {"text_pages": 4, "dtype": "int8", "prefix_caching": False}
    plain, assisted = (Driver(build_tiny(tiny_config(**options))) for _ in range(2))
    asks = [((16,), replace(LONG, max_tokens=15)) for _ in range(2)]
    compare(plain, assisted, asks, Guesses(1.0))


def test_an_abort_in_the_middle_of_a_draft_leaves_nothing() -> None:
    d = Driver(build_tiny(tiny_config(dtype="int8")))
    d.engine.overlaps = True
    plain = Driver(build_tiny(tiny_config(dtype="int8")))
    answer = plain.ask(words(1, 20), params=LONG)
    guesser = assist(d, {"0": answer, "1": answer}, Guesses(1.0))
    first, second = (d.submit((words(1, 20),), LONG) for _ in range(2))
    while not guesser.right:
        d.step()
    d.abort(first)
    d.run()
    assert d.tokens(second) == answer and not guesser.live
    d.assert_idle()


@pytest.mark.parametrize("overlaps", [False, True])
def test_one_draft_follows_another(overlaps: bool) -> None:
    """Where steps overlap, too: none goes by without."""
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    assisted.engine.overlaps = overlaps
    drafted: list[bool] = []
    run = assisted.engine.runner.run

    def watch(batch: Batch, previous: Tensor | None = None) -> Logits | None:
        drafted.extend(chunk.draft is not None for chunk in batch.chunks if chunk.decodes)
        return run(batch, previous)

    assisted.engine.runner.run = watch  # type: ignore[method-assign]
    plain.submit((words(1, 30),), LONG)
    plain.run()
    guesser = assist(assisted, {"0": plain.tokens("0")}, Guesses(1.0, 8))
    guesser.shortest = 8
    assisted.submit((words(1, 30),), LONG)
    assisted.run()
    assert drafted == [True] * 5  # of 40 tokens the prompt brings one, each draft of 8 nine


@pytest.mark.parametrize("what", ["propose", "landed", "end"])
def test_a_drafter_that_fails_ends_no_answer(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    answers = {str(n): plain.ask(words(n, 20), params=LONG) for n in range(3)}
    guesser = assist(assisted, answers, Guesses(1.0))
    calls = []

    def fail(*_: object) -> None:
        calls.append(what)
        raise RuntimeError("no memory")

    monkeypatch.setattr(guesser, what, fail)
    for n in range(3):
        assert assisted.ask(words(n, 20), params=LONG) == answers[str(n)]
    assert len(calls) == 1 and "off from now on" in caplog.text
    assisted.assert_idle()


def test_what_drafts_did_is_counted() -> None:
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    compare(plain, assisted, [((9, "a", 12), LONG), ((30,), LONG)], Guesses(1.0))
    shown = assisted.engine.metrics.render().decode()
    for images in ("yes", "no"):
        labels = f'{{drafter="guesser",images="{images}"}}'
        counts = [
            float(line.rsplit(" ", 1)[1])
            for line in shown.splitlines()
            if line.startswith("mmserve:spec_decode_num") and labels in line and "_total" in line
        ]
        assert len(counts) == 3 and counts[1] == counts[2] > counts[0] > 0
    timings = assisted.events["0"][-1].timings
    assert timings is not None and timings.drafted == timings.accepted > 20


@example(1)
@given(st.integers(1, 12))
@settings(max_examples=5, deadline=None)
def test_an_answer_never_outgrows_its_limit(limit: int) -> None:
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    asks = [((30,), replace(LONG, max_tokens=limit))]
    compare(plain, assisted, asks, Guesses(1.0, 8))
    assert len(assisted.tokens("0")) == limit
