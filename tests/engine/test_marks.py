"""An image that was marked as forgotten: text that saw it stays, and nothing new sees it.

MARKED = MASKED: each request equals one dense pass in which the text behind some border is blind to
the image; NO POLLUTION: whoever shows the image gets what it would get of an empty cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.engine.engine import Engine
from mmserve.errors import RequestError
from mmserve.request import ImageSegment, Segment, Streaming, TextSegment, Usage
from mmserve.scheduler import holdings, marks
from mmserve.sequence import Sequence
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.driver import tiny_driver as driver
from tests.engine.test_streaming_families import segments as rendered
from tests.engine.test_streaming_families import serve
from tests.engine.test_tiers import driver as tiered
from tests.engine.test_windows import KINDS as WINDOWED
from tests.engine.test_windows import windowed_model
from tests.engine.tiny import IMAGE_TOKENS, MAX_LEN, tiny_config, tiny_model
from tests.model import families
from tests.model.dense import embed, image_mask

LETTERS = {letter: picture(ord(letter)) for letter in "abcd"}
SHORT = replace(GREEDY, max_tokens=9, ignore_eos=True)


def showing(segment: Segment) -> Segment:
    return replace(segment, marked=False) if isinstance(segment, ImageSegment) else segment


@pytest.fixture(scope="module")
def plain() -> Driver:
    """Knows nothing of what was cached."""
    return driver(prefix_caching=False, vision_pages=80)


@pytest.fixture(scope="module")
def dense() -> Any:
    return tiny_model()


def logits_of(d: Driver, request: str) -> Tensor:
    """Those that its tokens were chosen from, not what was launched ahead."""
    return torch.stack(d.logits[request])[: len(d.tokens(request))]


def assert_same(d: Driver, request: str, plain: Driver, segments: tuple[Segment, ...]) -> None:
    alone = plain.submit(segments, SHORT)
    plain.run()
    assert d.tokens(request) == plain.tokens(alone)
    torch.testing.assert_close(logits_of(d, request), logits_of(plain, alone), rtol=0, atol=1e-3)


@torch.no_grad()
def masked(dense: Any, segments: tuple[Segment, ...], borders: Mapping[int, int | None]) -> Tensor:
    """Logits [T, vocab] of one plain pass; a marked segment's number leads to the first text token
    that is blind to it, or to None: it is not there."""
    shown = [(n, s) for n, s in enumerate(segments) if borders.get(n, 0) is not None]
    embeddings, image_of = embed(dense, [s for _, s in shown])
    seen, image = image_mask(image_of), torch.tensor(image_of)
    index = (image == 0).cumsum(0) - 1
    images = [(n, s) for n, s in shown if isinstance(s, ImageSegment)]
    for k, (n, segment) in enumerate(images, 1):
        if segment.marked:
            blind = (image == 0) & (index >= (borders[n] or 0))
            seen &= ~(blind[:, None] & (image == k)[None, :])
    out = dense.lm(
        inputs_embeds=embeddings[None],
        attention_mask=torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None],
        position_ids=torch.arange(len(image_of))[None],
        use_cache=False,
    )
    logits: Tensor = out.logits[0].float()
    return logits


class Talk:
    """A conversation: what was said so far, turn by turn, and which of its images are marked."""

    def __init__(self, d: Driver) -> None:
        self.d = d
        self.said: list[Segment] = []
        self.usage = Usage()
        self.moved = False  # whether the last answer's borders were

    def say(self, *parts: int | str, params: Any = SHORT, **options: Any) -> Sequence:
        """A turn of words and images; its sequence."""
        for i, part in enumerate(parts):
            new = words(50 * len(self.said) + i, part) if isinstance(part, int) else self.see(part)
            self.said.append(new)
        request = self.d.submit(tuple(self.said), params, **options)
        seq = self.d.engine._live[request].seq
        decided: set[tuple[tuple[int, int | None], ...]] = set()

        def settle(each: Sequence, reach: Any) -> None:
            marks.settle(each, reach)
            if each is seq:
                decided.add(tuple(each.marks.items()))

        with patch.object(holdings, "settle", settle):
            self.d.run()
        self.moved = len(decided) > 1
        self.prompt, self.tokens = tuple(self.said), self.d.tokens(request)
        self.logits = logits_of(self.d, request)
        self.said.append(TextSegment(tuple(self.tokens)))
        usage = self.d.last(request).usage
        assert usage is not None
        self.usage = usage
        return seq

    def see(self, letter: str) -> ImageSegment:
        return self.d.image(LETTERS[letter])

    def mark(self, letter: str) -> None:
        digest = self.see(letter).image.digest
        for n, segment in enumerate(self.said):
            if isinstance(segment, ImageSegment) and segment.image.digest == digest:
                self.said[n] = replace(segment, marked=True)

    def assert_masked(self, dense: Any, borders: Mapping[int, int | None]) -> None:
        """The last answer is the masked pass's; nothing is said of one that was interrupted and
        whose text was evicted meanwhile, which goes on behind other borders."""
        if self.moved:
            return
        whole = (*self.prompt, TextSegment(tuple(self.tokens[:-1])))
        logits = masked(dense, whole, borders)[-len(self.tokens) :]
        torch.testing.assert_close(self.logits, logits, rtol=0, atol=1e-3)
        assert self.tokens == logits.argmax(-1).tolist()


def test_text_that_saw_it_stays_and_nothing_new_sees_it(dense: Any) -> None:
    d = driver()
    talk = Talk(d)
    talk.say(20, "a", 30, "b", 14)
    before = d.counts()
    talk.mark("a")
    seq = talk.say(20)
    text = 20 + 30 + 14 + 9
    border = (text - 1) // 16 * 16  # the turn's, in whole pages
    assert seq.marks == {1: border}
    assert talk.usage.cached_tokens == border + IMAGE_TOKENS
    assert (talk.usage.vision_hits, talk.usage.vision_misses) == (1, 0)
    assert d.counts() == before
    talk.assert_masked(dense, seq.marks)
    d.assert_idle()


def test_later_turns_find_what_did_not_see_it_and_images_are_marked_one_after_the_other(
    dense: Any,
) -> None:
    d = driver()
    talk = Talk(d)
    talk.say(20, "a", 30, "b", 14, "c", 20)
    marks: list[dict[int, int | None]] = []
    for letter in "abc":
        talk.mark(letter)
        for count in (25, 7):
            before = sum(len(s.token_ids) for s in talk.said if isinstance(s, TextSegment))
            seq = talk.say(count)
            assert talk.usage.cached_tokens - talk.usage.cached_image_tokens >= before - 16
            talk.assert_masked(dense, seq.marks)
            marks.append(dict(seq.marks))
    assert marks[0] == marks[1] and len(marks[2]) == 2 and marks[4] == marks[5]
    borders = [border or 0 for border in marks[5].values()]
    assert borders == sorted(set(borders)), "each has a border of its own"
    assert d.counts() == (3, 3, 3)


def test_a_cache_that_does_not_reach_it_leaves_it_out(plain: Driver) -> None:
    talk = Talk(driver())
    talk.say(20, "a", 30, "b", 14)
    assert talk.d.engine.scheduler.radix is not None
    talk.d.engine.scheduler.radix.clear()
    talk.mark("a")
    seq = talk.say(20)
    assert seq.marks == {1: None}
    without = [s for s in talk.prompt if not (isinstance(s, ImageSegment) and s.marked)]
    assert talk.tokens == plain.ask(*without, params=SHORT)
    again = talk.say(5)
    assert again.marks == {1: None} and talk.usage.cached_tokens > 64, "nor is it looked for again"


def test_an_image_that_was_thrown_out_is_not_looked_at_to_be_forgotten() -> None:
    d = driver()
    talk = Talk(d)
    talk.say(20, "a", 30)
    d.engine.runner.vision[0].index.clear()
    before = d.counts()
    talk.mark("a")
    talk.say(20)
    assert (d.counts()[0], d.counts()[2]) == (before[0], before[2])
    assert d.engine.runner.vision[0].index.num_used == 0


def test_who_shows_the_image_gets_what_an_empty_cache_would_give(plain: Driver) -> None:
    talk = Talk(driver())
    talk.say(20, "a", 30, "b", 14)
    shown = list(talk.said)
    talk.mark("a")
    talk.say(20)
    for more in (talk.said[-2:-1], [*talk.said[-2:], words(7, 20)]):
        asked = (*shown, *more)
        request = talk.d.submit(asked, SHORT)
        talk.d.run()
        assert_same(talk.d, request, plain, asked)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from([1, 7, 16, 20, 33]), st.sampled_from(["", "a", "b", "cd"])),
            st.sampled_from("abcd"),
        ),
        min_size=2,
        max_size=8,
    ),
    st.booleans(),
    st.sampled_from([12, 24, 100]),
    st.sampled_from([7, 64]),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
@example([(16, ""), (20, "a"), "a", (20, ""), (1, ""), (20, "")], True, 12, 7, False)  # preempted
def test_marked_equals_masked_whatever_the_pressure_and_the_company(
    dense: Any,
    plain: Driver,
    turns: list[tuple[int, str] | str],
    overlaps: bool,
    text_pages: int,
    budget: int,
    tiers: bool,
) -> None:
    """A letter alone marks that image; beside each turn another conversation shows all of it."""
    d = driver(overlaps, text_pages=text_pages, max_num_batched_tokens=budget)
    if tiers:  # what is pushed out of the pool comes back from below
        d = tiered(tiny_model(), text_pages=text_pages, max_num_batched_tokens=budget)
    talk = Talk(d)
    for turn in turns:
        if isinstance(turn, str):
            talk.mark(turn)
            continue
        count, letters = turn
        if sum(len(s.token_ids) for s in talk.said if isinstance(s, TextSegment)) > 120:
            break
        other = (*map(showing, talk.said), words(9, count))
        beside = d.submit(other, SHORT)
        seq = talk.say(count, *letters, 3)
        talk.assert_masked(dense, seq.marks)
        assert_same(d, beside, plain, other)
        d.assert_idle()


def test_an_answer_that_outgrows_its_window_forgets_it_altogether(plain: Driver) -> None:
    talk = Talk(driver())
    talk.say(20, "a", 30, "b", 14)
    talk.mark("a")
    long = replace(SHORT, max_tokens=80)
    seq = talk.say(20, params=long, streaming=Streaming(100, 4, 20))
    assert not seq.gaps and talk.usage.dropped_images == 0
    said = [t for s in talk.prompt if isinstance(s, TextSegment) for t in s.token_ids]
    said += talk.tokens[:8]  # 93 of the prompt, and the one that is too much
    cut = (TextSegment(tuple(said[:4])), talk.see("b"), TextSegment(tuple(said[-20:])))
    assert plain.ask(*cut, params=replace(SHORT, max_tokens=20)) == talk.tokens[8:28]


def test_its_place_counts_against_the_context() -> None:
    d = driver()
    talk = Talk(d)
    talk.say(20, "a", 30)
    talk.mark("a")
    talk.say(MAX_LEN - 59 - IMAGE_TOKENS - 5, params=replace(SHORT, max_tokens=None))
    assert len(talk.tokens) == 5
    with pytest.raises(RequestError, match="512"):
        talk.say(1)


def test_where_images_see_each_other_it_is_refused(tmp_path: Path) -> None:
    d = serve(families.build("llava", tmp_path))
    prompt = rendered(d, "What?", families.picture(3))
    marked = tuple(replace(s, marked=True) if isinstance(s, ImageSegment) else s for s in prompt)
    with pytest.raises(RequestError, match="recomputed"):
        d.submit(marked, SHORT)


@pytest.mark.parametrize("kinds", WINDOWED.values(), ids=WINDOWED)
def test_layers_with_windows_find_and_pollute_nothing_wrongly(kinds: tuple[str, ...]) -> None:
    d, plain = (
        Driver(Engine(tiny_config(prefix_caching=caching), windowed_model(kinds)))
        for caching in (True, False)
    )
    talk = Talk(d)
    talk.say(20, "a", 30, "b", 40)
    before = d.counts()
    talk.mark("a")
    for count in (20, 33):
        shown = (*map(showing, talk.said), words(9, count))
        talk.say(count)
        request = d.submit(shown, SHORT)
        d.run()
        assert_same(d, request, plain, shown)
        d.assert_idle()
    assert d.counts() == before
