"""What the tiny vision-language checkpoints are made of: config, tokenizer, processor.

Owns the towers (2 or 3 layers, hidden size 32, pictures of 28 to 70 pixels) and every number that a
config and a processor must agree on. The text halves come from `family_text`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers import PreTrainedTokenizerFast

from tests.model import family_tokenizer as tok
from tests.model.family_text import (
    BODY,
    WINDOW,
    Recipe,
    chatml_tokens,
    gemma2_body,
    gemma3_body,
    gemma_tokens,
    ids,
    llama3_tokens,
    llama_tokens,
)
from tests.model.family_tokenizer import template, tokenizer

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
}


def idefics2() -> Recipe:
    """SigLIP, a Perceiver resampler of 6 latents, Mistral with a sliding window in every layer."""
    t = llama_tokens("<image>", "<fake_token_around_image>", "<end_of_utterance>")
    config = hf.Idefics2Config(
        text_config={"model_type": "mistral", **BODY, **ids(t), "sliding_window": WINDOW},
        vision_config={**TOWER, "patch_size": 14, "image_size": 70},
        perceiver_config={
            "hidden_size": BODY["hidden_size"],
            "resampler_n_latents": 6,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        image_token_id=t.convert_tokens_to_ids("<image>"),
    )
    images = hf.Idefics2ImageProcessor(
        size={"shortest_edge": 28, "longest_edge": 70}, do_image_splitting=False
    )
    chat = template(tok.IDEFICS, "<image>")
    return Recipe(config, hf.Idefics2Processor(images, t, image_seq_len=6, chat_template=chat))


def idefics3_tokens() -> PreTrainedTokenizerFast:
    return tokenizer(
        [
            "<|begin_of_text|>",
            "<end_of_utterance>",
            "<pad>",
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
            *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
        ],
        bos="<|begin_of_text|>",
        eos="<end_of_utterance>",
        pad="<pad>",
        add_bos=True,
    )


def idefics3_like(config_class: Any, t: PreTrainedTokenizerFast) -> Any:
    return config_class(
        text_config={"model_type": "llama", **BODY, **ids(t)},
        vision_config={**TOWER, "patch_size": 7, "image_size": 28},
        image_token_id=t.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )


def idefics3() -> Recipe:
    """Tiles of 28 pixels, 4 tokens each, with row and column tokens between, then the whole."""
    t = idefics3_tokens()
    images = hf.Idefics3ImageProcessor(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True
    )
    chat = template(tok.IDEFICS, "<image>", "<|begin_of_text|>")
    processor = hf.Idefics3Processor(images, t, image_seq_len=4, chat_template=chat)
    return Recipe(idefics3_like(hf.Idefics3Config, t), processor)


def smolvlm() -> Recipe:
    """Idefics3's likeness with a processor of its own."""
    t = idefics3_tokens()
    images = hf.SmolVLMImageProcessor(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True
    )
    videos = hf.SmolVLMVideoProcessor(
        size={"longest_edge": 28}, max_image_size={"longest_edge": 28}, num_frames=2, fps=1
    )
    chat = template(tok.IDEFICS, "<image>", "<|begin_of_text|>")
    processor = hf.SmolVLMProcessor(images, t, videos, image_seq_len=4, chat_template=chat)
    return Recipe(idefics3_like(hf.SmolVLMConfig, t), processor)


def llava() -> Recipe:
    """LLaVA 1.5: CLIP's last layer but one, without its class token; 16 tokens a picture."""
    t = llama_tokens("<image>")
    config = hf.LlavaConfig(
        text_config={"model_type": "llama", **BODY, **ids(t)},
        vision_config={
            "model_type": "clip_vision_model",
            **TOWER,
            "num_hidden_layers": 3,
            "patch_size": 7,
            "image_size": 28,
            "projection_dim": 16,
        },
        image_token_index=t.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    images = hf.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    processor = hf.LlavaProcessor(
        images,
        t,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template(tok.LLAVA, "<image>"),
    )
    return Recipe(config, processor)


def llava_onevision() -> Recipe:
    """SigLIP on the whole picture and on tiles of it, newline features, Qwen 2."""
    t = chatml_tokens("<image>", "<image>", "<video>")
    grid = [[28, 28], [28, 56], [56, 28], [56, 56]]
    config = hf.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **BODY, **ids(t)},
        vision_config={
            "model_type": "siglip_vision_model",
            **TOWER,
            "patch_size": 7,
            "image_size": 28,
            "vision_use_head": False,
        },
        image_token_index=t.convert_tokens_to_ids("<image>"),
        video_token_index=t.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grid,
        vision_feature_select_strategy="full",
    )
    size = {"height": 28, "width": 28}
    processor = hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid),
        t,
        hf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=t.chat_template,
    )
    return Recipe(config, processor)


def qwen_vl_processor(kind: Any, patch: int) -> tuple[PreTrainedTokenizerFast, Any]:
    vision = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    t = chatml_tokens("<|vision_start|><|image_pad|><|vision_end|>", *vision)
    shape = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (12 * patch) ** 2}
    images = hf.Qwen2VLImageProcessor(size=size, **shape)
    videos = (
        hf.Qwen2VLVideoProcessor(size=size, **shape)
        if kind is hf.Qwen2_5_VLProcessor
        else hf.Qwen3VLVideoProcessor(size=size, **shape)
    )
    return t, kind(images, t, videos, chat_template=t.chat_template)


def qwen_vl_ids(t: PreTrainedTokenizerFast) -> dict[str, Any]:
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    return {f"{name}_token_id": t.convert_tokens_to_ids(token) for name, token in names.items()}


def qwen2_5_vl() -> Recipe:
    """M-RoPE in sections, a tower with windows of 2 x 2 merged patches in one of its two layers."""
    t, processor = qwen_vl_processor(hf.Qwen2_5_VLProcessor, 7)
    body = {key: value for key, value in BODY.items() if key != "head_dim"}
    config = hf.Qwen2_5_VLConfig(
        text_config={
            **body,
            **ids(t),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 7,
            "window_size": 28,
            "out_hidden_size": BODY["hidden_size"],
            "fullatt_block_indexes": [1],
        },
        **qwen_vl_ids(t),
    )
    return Recipe(config, processor)


def qwen3_vl() -> Recipe:
    """Interleaved M-RoPE, and features of two tower layers added to the first two text layers."""
    t, processor = qwen_vl_processor(hf.Qwen3VLProcessor, 8)
    config = hf.Qwen3VLConfig(
        text_config={
            **BODY,
            **ids(t),
            "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 8,
            "out_hidden_size": BODY["hidden_size"],
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **qwen_vl_ids(t),
    )
    return Recipe(config, processor)


def gemma3() -> Recipe:
    """Five sliding layers to one full, 9 pooled tokens a picture that see each other both ways."""
    t = gemma_tokens(
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        chat="<start_of_image>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    config = hf.Gemma3Config(
        text_config={**gemma3_body(), **ids(t)},
        vision_config={
            "model_type": "siglip_vision_model",
            **TOWER,
            "patch_size": 7,
            "image_size": 42,
            "vision_use_head": False,
        },
        mm_tokens_per_image=9,
        boi_token_index=t.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=t.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=t.convert_tokens_to_ids("<image_soft_token>"),
    )
    images = hf.Gemma3ImageProcessor(size={"height": 42, "width": 42})
    processor = hf.Gemma3Processor(images, t, chat_template=t.chat_template, image_seq_length=9)
    return Recipe(config, processor)


def pixtral_tower() -> dict[str, Any]:
    return {"model_type": "pixtral", **TOWER, "patch_size": 7, "image_size": 70}


def pixtral_processor(merge: int) -> tuple[PreTrainedTokenizerFast, Any]:
    t = llama_tokens("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]")
    images = hf.PixtralImageProcessor(
        size={"longest_edge": 70}, patch_size={"height": 7, "width": 7}
    )
    processor = hf.PixtralProcessor(
        images,
        t,
        patch_size=7,
        spatial_merge_size=merge,
        chat_template=template(tok.MISTRAL, "[IMG]"),
    )
    return t, processor


def mistral3() -> Recipe:
    """Pixtral's tower with 2 x 2 merged patches; rows end in a break token."""
    t, processor = pixtral_processor(2)
    config = hf.Mistral3Config(
        text_config={"model_type": "mistral", **BODY, **ids(t), "sliding_window": None},
        vision_config=pixtral_tower(),
        image_token_index=t.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return Recipe(config, processor)


def pixtral() -> Recipe:
    """Pixtral 12B as transformers has it: a LLaVA with Pixtral's tower, nothing merged."""
    t, processor = pixtral_processor(1)
    config = hf.LlavaConfig(
        text_config={"model_type": "mistral", **BODY, **ids(t), "sliding_window": None},
        vision_config=pixtral_tower(),
        image_token_index=t.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=1,
    )
    return Recipe(config, processor)


def internvl() -> Recipe:
    """Tiles of 28 pixels and a thumbnail, 4 tokens each after pixel shuffling, Qwen 2."""
    t = chatml_tokens(
        "<IMG_CONTEXT>\n",
        "<img>",
        "</img>",
        "<IMG_CONTEXT>",
        "<video>",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = hf.InternVLConfig(
        text_config={"model_type": "qwen2", **BODY, **ids(t)},
        vision_config={
            **TOWER,
            "patch_size": [7, 7],
            "image_size": [28, 28],
        },
        image_token_id=t.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"height": 28, "width": 28}
    processor = hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        t,
        hf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=t.chat_template,
    )
    return Recipe(config, processor)


def paligemma2() -> Recipe:
    """SigLIP before Gemma 2; the whole prompt sees itself both ways. It has no chat template."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>"]
    roles = {"image_token": "<image>"}
    t = tokenizer(special, bos="<bos>", eos="<eos>", pad="<pad>", roles=roles)
    images = hf.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(images, t)  # adds its location and segment tokens to t
    config = hf.PaliGemmaConfig(
        text_config={"model_type": "gemma2", **gemma2_body(), **ids(t)},
        vision_config={
            "model_type": "siglip_vision_model",
            **TOWER,
            "patch_size": 7,
            "image_size": 28,
            "vision_use_head": False,
        },
        image_token_index=t.convert_tokens_to_ids("<image>"),
        projection_dim=BODY["hidden_size"],
        hidden_size=BODY["hidden_size"],
        vocab_size=len(t),
    )
    return Recipe(config, processor)


def mllama() -> Recipe:
    """Cross-attention in layers 1 and 3; the image token has an embedding but no logit."""
    t = llama3_tokens(last=["<|image|>"])
    config = hf.MllamaConfig(
        text_config={
            **{key: value for key, value in BODY.items() if key != "head_dim"},
            **ids(t, len(t) - 1),
            "num_hidden_layers": 5,
            "cross_attention_layers": [1, 3],
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_global_layers": 2,
            "attention_heads": 2,
            "patch_size": 7,
            "image_size": 28,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0, 2],
            "vision_output_dim": 96,
        },
        image_token_index=t.convert_tokens_to_ids("<|image|>"),
    )
    images = hf.MllamaImageProcessor(size={"height": 28, "width": 28}, max_image_tiles=4)
    return Recipe(config, hf.MllamaProcessor(images, t, chat_template=t.chat_template))


VISION: dict[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        idefics2,
        idefics3,
        smolvlm,
        llava,
        llava_onevision,
        qwen2_5_vl,
        qwen3_vl,
        gemma3,
        mistral3,
        pixtral,
        internvl,
        paligemma2,
        mllama,
    )
}
