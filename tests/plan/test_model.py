"""Sizes without weights, beside those counted from modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmserve.bench.dims import SHAPES
from mmserve.bench.family_shapes import FAMILIES
from mmserve.bench.shapes import build_shape
from mmserve.bench.sizes import Sizes
from mmserve.config import ModelConfig
from mmserve.model.loader import load_model
from mmserve.plan.model import DEFAULT_NAME, find_model, tower_flops

TINY = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "sliding_window": 32,
}
SEEING = {
    "model_type": "gemma3",
    "text_config": TINY,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}


def folder(path: Path, words: object) -> str:
    (path / "config.json").write_text(json.dumps(words))
    return str(path)


@pytest.mark.parametrize("name", ["llava-7b", "idefics2-8b"])
def test_a_tower_s_arithmetic_is_what_its_modules_do(name: str) -> None:
    shape = SHAPES[name]
    counted = Sizes.of(build_shape(shape, torch.device("meta"), torch.bfloat16))
    assert tower_flops(shape.vision, shape.text.hidden) == pytest.approx(
        counted.image_flops, rel=0.02
    )
    assert find_model(name).sizes.layer_weights == counted.layer_weights


@pytest.mark.model
def test_the_default_model_is_as_large_as_said() -> None:
    counted = Sizes.of(load_model(ModelConfig(device="cpu", dtype="float32")))
    planned = find_model(DEFAULT_NAME).sizes
    assert planned.image_flops == counted.image_flops
    assert planned.image_tokens == counted.image_tokens
    assert (planned.weights, planned.layer_weights) == (counted.weights, counted.layer_weights)


def test_on_a_cpu_weights_are_bytes_and_kv_is_of_four() -> None:
    gpu = find_model(DEFAULT_NAME)
    cpu = gpu.on_cpu()
    assert cpu.sizes.weight_bytes * 2 == gpu.sizes.weight_bytes
    assert cpu.kv_bytes == 2 * gpu.kv_bytes


def test_a_family_is_known_by_name_and_takes_text() -> None:
    model = find_model("phi2")
    assert model.layers == FAMILIES["phi2"]["num_hidden_layers"]
    assert model.sizes.image_tokens == 0


def test_of_a_folder_config_json_is_enough(tmp_path: Path) -> None:
    model = find_model(folder(tmp_path, TINY))
    assert model.layers == 6 and model.kv_bytes == 2 * 6 * 2 * 16 * 2
    windowed = sum(window == 32 for window in model.windows)
    assert windowed == 5  # every sixth sees all
    assert model.kv_read(320) == model.kv_bytes * (320 + 5 * 32) / 6


def test_images_of_a_checkpoint_cost_its_tower_for_each_patch(tmp_path: Path) -> None:
    model = find_model(folder(tmp_path, SEEING))
    assert model.sizes.image_tokens == 4
    layers, patches = 2 * (4 * 32**2 + 2 * 32 * 48), 3 * 14**2 * 32
    assert 2 * 16 * (layers + patches) < model.sizes.image_flops < 2 * 16 * 4 * layers


def test_an_image_of_any_size_must_be_said(tmp_path: Path) -> None:
    words = {**FAMILIES["qwen2.5-vl-7b"]}
    path = folder(tmp_path, words)
    with pytest.raises(ValueError, match="--image-tokens"):
        find_model(path)
    assert find_model(path, image_tokens=1225).sizes.image_tokens == 1225


@pytest.mark.parametrize("words", [None, {"model_type": "no such"}, "rubbish"])
def test_what_has_no_config_is_refused_in_one_sentence(tmp_path: Path, words: object) -> None:
    path = str(tmp_path) if words is None else folder(tmp_path, words)
    with pytest.raises(ValueError, match=r"no config of .*names known are smolvision-135m") as told:
        find_model(path)
    assert "\n" not in str(told.value)
