"""BEAMS = A PLAIN SEARCH over what the engine says of each answer alone, whatever the model's
layers, positions and images are like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from mmserve.engine.engine import Engine
from mmserve.request import BeamParams, SamplingParams, Segment, TextSegment
from tests.engine.driver import Driver, picture, words
from tests.engine.plain_beams import plain_beams
from tests.engine.test_drafting import Guesses, compare
from tests.engine.test_rope_scaling import YARN, tiny
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import END, build_tiny, tiny_config

Prompt = tuple[Segment, ...]
WIDE = BeamParams(3, 3)
DIVERSE = BeamParams(4, 4, groups=2, diversity_penalty=0.4)


def by_single_answers(d: Driver, prompt: Prompt, params: SamplingParams) -> list[tuple[int, ...]]:
    @cache
    def logprobs(said: tuple[int, ...]) -> torch.Tensor:
        whole = (*prompt, TextSegment(said)) if said else prompt
        request = d.submit(whole, SamplingParams(max_tokens=1, temperature=0.0))
        d.run()
        return d.logits[request][0].log_softmax(-1)

    assert params.beams is not None and params.max_tokens is not None
    ends = frozenset({END, *params.stop_token_ids})
    return [ids for _, ids in plain_beams(logprobs, params.beams, ends, params.max_tokens)]


def searched(d: Driver, prompt: Prompt, params: SamplingParams) -> list[tuple[int, ...]]:
    request = d.submit(prompt, params)
    d.run()
    d.assert_idle()
    return [choice.token_ids for choice in d.last(request).choices]


def check(
    make: Callable[[], Driver], parts: tuple[int | str, ...], beams: BeamParams, steps: int
) -> None:
    d = make()
    prompt: Prompt = tuple(
        d.image(picture(ord(part))) if isinstance(part, str) else words(i, part)
        for i, part in enumerate(parts)
    )
    params = SamplingParams(max_tokens=steps, temperature=0.0, beams=beams)
    assert searched(d, prompt, params) == by_single_answers(make(), prompt, params)


@pytest.mark.parametrize("beams", [WIDE, DIVERSE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [(30, "a", 9), (50, "a", 3, "b", 20)])
def test_where_layers_see_a_window(
    kind: str, parts: tuple[int | str, ...], beams: BeamParams
) -> None:
    config = tiny_config(max_num_batched_tokens=20)
    check(lambda: Driver(Engine(config, windowed_model(KINDS[kind]))), parts, beams, 8)


@pytest.mark.parametrize("parts", [(58,), (9, "a", 32), (70,)])
def test_where_answers_grow_beyond_the_trained_length(parts: tuple[int | str, ...]) -> None:
    """All beams are computed again then, under the angles of their length."""
    check(lambda: tiny(YARN), parts, WIDE, 10)


@pytest.mark.parametrize("parts", [(9, "a", 5), (9, "a", 5, "b"), (1, "a")])
@pytest.mark.parametrize("mode", ["prefix", "blend"])
def test_where_images_see_what_stands_before_them(mode: str, parts: tuple[int | str, ...]) -> None:
    """An image behind all text is computed with the first token that looks at it: a beam's."""
    config = tiny_config(max_num_batched_tokens=30)
    config = replace(config, model=replace(config.model, vision_mode=mode, blend_tokens=16))
    check(lambda: Driver(build_tiny(config)), parts, DIVERSE, 6)


@pytest.mark.parametrize("overlaps", [False, True])
def test_where_others_are_drafted_for(overlaps: bool) -> None:
    plain, assisted = (Driver(build_tiny(tiny_config(dtype="int8"))) for _ in range(2))
    assisted.engine.overlaps = overlaps
    beams = SamplingParams(max_tokens=20, temperature=0.0, beams=DIVERSE)
    single = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    asks = [((9, "a", 5), beams), ((30,), single), ((12,), beams), (("b", 7), single)]
    assert compare(plain, assisted, asks, Guesses(0.8)).right > 0
