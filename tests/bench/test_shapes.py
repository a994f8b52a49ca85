"""Shapes: the public models' sizes, and tiny ones that an engine can run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, Qwen2VLImageProcessor

from mmserve.bench.dims import CLIP_L, QWEN_VIT, SHAPES, SO400M, TowerDims
from mmserve.bench.shapes import build_shape, padded_tokenizer, text_config
from mmserve.tokenizer import Tokenizer
from tests.bench.tiny import PATCHES, SHAPE, TOWER

CPU = torch.device("cpu")
SPANS = TowerDims("qwen2.5-vl", 4, 32, 2, 48, patch=14, image_size=140, latent_grid=(5, 5))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' cards have them; llava-7b is Llama-2-7B with 64 more rows twice
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
        ("idefics2-8b", 7_241_732_096),
        ("llava-7b", 6_738_415_616 + 2 * 64 * 4096),
    ],
)
def test_a_shape_has_as_many_weights_as_the_model_it_is_named_after(
    name: str, parameters: int
) -> None:
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(text_config(SHAPES[name]))
    assert sum(p.numel() for p in lm.parameters()) == parameters


def test_images_become_as_many_tokens_as_in_the_models() -> None:
    assert (SO400M.side**2, SO400M.num_tokens) == (4900, 64)
    assert CLIP_L.num_tokens == 576
    assert (QWEN_VIT.side**2, QWEN_VIT.num_tokens) == (4 * 1225, 1225)


@pytest.mark.parametrize("tower", [TOWER, PATCHES, SPANS])
@pytest.mark.parametrize("family", ["mistral", "llama", "qwen2"])
def test_an_image_becomes_finite_tokens_of_the_decoder_s_width(
    family: str, tower: TowerDims
) -> None:
    text = dataclasses.replace(SHAPE.text, family=family)
    loaded = build_shape(dataclasses.replace(SHAPE, text=text, vision=tower), CPU, torch.bfloat16)
    assert {p.dtype for m in (loaded.lm, loaded.vision) for p in m.parameters()} == {torch.bfloat16}
    pixels = torch.randint(0, 256, (2, 3, tower.image_size, tower.image_size), dtype=torch.uint8)
    tokens = loaded.vision.encode(pixels)
    assert tokens.shape == (2, loaded.spec.num_image_tokens, text.hidden)
    assert loaded.spec.num_image_tokens == tower.num_tokens
    assert tokens.isfinite().all() and not torch.equal(tokens[0], tokens[1])


def test_a_tower_of_spans_sees_patches_where_the_models_processor_puts_them() -> None:
    """One patch is bright; its token, and no other, is the one the processor's order says."""
    vision = build_shape(dataclasses.replace(SHAPE, vision=SPANS), CPU, torch.float32).vision
    dark = torch.zeros(1, 3, 140, 140, dtype=torch.uint8)
    light = dark.clone()
    light[..., 14 * 7 : 14 * 8, 14 * 3 : 14 * 4] = 255  # patch row 7, column 3
    processor = Qwen2VLImageProcessor(min_pixels=1, do_rescale=True)
    made = processor(Image.fromarray(light[0].permute(1, 2, 0).numpy()), return_tensors="pt")
    seen: list[torch.Tensor] = []
    parts: Any = vision
    parts.visual.trunk.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    vision.encode(light)
    assert made["image_grid_thw"].tolist() == [[1, 10, 10]]
    bright = [x.flatten(1).amax(1) > 0 for x in (seen[0], made["pixel_values"])]
    assert torch.equal(*bright) and int(bright[0].sum()) == 1


def test_equal_seeds_make_equal_weights() -> None:
    first, again, other = (build_shape(SHAPE, CPU, torch.float32, seed) for seed in (1, 1, 2))
    weights = [m.lm.state_dict() | m.vision.state_dict() for m in (first, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])
    assert first.spec.weights_id == again.spec.weights_id != other.spec.weights_id


def test_the_tokenizer_knows_every_id_and_no_plain_one_is_special() -> None:
    tokenizer = Tokenizer(padded_tokenizer(300), ["<|im_end|>"])
    assert tokenizer.vocab_size == 300
    assert [i for i in range(300) if tokenizer.is_special(i)] == [0, 1, 2]
    assert all(tokenizer.token_bytes(i) for i in range(300))
    assert tokenizer.decode(tokenizer.encode("Grüße, 汉字")) == "Grüße, 汉字"
