"""A request that outgrows its window goes on as a fresh one with what was kept of it.

CUT = ASKED ANEW, ALONE = BATCHED, ABORTED = NEVER WAS; and where images see nothing but themselves,
a cut never looks at one again.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmserve.errors import RequestError
from mmserve.request import (
    Constraint,
    FinishReason,
    SamplingParams,
    Segment,
    Streaming,
    TextSegment,
    Usage,
)
from mmserve.streaming import cut
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.driver import tiny_driver as driver
from tests.engine.test_tiers import driver as tiered
from tests.engine.tiny import END, IMAGE_TOKENS, MAX_LEN, tiny_model

LETTERS = {letter: picture(ord(letter)) for letter in "abcdef"}
ENDLESS = replace(GREEDY, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> Driver:
    """Knows nothing of streaming, and finds nothing again."""
    return driver(prefix_caching=False, vision_pages=80)


@functools.cache
def digest(letter: str) -> bytes:
    return driver().image(LETTERS[letter]).image.digest


@dataclass(frozen=True)
class Ask:
    """A prompt in small: a number is that many text tokens, a letter an image."""

    parts: tuple[int | str, ...]
    window: int
    sinks: int
    keep: int
    images: str | int | None = None
    output: int = 60
    seed: int = 0

    @property
    def streaming(self) -> Streaming:
        images: Any = self.images
        if isinstance(images, str):
            images = frozenset(map(digest, images))
        return Streaming(self.window, self.sinks, self.keep, images)

    @property
    def params(self) -> SamplingParams:
        return replace(ENDLESS, max_tokens=self.output)

    def segments(self, d: Driver) -> tuple[Segment, ...]:
        return tuple(
            d.image(LETTERS[part]) if isinstance(part, str) else words(100 * self.seed + i, part)
            for i, part in enumerate(self.parts)
        )

    def submit(self, d: Driver) -> str:
        return d.submit(self.segments(d), self.params, streaming=self.streaming)


def text_tokens(segments: tuple[Segment, ...]) -> int:
    return sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment))


def asked_anew(
    plain: Driver, segments: tuple[Segment, ...], streaming: Streaming, output: int
) -> tuple[list[int], int, int]:
    """An answer as a chain of requests, each with what was kept of the one before; and how many
    text tokens and images were not."""
    said: list[int] = []
    dropped = [0, 0]
    while len(said) < output:
        if text_tokens(segments) > streaming.window:
            rest = cut(segments, streaming, streaming.keep)
            segments = rest.segments
            dropped[0] += rest.dropped_tokens
            dropped[1] += rest.dropped_images
        room = streaming.window + 1 - text_tokens(segments)
        params = replace(ENDLESS, max_tokens=min(room, output - len(said)))
        new = plain.ask(*segments, params=params)
        segments = (*segments, TextSegment(tuple(new)))
        said += new
    return said, dropped[0], dropped[1]


def anew(plain: Driver, ask: Ask) -> tuple[list[int], int, int]:
    return asked_anew(plain, ask.segments(plain), ask.streaming, ask.output)


def usage(d: Driver, request: str) -> Usage:
    found = d.last(request).usage
    assert found is not None
    return found


def assert_anew(plain: Driver, d: Driver, asks: list[Ask]) -> None:
    sent = [(ask.submit(d), ask) for ask in asks]
    d.run()
    d.assert_idle()
    for request, ask in sent:
        expected, tokens, images = anew(plain, ask)
        assert d.tokens(request) == expected
        got = usage(d, request)
        assert (got.dropped_tokens, got.dropped_images) == (tokens, images)
        assert got.completion_tokens == len(expected)
        assert d.last(request).finish_reason is FinishReason.LENGTH


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    window = draw(st.sampled_from([17, 32, 33, 50]))
    sinks = draw(st.sampled_from([0, 1, 4, 15]))
    keep = draw(st.integers(1, window - sinks - 1))
    parts: list[int | str] = []
    for _ in range(draw(st.integers(0, 3))):
        parts.append(draw(st.sampled_from([1, 3, 9, 16])))
        parts += draw(st.lists(st.sampled_from("abcd"), max_size=2))
    images = draw(st.sampled_from([None, 0, 1, 2, "ac"]))
    output = draw(st.integers(1, 90))
    seed = draw(st.integers(0, 2))
    return Ask(
        (*parts, draw(st.sampled_from([1, 2, 16]))), window, sinks, keep, images, output, seed
    )


CROWD = [Ask((16, "a", 16, "b"), 32, 4, 10, n, 90, n or 0) for n in (None, 0, 1)]


@given(
    st.lists(asks(), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([5, 9, 60]),
    st.sampled_from([14, 40]),
    st.sampled_from([7, 64]),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
@example(CROWD, True, 9, 14, 7, True)
@example([Ask((40, "a", 20), 20, 4, 10, None, 40)], False, 60, 14, 64, True)
def test_cut_equals_asked_anew_whatever_the_company_pressure_and_launching_ahead(
    plain: Driver,
    wanted: list[Ask],
    overlaps: bool,
    text_pages: int,
    vision_pages: int,
    budget: int,
    prefix_caching: bool,
) -> None:
    d = driver(
        overlaps,
        text_pages=text_pages,
        vision_pages=vision_pages,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=budget,
    )
    assert_anew(plain, d, wanted)


def test_cut_equals_asked_anew_where_what_is_pushed_out_comes_back_from_below(
    plain: Driver,
) -> None:
    d = tiered(tiny_model(), text_pages=9, vision_pages=8, max_num_batched_tokens=7)
    for _ in range(2):
        assert_anew(plain, d, CROWD)


def test_an_answer_may_be_many_times_longer_than_the_context(plain: Driver) -> None:
    d = driver()
    ask = Ask((20, "a", 10), window=150, sinks=8, keep=20, output=2 * MAX_LEN)
    assert_anew(plain, d, [ask])


@pytest.mark.parametrize("images", [None, 1, "a"])
def test_a_cut_neither_encodes_nor_writes_an_image(images: str | int | None) -> None:
    d = driver()
    request = Ask((16, "a", 16, "b", 10), 50, 4, 8, images, output=200).submit(d)
    while not d.tokens(request):
        d.step()
    before = d.counts()
    assert set(before) == {2}
    d.run()
    assert usage(d, request).dropped_tokens > 150 and d.counts() == before


def test_what_a_cut_drops_can_be_taken_by_others_at_once() -> None:
    d = driver(text_pages=60)
    request = Ask((16, "a", 16, "b", 10), 50, 4, 8, 0, output=12).submit(d)
    index = d.engine.runner.vision[0].index
    pools = d.engine.scheduler.holdings
    most = 0
    while d.engine.has_work:
        d.step()
        most = max(most, 60 - pools.text[0].num_free - pools.cached_pages(0))
    assert index.num_referenced == 0 and most == 4  # 50 tokens
    assert usage(d, request).dropped_images == 2


def test_without_room_in_the_context_for_its_window_it_is_cut_where_the_context_ends(
    plain: Driver,
) -> None:
    d = driver()
    parts = (10, *"abcdef", 5)
    ask = Ask(parts, window=10_000, sinks=2, keep=9_000, output=700)
    request = ask.submit(d)
    d.run()
    window = MAX_LEN - 6 * IMAGE_TOKENS - 1
    bounded = replace(ask, window=window, keep=(window - 2) // 2)
    assert d.tokens(request) == anew(plain, bounded)[0]


def test_sinks_that_fill_the_context_leave_an_end() -> None:
    d = driver()
    request = Ask((400, *"abcde", 5), window=10_000, sinks=9_000, keep=5, output=700).submit(d)
    d.run()
    assert d.last(request).finish_reason is FinishReason.LENGTH
    assert usage(d, request).dropped_tokens == 0
    assert len(d.tokens(request)) == MAX_LEN - 405 - 5 * IMAGE_TOKENS


def test_counts_of_the_prompt_are_those_of_the_prompt() -> None:
    d = driver()
    ask = Ask((16, "a", 16, "b", 10), 60, 4, 8, 1)
    first = usage(d, ran(d, replace(ask, output=2)))
    again, long = usage(d, ran(d, replace(ask, output=2))), usage(d, ran(d, ask))
    assert first.vision_misses == 2 and first.dropped_tokens == 0
    assert long.dropped_tokens > 0 and long.dropped_images == 1
    assert replace(long, completion_tokens=2, dropped_tokens=0, dropped_images=0) == again
    assert again.prompt_tokens == 42 + 2 * IMAGE_TOKENS and again.vision_hits == 2


class Scripted:
    """Makes an engine say given tokens, whatever it has read; without any, all are as likely."""

    def __init__(self, d: Driver, tokens: list[int]) -> None:
        self.tokens = tokens
        self.run = d.engine.runner.run
        d.engine.runner.run = self  # type: ignore[method-assign]

    def __call__(self, batch: Any, previous: Any = None) -> Any:
        logits = self.run(batch, previous)
        if logits is None:
            return None
        values = logits.values * 0
        for row, chunk in zip(values, logits.chunks, strict=True):
            if self.tokens:
                said = chunk.seq.num_output_tokens + chunk.seq.num_pending
                row[self.tokens[said % len(self.tokens)]] = 1
        return logits._replace(values=values)


def ran(d: Driver, ask: Ask) -> str:
    request = ask.submit(d)
    d.run()
    return request


def test_text_stop_strings_log_probabilities_and_seeds_go_on_across_cuts() -> None:
    """Whatever is said is one answer: the model here says the same whatever it has read."""
    said = "".join(chr(65 + i % 26) for i in range(150)) + "ä€😀 stop here"
    for overlaps in (False, True):
        d = driver(overlaps)
        Scripted(d, d.engine.tokenizer.encode(said))
        params = replace(ENDLESS, max_tokens=400, stop=("stop",), logprobs=0)
        request = d.submit((words(1, 9),), params, streaming=Streaming(40, 4, 10))
        d.run()
        assert d.text(request) == said[: said.index(" stop") + 1]
        assert d.last(request).finish_reason is FinishReason.STOP
        assert all(e.logprobs for e in d.events[request] if e.token_ids)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_answer_of_a_given_form_keeps_it_across_cuts(overlaps: bool) -> None:
    d = driver(overlaps)
    form = Constraint("regex", "([a-d]{3}-){30}")
    params = replace(GREEDY, max_tokens=600, constraint=form)
    request = d.submit((words(1, 9),), params, streaming=Streaming(40, 4, 10))
    d.run()
    assert usage(d, request).dropped_tokens > 0
    assert d.last(request).finish_reason is FinishReason.STOP
    assert re.fullmatch(form.text, d.text(request))


@pytest.mark.parametrize("overlaps", [False, True])
def test_penalties_count_everything_that_was_said(overlaps: bool) -> None:
    """Where all tokens are as likely, the next one is always one that was not said yet."""
    d = driver(overlaps)
    Scripted(d, [])
    params = replace(ENDLESS, max_tokens=200, frequency_penalty=2)
    request = d.submit((words(1, 9),), params, streaming=Streaming(30, 4, 10))
    d.run()
    assert len(set(d.tokens(request))) == 200
    assert usage(d, request).dropped_tokens > 100


def test_an_end_behind_the_window_drops_nothing() -> None:
    for overlaps in (False, True):
        d = driver(overlaps)
        params = replace(GREEDY, max_tokens=9, logit_bias={END: 100.0})
        request = d.submit((words(1, 30),), params, streaming=Streaming(30, 4, 10))
        d.run()
        assert d.tokens(request) == [END] and usage(d, request).dropped_tokens == 0


@given(st.integers(0, 90), st.booleans(), st.sampled_from([10, 60]))
@settings(max_examples=8, deadline=None)
def test_aborted_at_any_moment_it_never_was(steps: int, overlaps: bool, pages: int) -> None:
    d = driver(overlaps, text_pages=pages, vision_pages=10)
    gone = Ask((16, "a", 16, "b"), 40, 4, 8, 1, output=150, seed=1).submit(d)
    ask = Ask((9, "c", 5, "a"), 33, 3, 9, None, output=50)
    request = ask.submit(d)
    for _ in range(steps):
        d.step()
    d.abort(gone)
    d.run()
    d.assert_idle()
    alone = driver()
    assert d.tokens(request) == alone.tokens(ran(alone, ask))


@pytest.mark.parametrize(
    ("streaming", "words_"),
    [
        (Streaming(20, -1, 5), "-1 sinks"),
        (Streaming(20, 0, 0), "0 kept"),
        (Streaming(20, 12, 8), "window of 20"),
        (Streaming(20, 2, 8, -1), "-1 images"),
    ],
)
def test_nonsense_is_refused_by_name(streaming: Streaming, words_: str) -> None:
    with pytest.raises(RequestError, match=words_) as caught:
        driver().submit((words(1, 9),), streaming=streaming)
    assert caught.value.param == "session_policy"
