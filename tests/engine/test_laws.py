"""The laws of the engine, on a tiny model: what is cached, shared, split or aborted shows nowhere.

PAGED = DENSE, HIT = MISS, BATCHED = ALONE, PREEMPTED = LEFT IN PEACE, ABORTED = NEVER WAS.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from mmserve.kernels import int8
from mmserve.request import (
    FinishReason,
    ImageSegment,
    SamplingParams,
    Segment,
    TextSegment,
)
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.tiny import IMAGE_TOKENS, build_tiny, tiny_config, tiny_model
from tests.model.dense import dense_logits, embed

DTYPES = ["float32", "int8"]
BORDERS = [1, 2, 15, 16, 17, 31, 32, 33]


def driver(**options: Any) -> Driver:
    return Driver(build_tiny(tiny_config(**options)))


# -- PAGED = DENSE ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A prompt in small: a number is that many text tokens, a letter an image."""

    parts: tuple[int | str, ...]
    seed: int = 0
    output: int = 5

    def segments(self, d: Driver) -> tuple[Segment, ...]:
        return tuple(
            d.image(picture(ord(part)))
            if isinstance(part, str)
            else words(1000 * self.seed + i, part)
            for i, part in enumerate(self.parts)
        )


@pytest.fixture(scope="module")
def dense() -> Any:
    return tiny_model()


def assert_dense(d: Driver, dense: Any, asks: list[Ask], stagger: int = 0) -> None:
    """Run the requests together; each one's tokens and logits are those of one plain forward."""
    sent = []
    for ask in asks:
        segments = ask.segments(d)
        params = replace(GREEDY, max_tokens=ask.output)
        sent.append((d.submit(segments, params), segments))
        for _ in range(stagger):
            d.step()
    d.run()
    for request, segments in sent:
        tokens = d.tokens(request)
        assert d.last(request).finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        whole = (*segments, TextSegment(tuple(tokens[:-1])))
        expected = dense_logits(dense, *embed(dense, whole))[-len(tokens) :]
        got = torch.stack(d.logits[request])[: len(tokens)]  # not what was launched ahead
        assert float((got - expected).abs().max()) <= 1e-3
        assert tokens == expected.argmax(-1).tolist()
    d.assert_idle()


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    parts: list[int | str] = []
    for _ in range(draw(st.integers(0, 3))):
        parts.append(draw(st.sampled_from([1, 3, 14, 15, 16, 17, 40])))
        parts += draw(st.lists(st.sampled_from("abcde"), max_size=2))
    return Ask(
        (*parts, draw(st.sampled_from([1, 2, 9, 16, 33]))),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 8)),
    )


@given(
    st.lists(asks(), min_size=1, max_size=5),
    st.integers(1, 64),
    st.sampled_from([14, 20, 60]),
    st.sampled_from([12, 20]),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
@example([Ask((16, "a", 16, "b", "a", 16), n, 8) for n in range(4)], 64, 20, 12, 1, True, 1)
@example([Ask((1, "a", 1)), Ask((1, "b", 1))], 1, 60, 12, 1, True, 0)
def test_paged_equals_dense_whatever_the_chunks_pages_pressure_and_company(
    dense: Any,
    wanted: list[Ask],
    budget: int,
    text_pages: int,
    vision_pages: int,
    images_a_step: int,
    prefix_caching: bool,
    stagger: int,
) -> None:
    d = driver(
        text_pages=text_pages,
        vision_pages=vision_pages,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=budget,
        max_images_per_step=images_a_step,
    )
    assert_dense(d, dense, wanted, stagger)


@pytest.mark.parametrize("length", BORDERS)
def test_paged_equals_dense_at_every_page_border(dense: Any, length: int) -> None:
    d = driver(max_num_batched_tokens=17)
    assert_dense(d, dense, [Ask((length,)), Ask((length, "a", length)), Ask((1, "a", "b", length))])


@pytest.mark.parametrize("budget", [1, 5, 16, 19, 20, 21, 64])
def test_a_chunk_border_at_any_place_beside_an_image_changes_nothing(
    dense: Any, budget: int
) -> None:
    assert_dense(
        driver(max_num_batched_tokens=budget, max_images_per_step=1),
        dense,
        [Ask((5, "a", 11, "b", 5), 1), Ask(("c", "a", 20), 2)],
    )


def test_a_long_conversation_equals_dense_to_its_end(dense: Any) -> None:
    parts = (40, "a", 16, "b", 30, "c", 16, "a", 25)
    assert_dense(driver(max_num_batched_tokens=50), dense, [Ask(parts, output=150)])


def test_preempted_equals_left_in_peace(dense: Any) -> None:
    d = driver(text_pages=7, vision_pages=8, max_num_batched_tokens=40)
    assert_dense(d, dense, [Ask((20, "a", 9), n, 50) for n in range(4)])
    counter = next(iter(d.engine.metrics.num_preemptions.collect())).samples[0].value
    assert counter >= 3, "the pool was too large for this test to mean anything"


@pytest.mark.parametrize("budget", [7, 64, 500])
def test_with_8_bit_weights_logits_are_the_rounded_models(budget: int) -> None:
    """Dense, with weights that hold exactly what eight bits hold; activations keep fifteen."""
    rounded = tiny_model()
    rounded.lm.lm_head.weight = nn.Parameter(rounded.lm.lm_head.weight.clone())
    for module in rounded.lm.modules():
        if isinstance(module, nn.Linear):
            held, scale = int8.quantize_weight(module.weight)
            module.weight.data = held.float() * scale[:, None]
    d = driver(dtype="int8", max_num_batched_tokens=budget)
    for ask in (Ask((5, "a", 11, "b", 150)), Ask(("c", "a", 20), 2), Ask((1, "a", 90, "c", 1))):
        segments = ask.segments(d)
        request = d.submit(segments)
        d.run()
        whole = (*segments, TextSegment(tuple(d.tokens(request)[:-1])))
        expected = dense_logits(rounded, *embed(rounded, whole))[-len(d.tokens(request)) :]
        error = (torch.stack(d.logits[request]) - expected).abs().max()
        assert float(error) < 0.01 * float(expected.std())


# -- HIT = MISS ---------------------------------------------------------------------------------

A, B, C = picture(1), picture(2), picture(3)


def conversation(kind: str, d: Driver) -> tuple[Segment, ...]:
    """Image A in different company."""
    image = partial(d.image, A)
    match kind:
        case "elsewhere":
            return (words(1, 9), image(), words(2, 7))
        case "after other text":
            return (words(3, 70), image(), words(2, 7))
        case "far behind":
            return (words(3, 300), d.image(B), words(4, 40), image(), words(5, 3))
        case "beside another":
            return (words(1, 9), d.image(B), image(), d.image(C), words(2, 7))
        case "twice":
            return (words(1, 9), image(), words(6, 5), image(), words(2, 7))
        case _:
            return (image(), words(2, 7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    ["elsewhere", "after other text", "far behind", "beside another", "twice", "at the start"],
)
def test_a_hit_gives_the_tokens_a_cold_engine_gives_and_computes_nothing(
    kind: str, dtype: str
) -> None:
    cold = driver(dtype=dtype)
    expected = cold.ask(*conversation(kind, cold))

    warm = driver(dtype=dtype)
    for data in (A, B, C):
        warm.ask(words(90, 31), warm.image(data), words(91, 4))
    before, stored = warm.counts(), warm.kv(conversation("", warm)[0].image)  # type: ignore[union-attr]
    segments = conversation(kind, warm)
    assert all(s.image.pixels is None for s in segments if isinstance(s, ImageSegment))
    request = warm.submit(segments)
    warm.run()
    assert warm.tokens(request) == expected
    assert warm.counts() == before, "a known image was encoded, decoded or written again"
    usage = warm.last(request).usage
    assert usage is not None and usage.vision_misses == 0
    assert usage.cached_image_tokens == usage.image_tokens > 0
    image = conversation("", warm)[0].image  # type: ignore[union-attr]
    assert torch.equal(warm.kv(image), stored), "reading changed the stored bytes"
    assert torch.equal(warm.kv(image), cold.kv(image)), "the bytes depend on what was before"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_images_kv_is_the_same_to_the_bit_whatever_is_encoded_with_it(dtype: str) -> None:
    alone = driver(dtype=dtype)
    alone.ask(alone.image(A), words(1, 3))
    crowd = driver(dtype=dtype)
    for data in (B, C, picture(4)):
        crowd.submit((words(5, 40), crowd.image(data), crowd.image(A), words(2, 9)))
    crowd.run()
    image = alone.image(A).image
    assert torch.equal(alone.kv(image), crowd.kv(image))


def test_an_evicted_image_comes_back_with_the_same_bytes_and_tokens() -> None:
    d = driver(vision_pages=4)  # two images
    segments = (words(1, 5), d.image(A), words(2, 5))
    first, image = d.ask(*segments), segments[1].image
    stored = d.kv(image)
    for n in (11, 12):
        d.ask(d.image(picture(n)), words(n, 3))
    assert d.engine.runner.vision[0].index.lookup(image.digest) is None
    assert d.ask(words(1, 5), d.image(A), words(2, 5)) == first
    assert torch.equal(d.kv(image), stored)
    # Prepared while it was there, evicted before it ran: it is decoded once more.
    late = d.image(A)
    assert late.image.pixels is None
    for n in (11, 12):
        d.ask(d.image(picture(n)), words(n, 3))
    assert d.ask(words(1, 5), late, words(2, 5)) == first


def test_another_image_in_the_same_words_is_another_prompt() -> None:
    """B01: red, blue, red again; each answer is the cold one."""

    def ask(d: Driver, data: bytes) -> list[int]:
        return d.ask(words(1, 20), d.image(data), words(2, 20))

    cold = [ask(driver(), data) for data in (A, B)]
    assert cold[0] != cold[1], "the tiny model must see, or this test says nothing"
    d = driver()
    assert [ask(d, data) for data in (A, B, A, B)] == cold * 2


@pytest.mark.parametrize("output", [1, 15, 16, 17])
def test_a_later_turn_equals_a_cold_start_with_the_whole_history(output: int) -> None:
    """B39: the cached prefix ends at a page border or one token beside it."""
    for length in BORDERS:
        d, cold = driver(), driver(prefix_caching=False)
        first = (words(1, length), d.image(A), words(2, length))
        said = d.ask(*first, params=replace(GREEDY, max_tokens=output))
        turn = (*first, TextSegment(tuple(said)), d.image(B), words(3, 5))
        request = d.submit(turn)
        d.run()
        assert d.tokens(request) == cold.ask(*turn), length
        usage = d.last(request).usage
        assert usage is not None
        computed = 2 * length + len(said) - 1  # the last token said was never read
        assert usage.cached_tokens == computed // 16 * 16 + IMAGE_TOKENS


# -- BATCHED = ALONE ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_conversations_at_once_give_each_the_answer_it_gets_alone(dtype: str) -> None:
    def segments(d: Driver, n: int) -> tuple[Segment, ...]:
        return (
            words(1, 12),
            d.image(picture(n)),
            words(n, 3 + n),
            d.image(picture(n + 5)),
            words(2, 9),
        )

    together = driver(dtype=dtype, max_num_batched_tokens=100)
    requests = [together.submit(segments(together, n)) for n in range(16)]
    together.run()
    answers = [together.tokens(request) for request in requests]
    assert len({tuple(answer) for answer in answers}) > 8, "answers must differ to mean something"
    for n in range(16):
        alone = driver(dtype=dtype)
        assert alone.ask(*segments(alone, n)) == answers[n]


def test_with_8_bit_weights_company_does_not_change_a_bit_of_the_logits() -> None:
    def run(count: int) -> list[torch.Tensor]:
        d = driver(dtype="int8", prefix_caching=False, max_num_batched_tokens=1000)
        requests = [
            d.submit((words(n, 10 + n), d.image(picture(n)), words(n + 50, 4)))
            for n in range(count)
        ]
        d.run()
        return [torch.stack(d.logits[request]) for request in requests]

    assert torch.equal(run(1)[0], run(9)[0])


def test_a_seed_gives_the_same_tokens_alone_in_company_and_under_pressure() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=11)

    def run(company: int, **options: Any) -> list[int]:
        d = driver(**options)
        for n in range(company):
            d.submit((words(50 + n, 20), d.image(B)), SamplingParams(max_tokens=25, seed=n))
        request = d.submit((words(1, 20), d.image(A), words(2, 9)), params)
        d.run()
        return d.tokens(request)

    alone = run(0)
    assert alone == run(3) == run(3, text_pages=6, vision_pages=6, max_num_batched_tokens=9)
    other = driver().ask(
        words(1, 20), driver().image(A), words(2, 9), params=replace(params, seed=12)
    )
    assert other != alone


# -- ABORTED = NEVER WAS --------------------------------------------------------------------------


def test_two_hundred_aborts_at_any_moment_give_everything_back_and_disturb_nobody() -> None:
    """Waiting, half prefilled, decoding, preempted, before the first step, after the end."""
    rng = random.Random(5)
    stays = [(words(n, 10 + n), n) for n in range(6)]
    params = replace(GREEDY, max_tokens=20)

    def segments(d: Driver, text: Segment, n: int) -> tuple[Segment, ...]:
        return (text, d.image(picture(n % 9)), words(n + 7, 6))

    quiet = driver()
    expected = [quiet.ask(*segments(quiet, text, n), params=params) for text, n in stays]

    d = driver(text_pages=24, vision_pages=10, max_num_batched_tokens=40, max_images_per_step=1)
    keep: list[str] = []
    others: list[str] = []
    aborted = 0
    while aborted < 200 or len(keep) < len(stays):
        if len(keep) < len(stays) and aborted >= 30 * len(keep):
            keep.append(d.submit(segments(d, *stays[len(keep)]), params))
        n = rng.randrange(1000)
        others.append(
            d.submit(
                segments(d, words(n, rng.randint(1, 60)), n),
                replace(GREEDY, max_tokens=rng.randint(1, 30)),
                prefill_only=rng.random() < 0.2,
            )
        )
        for _ in range(rng.randint(0, 3)):
            d.step()
        victim = others.pop(rng.randrange(len(others)))
        d.abort(victim)
        d.abort(victim)  # a second time, or after the end, it is harmless
        aborted += 1
    d.run()
    d.assert_idle()
    assert [d.tokens(request) for request in keep] == expected
    reasons = {d.last(request).finish_reason for request in d.events}
    assert FinishReason.ABORT in reasons and FinishReason.ERROR not in reasons
