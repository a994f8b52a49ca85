"""A tiny random model on the CPU, its plain dense counterpart, and engines around it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.model.loader import LoadedModel
from mmserve.vision.crops import Crops
from mmserve.vision.model import DETAILS

HIDDEN, LAYERS, KV_HEADS, HEAD_DIM = 96, 3, 2, 24  # 6 heads: wider than the hidden size
VOCAB = 264  # 259 known tokens, padded as models' vocabularies often are
IMAGE_TOKENS, IMAGE_SIZE = 20, 8
MAX_LEN = 512
PAGE_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 16 * 4
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2


class TinyVision(nn.Module):
    """uint8 [N, 3, 8, 8] -> [N, 20, 96]: a fixed random linear map."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shape = (IMAGE_TOKENS * HIDDEN, 3 * IMAGE_SIZE * IMAGE_SIZE)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator) * 0.05)

    def encode(self, pixels: Tensor) -> Tensor:
        flat = pixels.flatten(1).float() / 127.5 - 1
        return (flat @ self.weight.T).view(-1, IMAGE_TOKENS, HIDDEN)


@functools.cache
def _lm() -> Any:
    """A 3-layer Llama with grouped heads, float32, seeded."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=END,
    )
    config._attn_implementation = "eager"
    lm = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in lm.parameters():  # livelier than the small default initialisation
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return lm


def tiny_lm() -> Any:
    return copy.deepcopy(_lm())


def tiny_tokenizer() -> Tokenizer:
    """One token a byte, and three special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


NESTED = (5, 10, IMAGE_TOKENS)  # of which low detail takes the least


def _image_tokens(sizes: tuple[int, ...]) -> Callable[[int | None], dict[str, int]]:
    """As `ModelSpec.image_tokens`."""

    def by_detail(most: int | None) -> dict[str, int]:
        kept = max(size for size in sizes if most is None or size <= most)
        return {d: min(sizes[0] if d == "low" else sizes[-1], kept) for d in DETAILS}

    return by_detail


def _image_crops(crops: Crops | None) -> Callable[[int | None], Crops | None]:
    """As `ModelSpec.image_crops`."""

    def within(most: int | None) -> Crops | None:
        return crops if crops is None or most is None else crops.within(most, IMAGE_TOKENS)

    return within


def tiny_model(
    max_model_len: int = MAX_LEN,
    device: str = "cpu",
    sizes: tuple[int, ...] = (IMAGE_TOKENS,),
    crops: Crops | None = None,
) -> Any:
    """What the loader returns, for the tiny model; `sizes`: of its images, in tokens; `crops`: how
    large ones are cut up."""
    spec = SimpleNamespace(
        name="tiny",
        max_model_len=max_model_len,
        system_prompt="Be brief.",
        image_prefix="Image {k}: ",
        image_suffix="\n",
        image_size=IMAGE_SIZE,
        num_image_tokens=IMAGE_TOKENS,
        image_tokens=_image_tokens(sizes),
        image_crops=_image_crops(crops),
        weights_id=bytes(32),
    )
    loaded: Any = LoadedModel
    vision = TinyVision().requires_grad_(False).to(device)
    return loaded(tiny_lm().to(device), tiny_tokenizer(), vision, spec, torch.device(device))


def telling_model() -> Any:
    """The tiny model, saying unlike things of unlike prompts and pictures.

    Tied weights say the last token again and again, and bytes that are no UTF-8 look alike: here
    each token is a letter of its own.
    """
    model = tiny_model()
    model.tokenizer.decoder = decoders.Metaspace()
    generator = torch.Generator().manual_seed(11)
    head = model.lm.lm_head.weight
    other = torch.randn(head.shape, generator=generator)
    model.lm.lm_head.weight = nn.Parameter(other, requires_grad=False)
    return model


def tiny_config(
    *,
    dtype: str = "float32",
    text_pages: int = 200,
    vision_pages: int = 40,
    prefix_caching: bool = True,
    text_format: str = "auto",
    vision_format: str = "auto",
    skip_layers: tuple[int, ...] = (),
    **scheduler: int,
) -> EngineConfig:
    """Budgets in pages of 16 tokens as float32 would take them; an image takes two."""
    return EngineConfig(
        model=ModelConfig(model="tiny", dtype=dtype),
        cache=CacheConfig(
            text_bytes=text_pages * PAGE_BYTES,
            vision_bytes=vision_pages * PAGE_BYTES,
            prefix_caching=prefix_caching,
            text_format=text_format,
            vision_format=vision_format,
            skip_layers=skip_layers,
        ),
        scheduler=SchedulerConfig(**scheduler),
    )


def build_tiny(config: EngineConfig) -> Engine:
    return Engine(config, tiny_model())


def build_telling(config: EngineConfig) -> Engine:
    return Engine(config, telling_model())
