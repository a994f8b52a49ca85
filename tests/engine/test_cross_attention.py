"""Llama 3.2 Vision: an image is projected once for each layer that looks at images, and no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.model.weights import load
from mmserve.request import ImageSegment, SamplingParams, Segment, TextSegment
from tests.engine.driver import Driver
from tests.model import families
from tests.model.border import message

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PICTURE, OTHER = families.picture(3), families.picture(6, 42, 60)


@pytest.fixture
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = families.build("mllama", tmp_path_factory.getbasetemp() / "families")
    model = ModelConfig(model=str(folder), device="cpu")
    cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22)
    steps = SchedulerConfig(max_num_batched_tokens=16)  # a prompt takes several steps
    return Driver(Engine(EngineConfig(model, cache, steps), load(model)))


def watched(driver: Driver) -> Counter[tuple[int, str]]:
    """How often each cross layer's projections have been called since, by layer and name."""
    calls: Counter[tuple[int, str]] = Counter()
    for layer in driver.engine.runner.adapter.decoder.layers:
        if hasattr(layer, "cross_attn"):
            attention = layer.cross_attn.attention
            for name in ("k_proj", "v_proj"):

                def count(*_: Any, at: tuple[int, str] = (attention.layer_idx, name)) -> None:
                    calls[at] += 1

                getattr(attention, name).register_forward_hook(count)
    return calls


def segments(driver: Driver, *parts: Any) -> tuple[Segment, ...]:
    said = message("user", *parts)
    files = [p.data for p in said.parts if hasattr(p, "data")]
    images = [driver.engine.pipeline.prepare(f, alone=len(files) == 1) for f in files]
    return driver.engine.template.render([said], images).segments


def test_an_image_that_is_marked_is_not_looked_at_again_and_its_text_is_found(
    driver: Driver,
) -> None:
    said = segments(driver, "Compare these:", PICTURE, "and", OTHER, ", please.")
    answer = driver.ask(*said, params=GREEDY)
    before = driver.counts()
    shown = [s for s in said if isinstance(s, ImageSegment)]
    marked = [replace(shown[0], marked=True) if s is shown[0] else s for s in said]
    request = driver.submit((*marked, TextSegment(tuple(answer)), *said[:1]), GREEDY)
    driver.run()
    usage = driver.last(request).usage
    assert usage is not None and usage.vision_hits == 1 and usage.cached_tokens > 16
    assert driver.counts() == before
    driver.assert_idle()


def test_one_projection_per_layer_and_image_however_many_steps_and_sessions(
    driver: Driver,
) -> None:
    calls = watched(driver)
    for text in ("What is this?", "And what is shown here, in many words, please?"):
        driver.ask(*segments(driver, text, PICTURE, " Say it."), params=GREEDY)  # one by one
    for text in ("One", "Two", "Three"):  # in a crowd, beside an image that is new
        driver.submit(segments(driver, text, OTHER, "beside", PICTURE), GREEDY)
    driver.run()
    config = driver.engine.runner.lm.config.get_text_config()
    layers = config.cross_attention_layers
    assert len(layers) > 1
    assert calls == {(layer, name): 2 for layer in layers for name in ("k_proj", "v_proj")}
    assert driver.counts()[0] == 2  # nor has the tower seen an image twice
    driver.assert_idle()
