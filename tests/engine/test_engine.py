"""One engine, step by step: how requests end, what they report, and whom a fault reaches."""

from __future__ import annotations

import gc
import resource
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmserve.errors import ContextLengthExceededError
from mmserve.request import (
    FinishReason,
    ImageInput,
    ImageSegment,
    SamplingParams,
    TextSegment,
    TokenEvent,
    Usage,
)
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.tiny import (
    END,
    IMAGE_TOKENS,
    MAX_LEN,
    TinyVision,
    build_tiny,
    tiny_config,
)

A, B, C = picture(1), picture(2), picture(3)


def driver(**options: Any) -> Driver:
    return Driver(build_tiny(tiny_config(**options)))


def usage(event: TokenEvent) -> Usage:
    assert event.usage is not None
    return event.usage


# -- how a request ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 17])
def test_max_tokens_is_the_number_of_tokens(count: int) -> None:
    d = driver()
    request = d.submit((words(1, 9),), replace(GREEDY, max_tokens=count, ignore_eos=True))
    d.run()
    last = d.last(request)
    assert len(d.tokens(request)) == count == usage(last).completion_tokens
    assert last.finish_reason is FinishReason.LENGTH


def test_without_max_tokens_the_context_is_the_limit() -> None:
    d = driver()
    prompt = (words(1, MAX_LEN - IMAGE_TOKENS - 10), d.image(A))
    request = d.submit((*prompt, words(2, 3)), replace(GREEDY, max_tokens=None, ignore_eos=True))
    d.run()
    assert d.last(request).finish_reason is FinishReason.LENGTH
    assert len(d.tokens(request)) == 7
    d.assert_idle()


def test_the_text_pool_is_the_limit_when_it_is_smaller_than_the_context() -> None:
    d = driver(text_pages=3)
    request = d.submit((words(1, 20),), replace(GREEDY, max_tokens=500, ignore_eos=True))
    d.run()
    assert len(d.tokens(request)) == 48 - 20
    d.assert_idle()
    with pytest.raises(ContextLengthExceededError, match="48"):
        d.submit((words(1, 48),))


def test_the_end_token_ends_a_turn_and_is_not_text() -> None:
    d = driver()
    params = replace(GREEDY, max_tokens=9, logit_bias={END: 100.0})
    request, deaf = (
        d.submit((words(1, 9),), p) for p in (params, replace(params, ignore_eos=True))
    )
    d.run()
    assert d.tokens(request) == [END] and d.text(request) == ""
    assert d.last(request).finish_reason is FinishReason.STOP
    assert d.tokens(deaf) == [END] * 9 and d.last(deaf).finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_a_turn() -> None:
    d = driver()
    tokens = d.ask(words(1, 9), params=replace(GREEDY, max_tokens=12))
    stop = tokens[-1]
    request = d.submit((words(1, 9),), replace(GREEDY, max_tokens=12, stop_token_ids=(stop,)))
    d.run()
    assert d.tokens(request) == tokens[: tokens.index(stop) + 1]
    assert d.last(request).finish_reason is FinishReason.STOP


class Script:
    """Makes an engine say a given text, whatever the prompt."""

    def __init__(self, d: Driver, text: str) -> None:
        self.tokens = d.engine.tokenizer.encode(text)
        self.run = d.engine.runner.run
        d.engine.runner.run = self  # type: ignore[method-assign]

    def __call__(self, batch: Any, previous: Any = None) -> Any:
        logits = self.run(batch, previous)
        if logits is None:
            return None
        values = torch.zeros(logits.values.shape)
        for row, chunk in zip(values, logits.chunks, strict=True):
            said = chunk.seq.num_tokens - chunk.seq.num_prompt_tokens
            row[self.tokens[said % len(self.tokens)]] = 1
        return logits._replace(values=values)


@pytest.mark.parametrize(
    ("stops", "text", "met"),
    [
        (("DEFGHIJ",), "ABC", "DEFGHIJ"),
        (("J",), "ABCDEFGHI", "J"),
        (("HIX",), "ABCDEFGHIJ", None),
        (("CDE", "BCDEF"), "AB", "CDE"),
        (("A",), "", "A"),
        (("IJ", "IJK"), "ABCDEFGH", "IJ"),
        (("JK",), "ABCDEFGHIJ", None),
    ],
)
def test_a_stop_string_cuts_the_stream_and_near_misses_come_out(
    stops: tuple[str, ...], text: str, met: str | None
) -> None:
    d = driver()
    Script(d, "ABCDEFGHIJ")
    request = d.submit((words(1, 9),), replace(GREEDY, max_tokens=10, stop=stops))
    d.run()
    last = d.last(request)
    assert (d.text(request), last.stop_string) == (text, met)
    assert last.finish_reason is (FinishReason.STOP if met else FinishReason.LENGTH)
    d.assert_idle()


def test_characters_of_several_tokens_leave_whole_and_a_torn_one_at_the_end_is_marked() -> None:
    d = driver()
    Script(d, "é汉😀")
    request = d.submit((words(1, 9),), replace(GREEDY, max_tokens=8))
    d.run()
    pieces = [event.text for event in d.events[request]]
    assert pieces == ["", "é", "", "", "汉", "", "", "\ufffd"]


# -- what a request reports -----------------------------------------------------------------------


def test_logprobs_are_the_models_own_and_name_their_tokens() -> None:
    d = driver()
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    request = d.submit((words(1, 9),), params)
    plain = d.submit((words(2, 9),), replace(GREEDY, max_tokens=4))
    d.run()
    assert not any(event.logprobs for event in d.events[plain])
    for event, row in zip(d.events[request], d.logits[request], strict=True):
        (entry,) = event.logprobs
        expected = row.log_softmax(-1)
        best = expected.topk(3)
        assert entry.token_id == event.token_ids[0] == int(row.argmax())
        assert entry.logprob == pytest.approx(float(expected.max()), abs=1e-5)
        assert [t for t, _, _ in entry.top] == best.indices.tolist()
        assert [p for _, _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        for token, text, _ in entry.top:
            assert text.encode() == d.engine.tokenizer.token_bytes(token) or "\ufffd" in text


def test_usage_counts_text_images_and_what_was_cached() -> None:
    d = driver()
    prompt = (words(1, 30), d.image(A), words(2, 10), d.image(B), words(3, 5))
    first = d.submit(prompt)
    d.run()
    second = d.submit(prompt)
    d.run()
    cold, warm = usage(d.last(first)), usage(d.last(second))
    assert (cold.prompt_tokens, cold.image_tokens) == (45 + 2 * IMAGE_TOKENS, 2 * IMAGE_TOKENS)
    assert (cold.cached_tokens, cold.vision_hits, cold.vision_misses) == (0, 0, 2)
    assert warm.cached_tokens == 32 + 2 * IMAGE_TOKENS
    assert (warm.cached_image_tokens, warm.vision_hits, warm.vision_misses) == (40, 2, 0)


def test_an_image_shown_twice_is_encoded_once_and_once_found() -> None:
    d = driver()
    request = d.submit((words(1, 3), d.image(A), words(2, 3), d.image(A), words(3, 3)))
    d.run()
    found = usage(d.last(request))
    assert (found.vision_misses, found.vision_hits) == (1, 1)
    assert (found.image_tokens, found.cached_image_tokens) == (2 * IMAGE_TOKENS, IMAGE_TOKENS)
    # Both were decoded in preparation, when neither was known.
    assert d.counts() == (1.0, 2.0, 1.0)


def test_adding_an_image_keeps_what_was_cached_before_it() -> None:
    """B07: turn 2 shows a second image; everything up to and with the first is found."""
    d = driver()
    d.ask(words(1, 32), d.image(A), words(2, 16))
    request = d.submit((words(1, 32), d.image(A), words(2, 16), d.image(B), words(3, 16)))
    d.run()
    assert usage(d.last(request)).cached_tokens == 48 + IMAGE_TOKENS


def test_a_prefill_makes_no_token_and_the_turn_after_it_finds_everything() -> None:
    cold = driver()
    expected = cold.ask(words(1, 40), cold.image(A), words(2, 9), words(3, 4))
    d = driver(max_num_batched_tokens=20)
    ahead = d.submit((words(1, 40), d.image(A), words(2, 9)), prefill_only=True)
    d.run()
    assert d.tokens(ahead) == [] and d.last(ahead).finish_reason is FinishReason.STOP
    assert usage(d.last(ahead)).completion_tokens == 0
    request = d.submit((words(1, 40), d.image(A), words(2, 9), words(3, 4)))
    d.run()
    assert d.tokens(request) == expected
    assert usage(d.last(request)).cached_tokens == 48 + IMAGE_TOKENS
    assert d.counts()[0] == 1


def test_a_prefill_ends_when_the_last_of_its_images_is_there() -> None:
    d = driver(max_images_per_step=1)
    ahead = d.submit((words(1, 20), d.image(A), d.image(B), d.image(C)), prefill_only=True)
    d.run()
    assert d.last(ahead).finish_reason is FinishReason.STOP and d.counts()[0] == 3
    d.assert_idle()


def test_timings_are_in_order() -> None:
    d = driver()
    request = d.submit((words(1, 40), d.image(A), words(2, 9)))
    d.run()
    timings = d.last(request).timings
    assert timings is not None
    assert timings.queue_ms >= 0 and timings.predicted_ms > 0
    assert 0 < timings.image_ms <= timings.prompt_ms


# -- faults ---------------------------------------------------------------------------------------


class Fragile(TinyVision):
    """Fails on all-black images."""

    def encode(self, pixels: Tensor) -> Tensor:
        if not pixels.any():
            raise RuntimeError("cannot see in the dark")
        return super().encode(pixels)


def fragile(**options: Any) -> tuple[Driver, Any]:
    """A driver whose encoder fails, and an image to make it fail."""
    d = driver(**options)
    d.engine.runner.vision_model = Fragile()
    bad = d.image(picture(77))
    object.__setattr__(bad.image, "pixels", torch.zeros(1, 3, 8, 8, dtype=torch.uint8).numpy())
    return d, bad


@pytest.mark.parametrize("images_a_step", [1, 16])
def test_an_image_that_cannot_be_encoded_ends_its_own_requests_only(images_a_step: int) -> None:
    quiet = driver()
    expected = quiet.ask(words(1, 9), quiet.image(A), words(2, 9))
    d, bad = fragile(max_images_per_step=images_a_step)
    doomed = [
        d.submit((words(3, 9), bad, words(4, 4), d.image(B), words(5, 4))),
        d.submit((words(6, 9), d.image(A), words(7, 4), bad, words(8, 4))),
    ]
    good = d.submit((words(1, 9), d.image(A), words(2, 9)))
    text = d.submit((words(9, 9),))
    d.run()
    for request in doomed:
        last = d.last(request)
        assert last.finish_reason is FinishReason.ERROR and last.error
        assert "image" in last.error and "dark" not in last.error
        assert d.tokens(request) == []
    assert d.tokens(good) == expected and len(d.tokens(text)) == 8
    d.assert_idle()
    again = d.submit((words(1, 9), d.image(B), words(2, 9)))
    d.run()
    assert d.last(again).finish_reason is FinishReason.LENGTH


def test_a_failed_image_is_tried_again_by_the_next_request() -> None:
    d, bad = fragile()
    d.submit((words(1, 9), bad, words(2, 3)))
    d.run()
    d.engine.runner.vision_model = TinyVision()
    assert len(d.ask(words(1, 9), bad, words(2, 3))) == 8


def test_an_aborted_request_says_so_with_its_counts_and_takes_no_more_steps() -> None:
    d = driver()
    request = d.submit((words(1, 30), d.image(A), words(2, 9)), replace(GREEDY, max_tokens=50))
    while len(d.tokens(request)) < 3:
        d.step()
    d.abort(request)
    d.run()
    last = d.last(request)
    assert last.finish_reason is FinishReason.ABORT and usage(last).completion_tokens == 3
    d.assert_idle()
    d.abort(request)
    d.abort("unknown")
    assert not d.engine.has_work


def test_a_sequence_aborted_while_its_image_is_another_ones_too_leaves_it_to_that_one() -> None:
    d = driver(max_num_batched_tokens=16)
    first = d.submit((words(1, 40), d.image(A), words(2, 9)))
    second = d.submit((words(3, 40), d.image(A), words(4, 9)))
    d.step()
    d.abort(first)
    d.run()
    assert len(d.tokens(second)) == 8 and d.counts()[0] == 1
    d.assert_idle()


def test_text_only_prompts_need_no_vision_page() -> None:
    d = driver(vision_pages=1)
    assert len(d.ask(TextSegment((5, 6, 7)))) == 8
    with pytest.raises(ContextLengthExceededError, match="need 2 vision pages"):
        d.submit((d.image(A), words(1, 3)))


# -- memory --------------------------------------------------------------------------------------


def test_two_thousand_distinct_images_leave_memory_flat() -> None:
    config = tiny_config(text_pages=40, vision_pages=64, max_num_batched_tokens=256)
    # What the tower made of images is kept by a budget that 2,000 of them would not fill.
    cache = replace(config.cache, feature_bytes=1 << 20)
    d = Driver(build_tiny(replace(config, cache=cache)))
    index = d.engine.runner.vision[0].index
    alive: weakref.WeakSet[ImageInput] = weakref.WeakSet()

    def send(first: int, count: int) -> None:
        for n in range(first, first + count):
            data = n.to_bytes(32, "big")
            pixels = torch.full((1, 3, 8, 8), n % 256, dtype=torch.uint8).numpy()
            image = ImageInput(data, b"", IMAGE_TOKENS, pixels)
            alive.add(image)
            segments = (words(n, 3), ImageSegment(image), words(n, 2))
            d.submit(segments, replace(GREEDY, max_tokens=1))
            del image, segments
            if n % 16 == 15:
                d.run()
        d.run()
        d.events.clear()
        d.logits.clear()

    send(0, 500)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    send(500, 1500)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    d.assert_idle()
    assert index.stats.misses == 2000 and index.stats.evictions >= 2000 - 32
    assert index.num_used <= index.num_pages == 64
    gc.collect()
    assert not alive, "an image is kept after its request"
    assert grown < 8 * 1024, f"{grown} KiB more after 1,500 more images"
