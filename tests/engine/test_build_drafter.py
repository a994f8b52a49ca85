"""Drafters by configuration, with their control, in an engine that answers as without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmserve.config import SpecConfig
from mmserve.engine.engine import Engine
from tests.engine.driver import Driver, picture, words
from tests.engine.test_drafting import LONG
from tests.engine.tiny import build_tiny, tiny_config

METHODS = {"ngram": 16, "suffix": 16, "lookahead": 11}


def build(spec: SpecConfig) -> Engine:
    return build_tiny(replace(tiny_config(dtype="int8"), speculative=spec))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_needs_no_weights_is_there_by_its_name(method: str) -> None:
    drafting = build(SpecConfig(method=method)).drafting
    assert drafting is not None and drafting.drafter.name == method
    assert (drafting._length, drafting._control is not None) == (METHODS[method], True)
    drafting = build(SpecConfig(method=method, adaptive=False)).drafting
    assert drafting is not None and drafting._control is None


def test_how_far_a_drafter_looks_can_be_said() -> None:
    drafting = build(SpecConfig(method="suffix", num_speculative_tokens=3)).drafting
    assert drafting is not None and drafting._length == 3


def test_without_a_method_or_a_head_nothing_is_drafted() -> None:
    assert build(SpecConfig()).drafting is None
    assert build(SpecConfig(method="auto")).drafting is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_control_changes_when_drafts_are_made_and_no_answer(
    method: str, overlaps: bool
) -> None:
    plain = Driver(build_tiny(tiny_config(dtype="int8")))
    assisted = Driver(build(SpecConfig(method=method)))
    assisted.engine.overlaps = overlaps
    for d in (plain, assisted):
        for _ in range(2):
            for count in range(3):
                images = (d.image(picture(n)) for n in range(count))
                d.submit((words(count, 20), *images, words(count + 9, 5)), LONG)
            d.run()
    assert [plain.tokens(r) for r in plain.events] == [assisted.tokens(r) for r in plain.events]
    assisted.assert_idle()
    drafting = assisted.engine.drafting
    assert drafting is not None and drafting._control is not None
    assert not drafting._control._known and not drafting._courses
