"""Answers that outgrow their window, of public checkpoints: images that see what is before them,
images between text or beside it, layers with windows, angles that depend on the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.errors import RequestError
from mmserve.model.weights import load
from mmserve.request import SamplingParams, Segment, Streaming
from tests.engine.driver import Driver
from tests.engine.test_streaming import asked_anew, text_tokens
from tests.model import families
from tests.model.border import message

ENDLESS = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
PICTURE, OTHER = families.picture(3, 140, 126), families.picture(6, 112, 160)
PARTS: tuple[Any, ...] = ("Compare", PICTURE, "with", OTHER, " in many words.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "families"


def serve(folder: Path, mode: str = "auto", *, caching: bool = True) -> Driver:
    model = ModelConfig(model=str(folder), device="cpu", vision_mode=mode, blend_tokens=16)
    cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 23, prefix_caching=caching)
    steps = SchedulerConfig(max_num_batched_tokens=48)
    return Driver(Engine(EngineConfig(model, cache, steps), load(model)))


def segments(driver: Driver, *parts: Any) -> tuple[Segment, ...]:
    said = message("user", *parts)
    files = [p.data for p in said.parts if hasattr(p, "data")]
    images = [driver.engine.pipeline.prepare(f, alone=len(files) == 1) for f in files]
    return driver.engine.template.render([said], images).segments


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llava", "prefix"),
        ("qwen2_5_vl", "prefix"),
        ("qwen2_5_vl", "blend"),
        ("gemma3", "prefix"),
        ("mllama", "auto"),
        ("llama_dynamic", "auto"),
        ("phi3", "auto"),
    ],
)
@pytest.mark.parametrize("images", [None, 1, 0])
def test_cut_equals_asked_anew(name: str, mode: str, images: int | None, folders: Path) -> None:
    folder = families.build(name, folders)
    d, plain = serve(folder, mode), serve(folder, mode, caching=False)
    parts = PARTS if name in families.VISION else ("Say much of it, and more than fits here.",)
    prompt = segments(d, *parts)
    before = text_tokens(prompt)
    streaming = Streaming(before + 20, 3, 12, images)
    request = d.submit(prompt, ENDLESS, streaming=streaming)
    d.run()
    d.assert_idle()
    expected = asked_anew(plain, prompt, streaming, 70)
    usage = d.last(request).usage
    assert usage is not None and usage.dropped_tokens > before
    assert (d.tokens(request), usage.dropped_tokens, usage.dropped_images) == expected


def test_a_prompt_that_sees_all_of_itself_cannot_outgrow_it(folders: Path) -> None:
    d = serve(families.build("paligemma2", folders))
    with pytest.raises(RequestError, match="sees all of it"):
        d.submit(segments(d, "What?", PICTURE), ENDLESS, streaming=Streaming(100, 4, 20))
