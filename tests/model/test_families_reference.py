"""The tiny checkpoints are what equality tests need: they load, they vary, they see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from PIL import Image

from tests.model import families
from tests.model.families import Answer, build, chat, picture, reference

STEPS = 48
SLIDING = ("idefics2", "gemma3", "paligemma2", "mistral", "gemma2", "gemma3_text")
SCALED = ("llama_linear", "llama_dynamic", "llama_yarn", "llama_llama3")
QUESTION = "What is in this picture? The quick brown fox stands on the green table."


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def ask(folder: Path, *images: Image.Image, steps: int = STEPS) -> Answer:
    """One question after the pictures, a word between any two of them."""
    if folder.name in families.NO_CHAT_TEMPLATE:
        return reference(folder, "<image>" * len(images) + QUESTION, images, steps)
    parts: list[str | Image.Image] = []
    for image in images:
        parts += [image, " and "]
    return reference(folder, chat(*parts, QUESTION), steps=steps)


@pytest.mark.parametrize("name", families.VISION + families.TEXT)
def test_a_checkpoint_loads_through_the_auto_classes_and_its_tokens_vary(
    checkpoints: Path, name: str
) -> None:
    folder = build(name, checkpoints)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    answer = ask(folder)
    assert len(answer.ids) == STEPS
    assert len(set(answer.ids)) >= 10
    model, processor = families.load(folder)
    assert model.dtype == torch.float32
    special = set(families.tokenizer_of(processor).all_special_ids)
    assert not special & set(answer.ids)


@pytest.mark.parametrize("name", families.VISION)
def test_another_picture_and_another_order_give_another_answer(
    checkpoints: Path, name: str
) -> None:
    folder = build(name, checkpoints)
    first, second, tall = picture(1), picture(2), picture(3, 30, 64)
    one, other = (ask(folder, image).logits[0] for image in (first, second))
    assert (one - other).abs().max() > 0.3
    ordered = ask(folder, first, second, tall)
    swapped = ask(folder, second, first, tall)
    assert ordered.prompt == swapped.prompt
    assert len(set(ordered.ids)) >= 6
    assert (ordered.logits[0] - swapped.logits[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", SLIDING)
def test_one_key_more_in_the_window_is_seen_in_the_logits(checkpoints: Path, name: str) -> None:
    folder = build(name, checkpoints)
    model, processor = families.load(folder)
    images = [picture(1)] if name in families.VISION else []
    text = ("<image>" if images else "") + QUESTION
    prompt = text if name in families.NO_CHAT_TEMPLATE else chat(*images, QUESTION)
    inputs = families.encode(processor, prompt, images)
    before = families.answer(model, inputs, 4).logits
    model.config.get_text_config().sliding_window += 1
    after = families.answer(model, inputs, 4).logits
    assert (before - after).abs().max() > 0.02


@pytest.mark.parametrize("name", SCALED)
def test_rope_scaling_changes_the_logits_of_equal_weights(checkpoints: Path, name: str) -> None:
    plain = ask(build("llama_gqa", checkpoints), steps=64)
    scaled = ask(build(name, checkpoints), steps=64)
    assert plain.prompt == scaled.prompt
    assert (plain.logits[-1] - scaled.logits[-1]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["idefics2", "llava", "mllama", "llama_gqa"])
def test_a_checkpoint_built_again_has_the_same_bytes(
    checkpoints: Path, tmp_path: Path, name: str
) -> None:
    file = "model.safetensors"
    once, again = build(name, checkpoints) / file, build(name, tmp_path) / file
    assert once.read_bytes() == again.read_bytes()


def test_the_architectures_are_the_real_ones(checkpoints: Path) -> None:
    found = {
        name: hf.AutoConfig.from_pretrained(build(name, checkpoints)).architectures
        for name in ("pixtral", "gemma3", "paligemma2", "gemma3_text")
    }
    assert found == {
        "pixtral": ["LlavaForConditionalGeneration"],
        "gemma3": ["Gemma3ForConditionalGeneration"],
        "paligemma2": ["PaliGemmaForConditionalGeneration"],
        "gemma3_text": ["Gemma3ForCausalLM"],
    }
