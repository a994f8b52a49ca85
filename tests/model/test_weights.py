"""A checkpoint's weights are loaded once, straight to their device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mmserve.config import ModelConfig
from mmserve.model.checkpoint import open_checkpoint
from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.weights import LoadedCheckpoint, load, load_checkpoint
from tests.model import families, tiny_gguf

CPU = torch.device("cpu")


def test_weights_go_straight_to_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    read = AutoModelForCausalLM.from_pretrained

    def spy(*args: Any, **options: Any) -> Any:
        asked.update(options)
        return read(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    opened = open_checkpoint(str(families.build("qwen3", tmp_path)))
    loaded = load_checkpoint(opened, torch.float32, CPU)
    assert asked["device_map"] == {"": CPU}
    assert {p.device for p in loaded.lm.parameters()} == {CPU}
    assert not loaded.lm.training
    assert not any(p.requires_grad for p in loaded.lm.parameters())


def test_a_gguf_file_is_loaded_too(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    loaded = load(ModelConfig(model=str(path), device="cpu"))
    assert isinstance(loaded, LoadedCheckpoint)
    assert {p.dtype for p in loaded.lm.parameters()} == {torch.float32}


def test_a_fault_of_loading_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel\nat line 3")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    opened = open_checkpoint(str(families.build("qwen3", tmp_path)))
    with pytest.raises(ModelUnavailableError, match="qwen3 cannot be loaded: no such kernel$"):
        load_checkpoint(opened, torch.float32, CPU)
