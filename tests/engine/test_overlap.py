"""LAUNCHED AHEAD = ONE STEP AT A TIME: a step that starts before the last one's tokens have landed
shows nowhere but in the time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.engine import engine as engine_module
from mmserve.engine import figures
from mmserve.engine.grammar import Grammars
from mmserve.engine.model_runner import Logits
from mmserve.engine.transfer import resolve_pending
from mmserve.request import (
    Constraint,
    FinishReason,
    SamplingParams,
    Segment,
    TextSegment,
    TokenEvent,
)
from mmserve.scheduler.batch import Batch
from mmserve.tokenizer import Tokenizer
from tests.engine.driver import GREEDY, Driver, picture, tiny_driver, words
from tests.engine.test_engine import fragile
from tests.engine.tiny import END, tiny_tokenizer

SEEDED = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=5)
FORM = Constraint("regex", r"[a-d]{2}(-[a-d]{1,3}){0,4}(=[0-9]+)?")
KINDS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalised": replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.7),
    "counted": replace(SEEDED, presence_penalty=1.2, frequency_penalty=0.5, top_k=40),
    "told": replace(GREEDY, logprobs=2, logit_bias={70: 5.0}),
    "stopped": replace(SEEDED, stop_token_ids=tuple(range(3, 259, 6))),
    "worded": replace(SEEDED, stop=tuple("aeot"), logit_bias=dict.fromkeys(range(60, 100), 1.5)),
    "endless": replace(SEEDED, logit_bias={END: 9.0}, ignore_eos=True),
    "short": replace(SEEDED, logit_bias={END: 6.0}),
    "formed": replace(SEEDED, constraint=FORM, logprobs=2, frequency_penalty=0.5),
}


GRAMMARS = Grammars(Tokenizer(tiny_tokenizer(), ["<|im_end|>"]))  # compiled once for all engines


@dataclass(frozen=True)
class Ask:
    """A request in small: a number is so many text tokens, a letter an image. `abort_at`: steps
    after which it is aborted."""

    parts: tuple[int | str, ...]
    kind: str = "greedy"
    output: int = 8
    seed: int = 0
    prefill_only: bool = False
    abort_at: int | None = None

    @property
    def params(self) -> SamplingParams:
        return replace(KINDS[self.kind], max_tokens=self.output)

    def submit(self, d: Driver) -> str:
        segments: list[Segment] = [
            d.image(picture(ord(part)))
            if isinstance(part, str)
            else words(1000 * self.seed + i, part)
            for i, part in enumerate(self.parts)
        ]
        return d.submit(tuple(segments), self.params, prefill_only=self.prefill_only)


def driver(overlaps: bool = True, **options: Any) -> Driver:
    made = tiny_driver(overlaps, **options)
    made.engine.grammars = GRAMMARS
    return made


def step(d: Driver) -> None:
    d.step()
    radix = d.engine.scheduler.radix
    for node in radix.nodes() if radix else ():
        tokens = [key[-1] if isinstance(key, tuple) else key for key in node.keys]
        assert not any(isinstance(t, int) and t < 0 for t in tokens), "a pending token is cached"


def run(d: Driver, asks: list[Ask], stagger: int) -> list[str]:
    """Submit one after the other, abort in time, run to the end."""
    ids: list[str] = []
    steps = 0
    while len(ids) < len(asks) or d.engine.has_work:
        if len(ids) < len(asks) and steps >= stagger * len(ids):
            ids.append(asks[len(ids)].submit(d))
        for ask, request in zip(asks, ids, strict=False):
            if ask.abort_at is not None and steps >= ask.abort_at:
                d.abort(request)
        step(d)
        steps += 1
        assert steps < 5000, figures.describe(d.engine.scheduler)
    d.assert_idle()
    return ids


def shown(event: TokenEvent) -> tuple[Any, ...]:
    """All that does not depend on time or company."""
    logprobs = [
        (entry.token_id, entry.text, [token for token, _, _ in entry.top])
        for entry in event.logprobs
    ]
    reason, counts = event.finish_reason, event.usage and event.usage.completion_tokens
    return event.text, event.token_ids, logprobs, reason, event.stop_string, event.error, counts


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    parts: list[int | str] = []
    for _ in range(draw(st.integers(0, 2))):
        parts.append(draw(st.sampled_from([1, 3, 15, 16, 17])))
        parts += draw(st.lists(st.sampled_from("abc"), max_size=2))
    return Ask(
        (*parts, draw(st.sampled_from([1, 2, 9, 16, 33]))),
        draw(st.sampled_from(sorted(KINDS))),
        draw(st.sampled_from([1, 1, 2, 5, 9, 25])),
        draw(st.integers(0, 2)),
        draw(st.integers(0, 5)) == 0,
        draw(st.none() | st.none() | st.integers(0, 25)),
    )


CROWD = [Ask((20, "a", 9), kind, 40, n) for n, kind in enumerate(KINDS)]


@given(
    st.lists(asks(), min_size=1, max_size=7),
    st.sampled_from([1, 7, 40, 300]),
    st.sampled_from([7, 10, 60]),
    st.sampled_from([8, 20]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
@example(CROWD, 300, 100, 20, 2, True, 0)
@example(CROWD, 20, 10, 8, 1, True, 1)
@example([replace(a, abort_at=9 + n) for n, a in enumerate(CROWD)], 64, 10, 8, 1, True, 0)
def test_events_are_those_of_one_step_at_a_time(
    wanted: list[Ask],
    budget: int,
    text_pages: int,
    vision_pages: int,
    images_a_step: int,
    prefix_caching: bool,
    stagger: int,
) -> None:
    """With aborts a request says a part of what it says undisturbed, and no other is disturbed."""
    undisturbed = driver(False)
    expected = run(undisturbed, [replace(ask, abort_at=None) for ask in wanted], stagger)
    d = driver(
        text_pages=text_pages,
        vision_pages=vision_pages,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=budget,
        max_images_per_step=images_a_step,
    )
    got = run(d, wanted, stagger)
    for request, quiet in zip(got, expected, strict=True):
        last = d.last(request)
        events = [shown(event) for event in d.events[request]]
        if last.finish_reason is FinishReason.ABORT:
            said, whole = d.tokens(request), undisturbed.tokens(quiet)
            assert said == whole[: len(said)] and undisturbed.text(quiet).startswith(
                d.text(request)
            )
            assert last.usage is not None and last.usage.completion_tokens == len(said)
        else:
            assert events == [shown(event) for event in undisturbed.events[quiet]]


def test_the_crowd_ends_in_every_way_and_is_preempted() -> None:
    """The examples above mean something."""
    d = driver(text_pages=10, vision_pages=8, max_num_batched_tokens=20)
    ids = run(d, CROWD, 1)
    ends = [(d.last(i).finish_reason, d.last(i).stop_string is not None) for i in ids]
    assert {
        (FinishReason.STOP, True),
        (FinishReason.STOP, False),
        (FinishReason.LENGTH, False),
    } == {*ends}
    m = d.engine.metrics
    preemptions, generated = (
        next(iter(c.collect())).samples[0].value for c in (m.num_preemptions, m.generation_tokens)
    )
    assert preemptions >= 3
    assert generated == sum(len(d.tokens(i)) for i in ids)


# -- what is launched, and when -------------------------------------------------------------------


class Watched:
    """Notes each launch: how many rows it samples, how many of its tokens are pending."""

    def __init__(self, d: Driver) -> None:
        self.launches: list[tuple[int, int]] = []
        self._run = d.engine.runner.run
        d.engine.runner.run = self  # type: ignore[method-assign]

    def __call__(self, batch: Batch, previous: Tensor | None = None) -> Logits | None:
        ids = [i for c in batch.chunks for i in c.seq.token_ids[c.start : c.start + c.count]]
        pending = sum(i < 0 for i in ids)
        assert not pending or (previous is not None and len(previous) >= -min(ids))
        self.launches.append((sum(c.samples for c in batch.chunks), pending))
        return self._run(batch, previous)


def test_every_decode_step_is_launched_before_its_token_is_known_and_none_past_the_limit() -> None:
    d = driver()
    watched = Watched(d)
    request = d.submit((words(1, 9),), replace(GREEDY, max_tokens=6, ignore_eos=True))
    d.step()
    assert d.engine.has_work and not d.tokens(request)
    for said in range(1, 6):
        d.step()
        assert len(watched.launches) == said + 1 and len(d.tokens(request)) == said
    d.run()
    assert watched.launches == [(1, 0)] + [(1, 1)] * 5
    assert len(d.tokens(request)) == 6


def test_one_token_is_launched_behind_an_end_that_nobody_could_know() -> None:
    quiet = driver(False)
    prompt = (words(1, 9),)
    params = replace(GREEDY, max_tokens=20)
    tokens = quiet.ask(*prompt, params=params)
    stop = replace(params, stop_token_ids=(tokens[4],))
    count = tokens.index(tokens[4]) + 1
    d = driver()
    watched = Watched(d)
    assert d.ask(*prompt, params=stop) == tokens[:count]
    assert len(watched.launches) == count + 1
    d.assert_idle()


@pytest.mark.parametrize("count", [5, 6, 7, 8, 22, 23])
def test_the_next_turn_finds_what_it_would_have_found(count: int) -> None:
    """The stop token, read by a step launched behind the end, does not fill a cached page."""

    params = SamplingParams(max_tokens=40, seed=count, ignore_eos=True)
    whole = driver(False).ask(words(1, 9), params=params)
    assert whole[count] not in whole[:count]

    def cached(overlaps: bool) -> int:
        d = driver(overlaps)
        stop = replace(params, stop_token_ids=(whole[count],))
        said = d.ask(words(1, 9), params=stop)
        assert said == whole[: count + 1]
        request = d.submit((words(1, 9), TextSegment(tuple(said)), words(2, 20)))
        d.run()
        usage = d.last(request).usage
        assert usage is not None
        return usage.cached_tokens

    assert cached(True) == cached(False)


def test_an_aborted_request_leaves_a_flight_behind_that_lands_without_it() -> None:
    d = driver()
    request, other = (d.submit((words(n, 30),), replace(GREEDY, max_tokens=20)) for n in (1, 2))
    while len(d.tokens(request)) < 3:
        d.step()
    d.abort(request)
    usage = d.engine._outbox[-1][1].usage
    assert usage is not None and usage.completion_tokens == 3
    d.run()
    assert len(d.tokens(request)) == 3 and len(d.tokens(other)) == 20
    d.assert_idle()


def test_after_a_step_that_raises_the_flight_lands_unheard_and_the_engine_goes_on() -> None:
    d = driver()
    run_whole, calls = d.engine.runner.run, 0

    def fails_once(batch: Batch, previous: Tensor | None = None) -> Logits | None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("broken")
        return run_whole(batch, previous)

    d.engine.runner.run = fails_once  # type: ignore[method-assign]
    request = d.submit((words(1, 9),))
    with pytest.raises(RuntimeError):
        d.run()
    d.engine.abort_all(FinishReason.ERROR, "broken")
    d.run()
    assert d.last(request).finish_reason is FinishReason.ERROR and len(d.tokens(request)) == 2
    d.assert_idle()
    assert d.ask(words(1, 9)) == driver(False).ask(words(1, 9))


def test_an_image_that_fails_beside_a_flight_ends_its_own_requests_only() -> None:
    d, bad = fragile(max_images_per_step=1)
    d.engine.overlaps = True
    good = d.submit((words(1, 9), d.image(picture(1)), words(2, 9)))
    for _ in range(3):
        d.step()
    doomed = d.submit((words(3, 9), bad, words(4, 4)))
    d.run()
    assert d.last(doomed).finish_reason is FinishReason.ERROR and d.tokens(doomed) == []
    quiet = driver(False)
    assert d.tokens(good) == quiet.ask(words(1, 9), quiet.image(picture(1)), words(2, 9))
    d.assert_idle()


def test_overlap_can_be_turned_off_between_two_steps() -> None:
    d = driver()
    request = d.submit((words(1, 9),))
    for _ in range(3):
        d.step()
    d.engine.overlaps = False
    d.step()
    assert d.engine._flight is None and len(d.tokens(request)) == 4
    d.run()
    assert d.tokens(request) == driver(False).ask(words(1, 9))


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_time_of_a_busy_engine_is_all_charged_once(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[float] = []

    def tick() -> float:
        ticks.append(len(ticks) + 1.0)
        return ticks[-1]

    d = driver(overlaps, max_num_batched_tokens=16)
    request = d.submit((words(1, 40),))
    for module in (engine_module, figures):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=tick))
    steps = 0
    while d.engine.has_work:
        d.step()
        steps += 1
    assert len(d.tokens(request)) == 8
    m = d.engine.metrics
    decode, prefill = (
        next(iter(c.collect())).samples[0].value for c in (m.decode_seconds, m.prefill_seconds)
    )
    assert decode > 0 and prefill > 0
    # From a landing to the next step's start a tick passes in which nothing is in the air.
    idle = 0 if overlaps else steps - 1
    assert decode + prefill == ticks[-1] - ticks[0] - idle


def test_pending_ids_are_rows_of_the_step_before() -> None:
    ids, previous = torch.tensor([5, -1, 263, -3]), torch.tensor([100, 101, 102])
    assert resolve_pending(ids, previous).tolist() == [5, 100, 263, 102]
    assert resolve_pending(ids[:1], previous[:0]).tolist() == [5]
    assert resolve_pending(ids[:1], None).tolist() == [5]
