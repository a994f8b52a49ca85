"""Images seen with fewer of their nested latents: other KV, found again as any image is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmserve.engine.engine import Engine
from mmserve.model.loader import LoadedModel
from mmserve.request import ImageSegment, Segment
from tests.engine.driver import Driver, picture, words
from tests.engine.tiny import IMAGE_TOKENS, NESTED, tiny_config, tiny_model
from tests.model.dense import dense_generate

A, B = picture(1), picture(2)


def driver(most: int | None = None) -> Driver:
    config = tiny_config()
    model = replace(config.model, image_max_tokens=most)
    return Driver(Engine(replace(config, model=model), tiny_model(sizes=NESTED)))


def shown(d: Driver, data: bytes, detail: str) -> ImageSegment:
    return ImageSegment(d.engine.pipeline.prepare(data, detail=detail))


def answers_as_dense(d: Driver, prompt: tuple[Segment, ...], model: LoadedModel) -> None:
    """The first that the driver is asked."""
    answered = d.ask(*prompt)
    ids, logits = dense_generate(model, prompt, len(answered))
    assert answered == ids
    for ours, dense in zip(d.logits["0"], logits, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("detail", ["low", "auto", "high"])
def test_the_answer_is_that_of_a_dense_pass_over_as_many_latents(detail: str) -> None:
    d = driver()
    prompt = (words(1, 9), shown(d, A, detail), words(2, 7), shown(d, B, "low"), words(3, 4))
    answers_as_dense(d, prompt, tiny_model(sizes=NESTED))


def test_a_found_image_of_low_detail_answers_as_when_it_was_new() -> None:
    d = driver()
    first = d.ask(words(1, 9), shown(d, A, "low"), words(2, 7))
    before = d.counts()
    again = d.ask(words(4, 3), words(1, 9), shown(d, A, "low"), words(2, 7))
    assert d.ask(words(1, 9), shown(d, A, "low"), words(2, 7)) == first
    assert d.counts() == before
    assert again == driver().ask(words(4, 3), words(1, 9), shown(d, A, "low"), words(2, 7))


def test_two_details_of_one_image_are_two_entries() -> None:
    d = driver()
    low, high = shown(d, A, "low"), shown(d, A, "high")
    assert (low.image.num_tokens, high.image.num_tokens) == (NESTED[0], IMAGE_TOKENS)
    assert low.image.digest != high.image.digest
    d.ask(words(1, 9), low, words(2, 7), high, words(3, 3))
    runs, _, writes = d.counts()
    assert (runs, writes) == (2, 2)
    # What more latents make of the first few is no beginning of what these make alone.
    assert not torch.allclose(d.kv(low.image), d.kv(high.image)[:, :, :, : NESTED[0]], atol=1e-3)
    d.assert_idle()


def test_what_is_asked_for_an_image_is_said_of_all_its_details() -> None:
    d = driver()
    named = d.engine.pipeline.identify(A)
    assert {shown(d, A, detail).image.digest for detail in ("low", "high")} == {*named.digests}
    d.ask(words(1, 5), shown(d, A, "low"), words(2, 5))
    (held,) = d.engine.images.held([named])
    assert (held.state, held.num_tokens) == ("active", NESTED[0])


@pytest.mark.parametrize(("most", "tokens"), [(64, 20), (19, 10), (5, 5)])
def test_a_limit_takes_the_most_latents_below_it(most: int, tokens: int) -> None:
    d = driver(most)
    assert shown(d, A, "high").image.num_tokens == tokens
    assert shown(d, A, "low").image.num_tokens == NESTED[0]
    unlimited = driver()
    assert (shown(unlimited, A, "high").image.digest == shown(d, A, "high").image.digest) == (
        tokens == IMAGE_TOKENS
    )
