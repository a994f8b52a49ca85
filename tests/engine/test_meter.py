"""Steps of the engine as work for the energy meter, on the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.config import ModelConfig
from mmserve.energy import Part, Weights, Work
from mmserve.engine.engine import Engine
from mmserve.engine.meter import (
    QUESTION,
    board_meter,
    checkpoint_weights,
    image_flops,
    image_weights,
    step_work,
)
from mmserve.metrics import Metrics
from mmserve.model.weights import LoadedCheckpoint, load
from mmserve.request import ImageInput, ImageSegment, Request, SamplingParams
from mmserve.scheduler.batch import Batch, Chunk, ContextImage, ImageJob
from mmserve.sequence import Sequence
from tests.engine.driver import Driver, picture, words
from tests.engine.tiny import (
    HEAD_DIM,
    HIDDEN,
    IMAGE_SIZE,
    IMAGE_TOKENS,
    LAYERS,
    build_tiny,
    tiny_config,
    tiny_model,
)
from tests.model import families


def watched(engine: Engine) -> list[Work]:
    """The work of every step from now on."""
    seen: list[Work] = []
    schedule: Callable[[], Batch] = engine.scheduler.schedule

    def watch(*drafts: Any) -> Batch:
        batch = schedule(*drafts)
        seen.extend(step_work(batch))
        return batch

    engine.scheduler.schedule = watch  # type: ignore[method-assign, assignment]
    return seen


def units(work: list[Work], part: Part, request_id: str) -> int:
    return sum(w.units for w in work if w.part is part and w.request_id == request_id)


def test_every_token_and_image_is_charged_once_to_who_asked() -> None:
    driver = Driver(build_tiny(tiny_config(max_num_batched_tokens=16)))
    work = watched(driver.engine)
    image, other = driver.image(picture(1)), driver.image(picture(2))
    first = driver.submit((words(1, 20), image, words(2, 20)))
    driver.run()
    second = driver.submit((words(3, 5), image, other, words(4, 5)))
    driver.run()
    for name, prompt, misses, hits in ((first, 40, 1, 0), (second, 10, 1, 1)):
        assert units(work, Part.PROMPT, name) == prompt
        assert units(work, Part.DECODE, name) == len(driver.tokens(name)) - 1
        assert units(work, Part.IMAGE_MISS, name) == misses
        assert units(work, Part.IMAGE_HIT, name) == hits
    assert not any(w.request_id is None for w in work)


def test_an_image_computed_in_its_context_is_charged_with_its_chunk() -> None:
    image = ImageInput(bytes(32), b"", 6, inputs={"pixel_values": torch.zeros(4, 18)})
    segments = (words(1, 5), ImageSegment(image), words(2, 4))
    seq = Sequence(Request("a", segments, SamplingParams()), in_context=True)
    seq.missing_images = frozenset(p.key for p in seq.images)
    context = ContextImage(seq.images[0], (True,))
    alone = Batch([Chunk(seq, 5, 0, False, (context,))])
    miss = Work(Part.IMAGE_MISS, 1, "a", visual_tokens=6, pixel_values=72)
    assert step_work(alone) == [miss]
    within = Batch([Chunk(seq, 0, 9, True, (context,))])
    assert step_work(within) == [miss, Work(Part.PROMPT, 9, "a")]


def test_the_head_of_an_image_counts_as_it_and_the_tail_brings_the_tower_s_work() -> None:
    image = ImageInput(bytes(32), b"", 20, inputs={"pixel_values": torch.zeros(4, 18)})
    segments = (words(1, 5), ImageSegment(image), words(2, 4))
    seq = Sequence(Request("a", segments, SamplingParams()), in_context=True, head=16)
    head, tail = seq.images
    seq.missing_images = frozenset({head.key, tail.key})
    chunk = Chunk(seq, 0, 9, True, (ContextImage(head, (True,)),))
    assert step_work(Batch([chunk], [ImageJob(seq, tail.image, tail.key, [[0]])])) == [
        Work(Part.IMAGE_MISS, 1, "a", visual_tokens=16),
        Work(Part.PROMPT, 9, "a"),
        Work(Part.IMAGE_MISS, 0, "a", visual_tokens=4, pixel_values=72),
    ]


def test_a_checkpoint_s_image_weighs_its_tokens_and_its_patches(tmp_path: Path) -> None:
    model = ModelConfig(model=str(families.build("qwen2_5_vl", tmp_path)), device="cpu")
    loaded = load(model)
    assert isinstance(loaded, LoadedCheckpoint)
    weights = checkpoint_weights(loaded)
    parts = loaded.lm.model
    tower, layers = (
        sum(p.numel() for p in part.parameters())
        for part in (parts.visual, parts.language_model.layers)
    )
    patch = 3 * 7 * 7 * 2  # two frames
    miss = Work(Part.IMAGE_MISS, 1, "a", visual_tokens=36, pixel_values=144 * patch)
    assert weights.of(miss) == pytest.approx(36 + 144 * tower / layers)


def test_a_checkpoint_without_images_has_nothing_to_weigh(tmp_path: Path) -> None:
    loaded = load(ModelConfig(model=str(families.build("qwen2", tmp_path)), device="cpu"))
    assert isinstance(loaded, LoadedCheckpoint)
    assert checkpoint_weights(loaded) == Weights()


def test_an_image_weighs_its_tokens_its_tower_and_what_reads_it() -> None:
    loaded = tiny_model()
    assert image_flops(loaded) == 2 * IMAGE_TOKENS * HIDDEN * 3 * IMAGE_SIZE**2
    token = 2 * sum(p.numel() for p in loaded.lm.model.layers.parameters())
    weights = image_weights(loaded)
    assert weights.image_miss == pytest.approx(IMAGE_TOKENS + image_flops(loaded) / token)
    read = 4 * LAYERS * 6 * HEAD_DIM * IMAGE_TOKENS * QUESTION
    assert weights.image_hit == pytest.approx(read / token)


def test_on_a_cpu_nothing_is_metered() -> None:
    meter = board_meter(tiny_model(), Metrics())
    meter.share([Work(Part.DECODE, 1, "a")])
    assert meter.close("a") == 0


def test_what_was_computed_for_a_request_that_has_ended_is_nobodys() -> None:
    driver = Driver(build_tiny(tiny_config()))
    request = driver.submit((words(1, 9),))
    batch = driver.engine.scheduler.schedule()
    assert {w.request_id for w in step_work(batch)} == {request}
    driver.engine.abort(request)
    assert {w.request_id for w in step_work(batch)} == {None}
