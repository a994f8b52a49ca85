"""Images that are looked at beside the steps hold nobody up and change nothing but the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.energy import Part, Work
from mmserve.engine import engine as engine_module
from mmserve.engine.feature_cache import Done
from mmserve.engine.meter import step_work
from mmserve.model.adapter import Features
from mmserve.request import FinishReason
from mmserve.scheduler.batch import Batch
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.test_laws import Ask, asks, assert_dense
from tests.engine.test_vision_modes import CASES, segments, serve
from tests.engine.tiny import TinyVision, build_tiny, tiny_config, tiny_model
from tests.model import families

LONG = replace(GREEDY, max_tokens=30, ignore_eos=True)


class Late(Done):
    """Passes when it has been asked so often, or when somebody waits."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self.left = asked
        self.waited = False

    def passed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> None:
        self.waited |= self.left >= 0
        self.left = -1


class Slow:
    """A runner's images take some steps each; `started`: all of them, in order."""

    def __init__(self, driver: Driver, asked: int) -> None:
        runner: Any = driver.engine.runner
        runner.sees_beside = True
        runner._start = self._start
        self.asked = asked
        self.started: list[Late] = []

    def _start(self, look: Callable[[], Features]) -> tuple[Features, Done]:
        features = look()
        self.started.append(Late(self.asked))
        return features, self.started[-1]


def slow_driver(asked: int = 3, **options: Any) -> tuple[Driver, Slow]:
    d = Driver(build_tiny(tiny_config(**options)))
    return d, Slow(d, asked)


def decoding(d: Driver) -> str:
    """A request that has said something."""
    request = d.submit((words(90, 9),), LONG)
    while not d.tokens(request):
        d.step()
    return request


def test_each_step_brings_others_a_token_while_an_image_is_looked_at() -> None:
    d, slow = slow_driver(4)
    other = decoding(d)
    request = d.submit((words(1, 9), d.image(picture(1)), words(2, 5)))
    steps = 0
    while not d.tokens(request):
        said = len(d.tokens(other))
        d.step()
        assert len(d.tokens(other)) == said + 1
        steps += 1
    assert steps == 6 and not slow.started[0].waited
    d.run()
    quiet, _ = slow_driver()
    assert d.tokens(request) == quiet.ask(words(1, 9), quiet.image(picture(1)), words(2, 5))
    assert d.tokens(other) == quiet.ask(words(90, 9), params=LONG)
    d.assert_idle()


def test_an_image_that_nobody_decodes_beside_is_waited_for_in_its_own_step() -> None:
    d, slow = slow_driver(100)
    request = d.submit((words(1, 9), d.image(picture(1)), words(2, 5)))
    d.step()
    assert len(d.tokens(request)) == 1 and slow.started[0].waited


def test_an_image_is_waited_for_once_nobody_decodes_any_more() -> None:
    d, slow = slow_driver(1000)
    decoding(d)
    request = d.submit((words(1, 9), d.image(picture(1)), words(2, 5)))
    d.run()
    assert len(d.tokens(request)) == 8 and slow.started[0].waited
    d.assert_idle()


def test_images_do_not_ride_in_steps_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    d, slow = slow_driver(100)
    decoding(d)
    monkeypatch.setattr(engine_module, "MOST_RIDDEN_ROWS", 0)
    request = d.submit((words(1, 9), d.image(picture(1)), words(2, 5)))
    d.step()
    assert len(d.tokens(request)) == 1 and slow.started[0].waited


def test_text_behind_a_known_image_does_not_wait_for_another_ones_image() -> None:
    d, _ = slow_driver(100)
    d.ask(d.image(picture(2)), words(3, 4))
    decoding(d)
    held = d.submit((words(1, 9), d.image(picture(1)), words(2, 5)))
    free = d.submit((words(4, 9), d.image(picture(2)), words(5, 5)))
    d.step()
    assert len(d.tokens(free)) == 1 and not d.tokens(held)


def test_where_starting_takes_the_host_long_a_step_starts_one_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "LONGEST_START_S", 0.0)
    d, slow = slow_driver(2)
    decoding(d)
    request = d.submit((*(d.image(picture(n)) for n in range(3)), words(2, 5)))
    counts = []
    while not d.tokens(request):
        d.step()
        counts.append(len(slow.started))
    assert counts[:3] == [1, 2, 3] and counts[-1] == 3


def test_an_image_that_waits_is_kept_in_whatever_room_features_have() -> None:
    config = tiny_config()
    cache = replace(config.cache, feature_bytes=0)
    d = Driver(build_tiny(replace(config, cache=cache)))
    slow = Slow(d, 5)
    decoding(d)
    request = d.submit((d.image(picture(1)), words(2, 5), d.image(picture(2)), words(3, 5)))
    while not d.tokens(request):
        d.step()
    assert len(slow.started) == 2 and d.counts()[0] == 2


class Dark(TinyVision):
    def encode(self, pixels: Tensor) -> Tensor:
        raise RuntimeError("cannot see in the dark")


def test_an_image_that_fails_while_others_decode_ends_its_own_request_only() -> None:
    d, _ = slow_driver()
    other = decoding(d)
    d.engine.runner.vision_model = Dark()
    doomed = d.submit((d.image(picture(1)), words(1, 9), d.image(picture(2)), words(2, 5)))
    d.run()
    assert d.last(doomed).finish_reason is FinishReason.ERROR
    assert len(d.tokens(other)) == LONG.max_tokens
    d.assert_idle()


def test_a_request_aborted_while_its_image_is_looked_at_leaves_nothing_behind() -> None:
    d, slow = slow_driver(100)
    other = decoding(d)
    request = d.submit((d.image(picture(1)), words(2, 5)))
    d.step()
    d.abort(request)
    d.run()
    assert len(slow.started) == 1 and not slow.started[0].waited
    assert len(d.tokens(other)) == LONG.max_tokens
    d.assert_idle()


@given(
    st.lists(asks(), min_size=1, max_size=5),
    st.integers(0, 9),
    st.sampled_from([7, 40, 64]),
    st.sampled_from([14, 60]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_answers_are_the_dense_models_however_late_images_are(
    wanted: list[Ask],
    late: int,
    budget: int,
    text_pages: int,
    images_a_step: int,
    stagger: int,
    overlaps: bool,
) -> None:
    d, _ = slow_driver(
        late,
        text_pages=text_pages,
        vision_pages=12,
        max_num_batched_tokens=budget,
        max_images_per_step=images_a_step,
    )
    d.engine.overlaps = overlaps
    assert_dense(d, tiny_model(), wanted, stagger)


@pytest.mark.parametrize("mode", ["prefix", "blend"])
def test_images_in_their_contexts_ride_along_too(mode: str, tmp_path: Path) -> None:
    folder = families.build("qwen2_5_vl", tmp_path)
    answers = []
    for asked in (0, 4):
        driver = serve(folder, mode)
        slow = Slow(driver, asked)
        decoding(driver)
        request = driver.submit(segments(driver, CASES[1]))
        driver.run()
        assert not any(late.waited for late in slow.started)
        answers.append(torch.stack(driver.logits[request]))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-3)


def test_an_image_written_before_its_text_is_charged_to_who_waits_for_it() -> None:
    d, slow = slow_driver(1)
    decoding(d)
    request = d.submit((d.image(picture(1)), d.image(picture(2)), words(2, 5)))
    d.step()
    slow.started[1].left = 9  # the second comes later
    batches: list[Batch] = []
    run = d.engine.runner.run
    d.engine.runner.run = lambda batch, *more: batches.append(batch) or run(batch, *more)  # type: ignore[method-assign,func-returns-value]
    while not batches or not batches[-1].images:
        d.step()
    (missed,) = (work for work in step_work(batches[-1]) if work.part is Part.IMAGE_MISS)
    assert missed.request_id == request and not d.tokens(request)


def test_an_image_written_in_a_step_without_its_text_is_charged_to_who_waits_for_it() -> None:
    d, _ = slow_driver(0, max_images_per_step=1)
    done: list[list[Work]] = []
    run = d.engine.runner.run
    d.engine.runner.run = lambda batch, *more: done.append(step_work(batch)) or run(batch, *more)  # type: ignore[method-assign,func-returns-value]
    request = d.submit((d.image(picture(1)), d.image(picture(2)), words(2, 5)))
    d.run()
    missed = [work for step in done for work in step if work.part is Part.IMAGE_MISS]
    assert [work.request_id for work in missed] == [request, request]
    assert done[0] == missed[:1]


def test_later_images_do_not_take_an_earlier_ones_turn_at_the_tower() -> None:
    """However little text they have to compute behind them."""
    d, _ = slow_driver(2, max_images_per_step=1)
    d.submit((words(90, 9),), replace(LONG, max_tokens=100))
    d.step()
    first = d.submit((words(1, 9), d.image(picture(100)), words(2, 5)))
    for n in range(20):
        d.submit((d.image(picture(n)), words(3, 1)))
        d.step()
    assert d.last(first).finish_reason
    d.run()
    d.assert_idle()


def test_features_go_in_steps_without_text_too() -> None:
    config = tiny_config(max_images_per_step=1)
    d = Driver(build_tiny(replace(config, cache=replace(config.cache, feature_bytes=0))))
    images = [d.image(picture(n)) for n in range(4)]
    d.submit(tuple(images), prefill_only=True)
    d.run()
    assert [d.engine.runner.knows(i.image.digest) for i in images] == [False] * 3 + [True]
