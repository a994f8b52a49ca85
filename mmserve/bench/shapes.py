"""Public models' shapes with random weights: what speed is measured on where no weights are.

Owns how dimensions become a `LoadedModel`. Weights are made on the device, in the
dtype they run in, so that a model of 14 GB costs no second copy and no trip through the host.
Knows nothing of workloads or clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from mmserve.bench.ceilings import usual_dtype
from mmserve.bench.dims import ModelShape
from mmserve.bench.tower import ShapedVision
from mmserve.config import ModelConfig
from mmserve.model.adapter import CAUSAL, WHOLE_IMAGES
from mmserve.model.fetch import BaseModelSpec
from mmserve.model.loader import LoadedModel, load_model
from mmserve.model.spec import ModelSpec
from mmserve.vision.preprocess import fingerprint

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2  # <|im_end|>

_FAMILIES: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}


def build_shape(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LoadedModel:
    """The shape with seeded normal weights (deviation 0.02, norms 1), in evaluation mode."""
    with seeded(device, seed):
        lm = AutoModelForCausalLM.from_config(
            text_config(shape), dtype=dtype, attn_implementation="sdpa"
        )
        vision = ShapedVision(shape.vision, shape.text.hidden, dtype)
    return LoadedModel(
        lm=lm.eval().requires_grad_(False),
        tokenizer=padded_tokenizer(shape.text.vocab),
        vision=vision.eval().requires_grad_(False),
        spec=_spec(shape, vision, seed),
        device=device,
        sight=CAUSAL if shape.ordered else WHOLE_IMAGES,
    )


def load_shape(
    shape: ModelShape | None, config: ModelConfig, device: torch.device, seed: int = 0
) -> LoadedModel:
    """The shape, or where there is none, the default model with its weights."""
    if shape is None:
        return load_model(config)
    return build_shape(shape, device, usual_dtype(device), seed)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """What is made within is made on `device`, and the same for equal seeds."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        yield


def padded_tokenizer(vocab: int) -> tokenizers.Tokenizer:
    """Byte-level: three special tokens, one token a byte, and words that fill up to `vocab`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = [*SPECIAL, *letters]
    known += [f"word{i}" for i in range(len(known), vocab)]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(known)}, []))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def text_config(shape: ModelShape) -> Any:
    """transformers' configuration of the decoder."""
    dims = shape.text
    special: dict[str, Any] = {"sliding_window": None} if dims.family == "mistral" else {}
    return _FAMILIES[dims.family](
        num_hidden_layers=dims.layers,
        hidden_size=dims.hidden,
        num_attention_heads=dims.heads,
        num_key_value_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        intermediate_size=dims.ffn,
        vocab_size=dims.vocab,
        max_position_embeddings=shape.max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": dims.theta},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        **special,
    )


def _spec(shape: ModelShape, vision: ShapedVision, seed: int) -> ModelSpec:
    """Names no file: nothing is fetched or read."""
    return ModelSpec(
        name=f"{shape.name} (random weights)",
        max_model_len=shape.max_model_len,
        rope_theta=shape.text.theta,
        base=BaseModelSpec("", "", "", "", "", ""),
        lora=None,
        vision=vision.config,
        vision_files=tuple[Path, ...](),
        system_prompt="Be brief.",
        image_prefix="Image {k}: ",
        image_suffix="\n",
        licences={},
        weights_id=fingerprint(("shape", repr(shape).encode()), ("seed", str(seed).encode())),
    )
