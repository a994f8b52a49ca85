"""Beams in the engine: they answer as transformers does, and what they hold is shared.

Where transformers has no such model (isolated images) or no such search (groups), the answers are
those of a plain search over one dense forward for every beam and token.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmserve.engine.sampling_limits import validate
from mmserve.errors import ContextLengthExceededError, RequestError
from mmserve.request import (
    BeamParams,
    Choice,
    Constraint,
    FinishReason,
    SamplingParams,
    Segment,
    Streaming,
    TextSegment,
)
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.plain_beams import plain_beams
from tests.engine.tiny import END, build_tiny, tiny_config, tiny_lm, tiny_model
from tests.model.dense import dense_logits, embed

A = picture(1)
STOPS = tuple(range(3, 259, 8))  # so many that some answers end before others


def asking(beams: BeamParams, **options: Any) -> SamplingParams:
    options = {"max_tokens": 12} | options
    return SamplingParams(temperature=0.0, beams=beams, **options)


def driver(page_size: int = 16, overlaps: bool = False, **options: Any) -> Driver:
    config = tiny_config(**options)
    cache = replace(config.cache, page_size=page_size)
    engine = build_tiny(replace(config, cache=cache))
    engine.overlaps = overlaps
    return Driver(engine)


def choices(d: Driver, request: str) -> tuple[Choice, ...]:
    last = d.last(request)
    assert last.finish_reason is not FinishReason.ERROR, last.error
    first = last.choices[0]
    assert (last.text, last.token_ids) == (first.text, first.token_ids)
    assert all(event.text == "" for event in d.events[request][:-1])
    return last.choices


def answers(d: Driver, *segments: Segment, params: SamplingParams) -> list[tuple[int, ...]]:
    request = d.submit(segments, params)
    d.run()
    d.assert_idle()
    return [choice.token_ids for choice in choices(d, request)]


# -- the answers ------------------------------------------------------------------------------


def generated(prompt: tuple[int, ...], params: SamplingParams) -> list[tuple[int, ...]]:
    """transformers' answers."""
    beams = params.beams
    assert beams is not None
    out = tiny_lm().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=params.max_tokens,
        num_beams=beams.width,
        num_return_sequences=beams.count,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        do_sample=False,
        eos_token_id=None if params.ignore_eos else sorted({END, *params.stop_token_ids}),
        pad_token_id=0,
    )
    found = []
    for row in out[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in {END, *params.stop_token_ids}]
        found.append(tuple(row[: ends[0] + 1] if ends and not params.ignore_eos else row))
    return found


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -0.5, 2.0])
def test_answers_are_transformers(penalty: float, early: Any) -> None:
    d = driver()
    for width, seed in ((4, 1), (3, 2), (6, 0)):
        prompt = words(seed, 9 + seed)
        beams = BeamParams(width, width, length_penalty=penalty, early_stopping=early)
        params = asking(beams, stop_token_ids=STOPS, max_tokens=16)
        assert answers(d, prompt, params=params) == generated(prompt.token_ids, params)


def test_some_of_those_answers_end_before_others() -> None:
    params = asking(BeamParams(6, 6), stop_token_ids=STOPS, max_tokens=16)
    d = driver()
    request = d.submit((words(0, 9),), params)
    d.run()
    found = choices(d, request)
    assert len({len(choice.token_ids) for choice in found}) > 1
    reasons = {True: FinishReason.STOP, False: FinishReason.LENGTH}
    assert all(c.finish_reason is reasons[len(c.token_ids) < 16] for c in found)


@cache
def dense() -> Any:
    return tiny_model()


def expected(segments: tuple[Segment, ...], params: SamplingParams) -> list[tuple[int, ...]]:
    """The plain search's answers."""

    @cache
    def logprobs(tokens: tuple[int, ...]) -> torch.Tensor:
        whole = (*segments, TextSegment(tokens)) if tokens else segments
        return dense_logits(dense(), *embed(dense(), whole))[-1].log_softmax(-1)

    assert params.beams is not None and params.max_tokens is not None
    ends = frozenset({END, *params.stop_token_ids})
    return [t for _, t in plain_beams(logprobs, params.beams, ends, params.max_tokens)]


def prompt_of(d: Driver, parts: tuple[int | str, ...], seed: int = 0) -> tuple[Segment, ...]:
    """A number is that many text tokens, a letter an image."""
    return tuple(
        d.image(picture(ord(part))) if isinstance(part, str) else words(100 * seed + i, part)
        for i, part in enumerate(parts)
    )


SHAPES = st.sampled_from([(2, 1), (3, 1), (6, 1), (2, 2), (4, 2), (6, 3), (6, 6)])


@settings(max_examples=12)
@given(
    parts=st.lists(st.one_of(st.integers(1, 30), st.sampled_from("ab")), min_size=1, max_size=3),
    shape=SHAPES,
    penalty=st.sampled_from([0.0, 0.3, 2.0]),
    early=st.sampled_from([True, False, "never"]),
    length=st.sampled_from([1.0, 0.0, -1.0]),
    page_size=st.sampled_from([1, 2, 3, 5, 16]),
    budget=st.sampled_from([1, 3, 17, 512]),
    steps=st.integers(1, 9),
    caching=st.booleans(),
    overlaps=st.booleans(),
)
@example(("a",), (6, 1), 0.0, False, 1.0, 16, 512, 9, True, False)
@example((16, "a"), (6, 3), 2.0, True, 1.0, 16, 4, 9, False, True)
def test_answers_are_those_of_a_plain_search(
    parts: Any,
    shape: tuple[int, int],
    penalty: float,
    early: Any,
    length: float,
    page_size: int,
    budget: int,
    steps: int,
    caching: bool,
    overlaps: bool,
) -> None:
    width, groups = shape
    beams = BeamParams(width, width, groups, penalty if groups > 1 else 0.0, length, early)
    params = asking(beams, stop_token_ids=STOPS, max_tokens=steps)
    options: dict[str, Any] = {"prefix_caching": caching, "max_num_batched_tokens": budget}
    d = driver(page_size, overlaps, text_pages=300, vision_pages=100, **options)
    segments = prompt_of(d, (*parts, 3))
    for _ in range(2):  # the second time, prompt and images are known
        assert answers(d, *segments, params=params) == expected(segments, params)


def test_a_high_price_of_likeness_makes_groups_differ_at_once() -> None:
    beams = BeamParams(4, 4, groups=4, diversity_penalty=100.0)
    found = answers(driver(), words(1, 9), params=asking(beams))
    assert len({tokens[0] for tokens in found}) == 4


def test_one_beam_is_the_greedy_answer() -> None:
    d = driver()
    assert answers(d, words(4, 9), d.image(A), words(5, 4), params=asking(BeamParams(1))) == [
        tuple(d.ask(words(4, 9), d.image(A), words(5, 4), params=replace(GREEDY, max_tokens=12)))
    ]


def test_logprobs_are_each_answer_s_own() -> None:
    d = driver()
    request = d.submit((words(0, 9),), asking(BeamParams(3, 3), logprobs=2, ignore_eos=True))
    d.run()
    for choice in choices(d, request):
        assert tuple(entry.token_id for entry in choice.logprobs) == choice.token_ids
        assert all(len(entry.top) == 2 for entry in choice.logprobs)
        mean = sum(entry.logprob for entry in choice.logprobs) / len(choice.logprobs)
        assert mean == pytest.approx(choice.score, abs=1e-5)


@pytest.mark.parametrize("early", [False, True, "never"])
def test_a_stop_string_ends_an_answer_as_a_stop_token_does(early: Any) -> None:
    """A string of one byte is a token here."""
    beams = BeamParams(4, 4, length_penalty=0.0, early_stopping=early)
    d, prompt = driver(), words(3, 9)  # answers begin with some of e, then come some of %
    (token,) = d.engine.tokenizer.encode("%")
    by_token = answers(d, prompt, params=asking(beams, stop_token_ids=(token,)))
    assert answers(d, prompt, params=asking(beams, stop=("%",))) == by_token
    assert any(tokens[-1] == token and len(tokens) > 1 for tokens in by_token)


def test_text_ends_before_its_stop_string() -> None:
    d = driver()
    stops = ("ee%", "%%%%%")
    request = d.submit((words(3, 9),), asking(BeamParams(4, 4, length_penalty=0.0), stop=stops))
    d.run()
    found = choices(d, request)
    stopped = [c for c in found if c.finish_reason is FinishReason.STOP]
    assert stopped and not any(stop in choice.text for choice in found for stop in stops)
    for choice in stopped:
        rest = d.engine.tokenizer.decode(list(choice.token_ids)).removeprefix(choice.text)
        assert rest in (*stops, "")  # nothing where it ended by itself


def constrained(kind: str, text: str, width: int, **options: Any) -> SamplingParams:
    constraint = Constraint(kind, text)
    beams = BeamParams(width, width)
    return asking(beams, constraint=constraint, max_tokens=30, **options)


def test_every_answer_fits_the_grammar() -> None:
    d = driver()
    request = d.submit((words(1, 9), d.image(A)), constrained("regex", "[ab]{2}c?", 6))
    d.run()
    d.assert_idle()
    found = [choice.text for choice in choices(d, request)]
    assert len(set(found)) == 6 and all(re.fullmatch("[ab]{2}c?", text) for text in found)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_of_fewer_answers_than_beams_gives_them_all(ignore_eos: bool) -> None:
    d = driver()
    params = constrained("choice", '["ab", "ac", "x"]', 4, ignore_eos=ignore_eos)
    request = d.submit((words(1, 9),), params)
    d.run()
    d.assert_idle()
    assert sorted(choice.text for choice in choices(d, request)) == ["ab", "ac", "x"]


# -- pages ------------------------------------------------------------------------------------


def test_six_beams_behind_an_image_save_three_quarters_of_six_copies() -> None:
    """A prompt five times as long as the answers, as in a caption of 128 tokens."""
    d = driver()
    segments = prompt_of(d, (8, "a", 292))
    request = d.submit(segments, asking(BeamParams(6, 6), max_tokens=64, ignore_eos=True))
    d.run()
    usage = d.last(request).usage
    assert usage is not None and usage.beam_kv_saved is not None
    assert 0.75 <= usage.beam_kv_saved < 1 - 1 / 6
    assert d.counts()[0] == 1, "an image is encoded once, whatever the beams"


@pytest.mark.parametrize("overlaps", [False, True])
def test_beams_in_company_and_under_pressure_answer_as_alone(overlaps: bool) -> None:
    params = asking(BeamParams(4, 4), max_tokens=30)
    quiet = driver()
    prompts = [(9 + n, "a", 20 + n) for n in range(3)]
    alone = [answers(quiet, *prompt_of(quiet, p, n), params=params) for n, p in enumerate(prompts)]
    single = quiet.ask(*prompt_of(quiet, (30, "b", 7)), params=replace(GREEDY, max_tokens=40))

    d = driver(overlaps=overlaps, text_pages=16, vision_pages=6, max_num_batched_tokens=20)
    first = d.submit(prompt_of(d, (30, "b", 7)), replace(GREEDY, max_tokens=40))
    requests = [d.submit(prompt_of(d, p, n), params) for n, p in enumerate(prompts)]
    d.run()
    d.assert_idle()
    assert d.tokens(first) == single
    assert [[c.token_ids for c in choices(d, r)] for r in requests] == alone
    counter = next(iter(d.engine.metrics.num_preemptions.collect())).samples[0].value
    assert counter >= 3, "the pool was too large for this test to mean anything"


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("steps", range(1, 14))
def test_aborted_at_any_moment_all_is_given_back(steps: int, overlaps: bool) -> None:
    d = driver(overlaps=overlaps, max_num_batched_tokens=10)
    gone = d.submit(prompt_of(d, (12, "a", 9)), asking(BeamParams(4, 4)))
    stays = d.submit(prompt_of(d, (11, "b", 3), 1), asking(BeamParams(3, 3)))
    for _ in range(steps):
        d.step()
    d.abort(gone)
    d.run()
    assert d.last(gone).finish_reason is FinishReason.ABORT
    d.assert_idle()
    quiet = driver()
    params = asking(BeamParams(3, 3))
    alone = answers(quiet, *prompt_of(quiet, (11, "b", 3), 1), params=params)
    assert [c.token_ids for c in choices(d, stays)] == alone


# -- what beams cannot be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "beams", "options"),
    [
        ("best_of", {"width": 17}, {}),
        ("best_of", {"width": 0}, {}),
        ("n", {"width": 4, "count": 5}, {}),
        ("num_beam_groups", {"width": 6, "groups": 4}, {}),
        ("diversity_penalty", {"width": 4, "diversity_penalty": 1.0}, {}),
        ("length_penalty", {"width": 4, "length_penalty": math.nan}, {}),
        ("temperature", {"width": 4}, {"temperature": 0.7}),
        ("top_p", {"width": 4}, {"top_p": 0.9}),
        ("top_k", {"width": 4}, {"top_k": 5}),
        ("min_p", {"width": 4}, {"min_p": 0.1}),
        ("repetition_penalty", {"width": 4}, {"repetition_penalty": 1.1}),
        ("presence_penalty", {"width": 4}, {"presence_penalty": 1.0}),
        ("frequency_penalty", {"width": 4}, {"frequency_penalty": 1.0}),
        ("logit_bias", {"width": 4}, {"logit_bias": {3: 1.0}}),
        ("stop_token_ids", {"width": 4}, {"stop_token_ids": tuple(range(17))}),
    ],
)
def test_what_makes_no_sense_with_beams_is_refused_by_name(
    param: str, beams: dict[str, Any], options: dict[str, Any]
) -> None:
    all_options: dict[str, Any] = {"temperature": 0.0, "beams": BeamParams(**beams)} | options
    params = SamplingParams(**all_options)
    with pytest.raises(RequestError) as caught:
        validate(params, 264)
    assert caught.value.param == param and param in caught.value.message


def test_what_can_be_is_not_refused() -> None:
    beams = BeamParams(16, 16, groups=4, diversity_penalty=0.5, early_stopping="never")
    more: dict[str, Any] = {"stop_token_ids": (5,), "stop": ("x",), "ignore_eos": True, "seed": 1}
    validate(asking(beams, logprobs=3, **more), 264)


def test_more_beams_than_places_or_pages_are_refused_at_once() -> None:
    d = driver(max_num_seqs=3, text_pages=8)
    with pytest.raises(RequestError, match="4 beams are asked for; 3 sequences run at once"):
        d.submit((words(1, 9),), asking(BeamParams(4)))
    # Of 8 pages, 5 whole ones are shared; each beam needs one of its own.
    assert answers(d, words(1, 95), params=asking(BeamParams(3), max_tokens=1))
    with pytest.raises(ContextLengthExceededError, match="with 3 beams behind it"):
        d.submit((words(1, 96),), asking(BeamParams(3)))
    # Without a limit, it ends where every beam still has pages.
    (found,) = answers(
        d, words(1, 20), params=asking(BeamParams(2), max_tokens=None, ignore_eos=True)
    )
    assert len(found) == 16 * (1 + 3) - 20
    streaming = Streaming(window=64, sinks=2, keep=20)
    with pytest.raises(RequestError, match="cannot outgrow its context"):
        d.submit((words(1, 9),), asking(BeamParams(2)), streaming=streaming)
