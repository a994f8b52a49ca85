"""What a checkpoint says of itself arrives where requests come in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmserve.config import EngineConfig, ModelConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.build_engine import build_engine
from mmserve.engine.model_info import ModelInfo
from mmserve.model.fetch import ModelUnavailableError
from mmserve.request import SamplingParams
from tests.engine.tiny import build_tiny, tiny_config
from tests.model import families


def info(engine: AsyncEngine) -> ModelInfo:
    async def begin() -> None:
        await engine.start()
        await engine.stop()

    asyncio.run(begin())
    return engine.info


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return families.build("qwen2_5_vl", tmp_path)


def test_a_checkpoint_s_own_sampling_is_the_default(folder: Path) -> None:
    own: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    asked = json.dumps({"do_sample": True, **own})
    (folder / "generation_config.json").write_text(asked)
    model = ModelConfig(model=str(folder), device="cpu")
    assert info(AsyncEngine(EngineConfig(model))).default_sampling == SamplingParams(**own)


def test_sampling_that_no_request_could_have_is_refused_at_once(folder: Path) -> None:
    own = {"do_sample": True, "temperature": 7.0, "top_k": -1}
    (folder / "generation_config.json").write_text(json.dumps(own))
    model = ModelConfig(model=str(folder), device="cpu")
    with pytest.raises(ModelUnavailableError, match="generation_config.json is wrong: temperature"):
        info(AsyncEngine(EngineConfig(model)))


def no_default_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")


def other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    said = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": said}))


def no_images_shown(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content[-1].text }}")


@pytest.mark.parametrize(
    ("spoil", "flags", "said"),
    [
        (no_default_template, {}, "chat template cannot be read"),
        (other_tokenizer, {}, "tokenizers that decode by"),
        (no_images_shown, {}, "does not take a few small images"),
        (lambda _: None, {"dtype": "int8"}, "dtype 'int8' is none of auto, float32"),
    ],
)
def test_what_needs_no_weights_is_refused_before_they_are_read(
    folder: Path,
    spoil: Callable[[Path], None],
    flags: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("weights are read")

    spoil(folder)
    monkeypatch.setattr("mmserve.model.weights.load_checkpoint", load)
    model = ModelConfig(model=str(folder), device="cpu", **flags)
    with pytest.raises((ModelUnavailableError, ValueError), match=said):
        info(AsyncEngine(EngineConfig(model)))


def test_starting_counts_no_decodings(folder: Path) -> None:
    engine = build_engine(EngineConfig(ModelConfig(model=str(folder), device="cpu")))
    assert engine.metrics.image_decodes._value.get() == 0


def test_a_native_model_is_greedy_and_isolated() -> None:
    native = info(AsyncEngine(tiny_config(), build=build_tiny))
    assert native.default_sampling == SamplingParams(temperature=0.0)
    assert (native.vision_mode, native.blend_tokens) == ("isolated", None)


@pytest.mark.parametrize(("mode", "tokens"), [("prefix", None), ("blend", 32)])
def test_the_mode_is_told(mode: str, tokens: int | None, folder: Path) -> None:
    model = ModelConfig(model=str(folder), device="cpu", vision_mode=mode, blend_tokens=32)
    told = info(AsyncEngine(EngineConfig(model)))
    assert (told.vision_mode, told.blend_tokens) == (mode, tokens)
