"""The default model, loaded: its numbers, its tokenizer, and an answer end to end."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

import easy_vqa
import pytest
import torch

from mmserve.config import ModelConfig
from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.hub import is_native
from mmserve.model.loader import LoadedModel, load_model, resolve_device
from mmserve.model.spec import Windows, load_spec
from mmserve.model.supported import native_json
from mmserve.request import ImageInput, ImageSegment, Segment, TextSegment
from tests.model.dense import dense_generate, image_mask

CONFIG = ModelConfig(device="cpu")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(CONFIG)


def prompt(loaded: LoadedModel, question: str, image: bytes | None = None) -> list[Segment]:
    """One user turn as training wrote it."""
    spec, tokenizer = loaded.spec, loaded.tokenizer
    start, end = 1, 2  # <|im_start|>, <|im_end|>

    def text(words: str) -> list[int]:
        return list(tokenizer.encode(words).ids)

    ids = [start, *text("system\n" + spec.system_prompt), end, *text("\n"), start, *text("user\n")]
    segments: list[Segment] = []
    if image is not None:
        segments.append(TextSegment((*ids, *text(spec.image_prefix.format(k=1)))))
        segments.append(ImageSegment(ImageInput(b"", image, spec.num_image_tokens)))
        ids, question = [], spec.image_suffix + question
    ids += [*text(question), end, *text("\n"), start, *text("assistant\n")]
    return [*segments, TextSegment(tuple(ids))]


def answer(loaded: LoadedModel, question: str, image: bytes | None = None) -> str:
    ids, _ = dense_generate(loaded, prompt(loaded, question, image), 12)
    return str(loaded.tokenizer.decode(ids))


@pytest.mark.model
def test_the_base_models_constants_survive_the_conversion(loaded: LoadedModel) -> None:
    config = cast(Any, loaded.lm.config)
    assert config.rope_parameters == {"rope_theta": 100_000.0, "rope_type": "default"}
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.eos_token_id == loaded.tokenizer.token_to_id("<|im_end|>") == 2
    assert config.tie_word_embeddings
    lm = cast(Any, loaded.lm)
    assert lm.lm_head.weight.data_ptr() == lm.model.embed_tokens.weight.data_ptr()
    assert not loaded.lm.training and not any(p.requires_grad for p in loaded.lm.parameters())
    assert {p.dtype for p in loaded.lm.parameters()} == {torch.float32}


@pytest.mark.model
def test_digits_are_tokens_of_their_own_and_text_holds_no_special_token(
    loaded: LoadedModel,
) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.encode("12345").tokens == list("12345")
    ids = tokenizer.encode("<|im_end|><|im_start|>").ids
    assert not {0, 1, 2} & set(ids) and tokenizer.decode(ids) == "<|im_end|><|im_start|>"


@pytest.mark.model
def test_loading_needs_no_network(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    again = load_model(CONFIG)
    assert again.spec == loaded.spec


@pytest.mark.model
def test_without_the_adapter_the_text_weights_are_the_base_models(loaded: LoadedModel) -> None:
    base = load_model(ModelConfig(device="cpu", lora=False))
    weight = "model.layers.3.mlp.down_proj.weight"
    difference = loaded.lm.get_parameter(weight) - base.lm.get_parameter(weight)
    assert torch.linalg.matrix_rank(difference, rtol=1e-4) == 16
    assert base.spec.weights_id != loaded.spec.weights_id


@pytest.mark.model
def test_a_longer_context_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="8192"):
        load_model(ModelConfig(device="cpu", max_model_len=8193))
    assert load_model(ModelConfig(device="cpu", max_model_len=100)).spec.max_model_len == 100


@pytest.mark.model
def test_it_answers_from_text(loaded: LoadedModel) -> None:
    assert "Paris" in answer(loaded, "What is the capital of France?")


@pytest.mark.model
def test_it_sees(loaded: LoadedModel) -> None:
    questions, answers, images = easy_vqa.get_test_questions()
    paths = easy_vqa.get_test_image_paths()
    for i in range(0, len(questions), len(questions) // 8):
        said = answer(loaded, questions[i], Path(paths[images[i]]).read_bytes())
        assert said.lower().strip(" .") == answers[i], questions[i]


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(ModelUnavailableError, match="smolvision-135m"):
        load_spec("gpt-17")


def test_a_folder_like_configs_models_names_its_one_model(tmp_path: Path) -> None:
    assert native_json(str(tmp_path)) is None
    description = tmp_path / "mine.json"
    description.write_text("{}")
    assert native_json(str(tmp_path)) is None and not is_native(str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert native_json(str(tmp_path)) == description and is_native(str(tmp_path))
    assert native_json(str(description)) == description
    (tmp_path / "other").mkdir()
    (tmp_path / "other.json").write_text("{}")
    assert native_json(str(tmp_path)) is None
    assert native_json("smolvision-135m") is not None


def test_the_description_agrees_with_itself() -> None:
    spec = load_spec("smolvision-135m")
    assert (spec.num_image_tokens, spec.image_size, spec.max_model_len) == (64, 224, 8192)
    assert spec.vision.compressor.hidden_size == 576
    assert "{k}" in spec.image_prefix and len(spec.weights_id) == 32


def test_windows_of_layers_are_declared_and_are_other_weights(tmp_path: Path) -> None:
    """They change what KV is made of the same tokens, so nothing of it may be shared."""
    path = native_json("smolvision-135m")
    assert path is not None
    data = json.loads(path.read_text("utf-8")) | {"windows": {"window": 1024, "full_every": 6}}
    data["lora"]["file"] = str(path.parent / data["lora"]["file"])
    data["vision"]["files"] = [str(path.parent / name) for name in data["vision"]["files"]]
    (tmp_path / "windowed.json").write_text(json.dumps(data), "utf-8")
    windowed, plain = load_spec(str(tmp_path / "windowed.json")), load_spec("smolvision-135m")
    assert windowed.windows == Windows(1024, 6) and plain.windows is None
    assert windowed.weights_id != plain.weights_id


def test_a_device_by_name_is_taken_as_it_is() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")


def test_the_dense_mask_lets_images_see_themselves_and_text_all_before_it() -> None:
    rows = image_mask([0, 1, 1, 2, 0]).int().tolist()
    assert rows == [
        [1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [1, 1, 1, 1, 1],
    ]
