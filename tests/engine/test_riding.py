"""Images that are looked at beside the steps hold nobody up and change nothing but the time."""

from __future__ import annotations

import math
import random
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
from mmserve.engine import image_steps
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


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many images a step starts does not depend on how busy the machine is."""
    monkeypatch.setattr(image_steps, "LONGEST_START_S", math.inf)


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
    monkeypatch.setattr(image_steps, "MOST_RIDDEN_ROWS", 0)
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
    monkeypatch.setattr(image_steps, "LONGEST_START_S", 0.0)
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


def test_who_waits_for_the_same_image_as_one_who_leaves_gets_it_all_the_same() -> None:
    d, slow = slow_driver(4)
    other = decoding(d)
    image = d.image(picture(1))
    leaves, stays = (d.submit((words(n, 9), image, words(n, 5))) for n in (1, 2))
    d.step()
    d.abort(leaves)
    d.run()
    quiet, _ = slow_driver()
    assert d.tokens(stays) == quiet.ask(words(2, 9), quiet.image(picture(1)), words(2, 5))
    assert len(d.tokens(other)) == LONG.max_tokens
    assert len(slow.started) == 1 and d.counts() == (1, 1, 1)
    d.assert_idle()


def test_images_take_turns_in_a_pool_of_one_while_others_decode() -> None:
    d, slow = slow_driver(2, vision_pages=2)
    decoding(d)
    requests = [d.submit((words(n, 3), d.image(picture(n)), words(n, 5))) for n in range(4)]
    d.run()
    quiet, _ = slow_driver()
    for n, request in enumerate(requests):
        alone = quiet.ask(words(n, 3), quiet.image(picture(n)), words(n, 5))
        assert d.tokens(request) == alone
    assert d.counts() == (4, 4, 4) and len(slow.started) == 4
    d.assert_idle()


def test_a_stream_of_text_does_not_keep_an_image_from_being_seen() -> None:
    d, _ = slow_driver(3)
    decoding(d)
    request = d.submit((d.image(picture(1)), words(2, 5)))
    for n in range(5):
        d.submit((words(n, 9),))
        d.step()
    assert d.tokens(request)


class Moody(TinyVision):
    """Counts what it has seen, and refuses the pictures `dark`."""

    def __init__(self, dark: list[Tensor]) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.dark, self.seen = dark, 0

    def encode(self, pixels: Tensor) -> Tensor:
        if any(torch.equal(pixels.flatten(), each) for each in self.dark):
            raise RuntimeError("not that one")
        self.seen += 1
        return super().encode(pixels)


@given(st.randoms(use_true_random=False), st.sampled_from(["isolated", "prefix", "blend"]))
@settings(max_examples=15, deadline=None)
def test_who_leaves_or_fails_at_any_moment_changes_nothing_for_the_others(
    rng: random.Random, mode: str
) -> None:
    """Under preemption, in little room for features, beside prefills without output; and what was
    computed is counted once."""
    config = tiny_config(
        text_pages=rng.choice([14, 40]),
        vision_pages=rng.choice([6, 12]),
        max_num_batched_tokens=rng.choice([7, 20, 64]),
        max_images_per_step=rng.choice([1, 3]),
    )
    cache = replace(config.cache, feature_bytes=rng.choice([0, 1 << 20]))
    model = replace(config.model, vision_mode=mode, blend_tokens=16)
    built = [Driver(build_tiny(replace(config, model=model, cache=c))) for c in (cache, cache)]
    d, quiet = built
    Slow(d, rng.choice([0, 2, 7]))
    d.engine.overlaps = rng.random() < 0.5
    dark = torch.as_tensor(d.image(picture(ord("e"))).image.pixels).flatten()
    d.engine.runner.vision_model = tower = Moody([dark])
    sent: list[tuple[str, Ask, bool]] = []
    for _ in range(8):
        shown = rng.choices("abcde", [4, 3, 2, 1, 1], k=rng.randint(0, 2))
        ask = Ask((rng.choice([1, 16, 30]), *shown, rng.choice([1, 9, 33])), rng.randint(0, 1))
        silent = rng.random() < 0.2
        params = replace(GREEDY, max_tokens=ask.output)
        request = d.submit(ask.segments(d), params, prefill_only=silent)
        sent.append((request, ask, silent))
        for _ in range(rng.randint(0, 3)):
            d.step()
        if rng.random() < 0.3:
            d.abort(rng.choice(sent)[0])
    d.run()
    d.assert_idle()
    for request, ask, silent in sent:
        reason = d.last(request).finish_reason
        if reason is not FinishReason.ABORT:
            assert (reason is FinishReason.ERROR) == ("e" in ask.parts)
            params = replace(GREEDY, max_tokens=ask.output)
            if "e" not in ask.parts and not silent:
                assert d.tokens(request) == quiet.ask(*ask.segments(quiet), params=params)
    assert d.counts()[0] == tower.seen


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


@pytest.mark.parametrize(
    ("family", "mode"),
    [("qwen2_5_vl", "prefix"), ("qwen2_5_vl", "blend"), ("mllama", "isolated")],
)
def test_images_in_contexts_and_beside_the_text_ride_along_too(
    family: str, mode: str, tmp_path: Path
) -> None:
    folder = families.build(family, tmp_path)
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
