"""What the tiny text-only checkpoints are made of, and the text half of the others.

Owns the shapes (3 to 6 layers, hidden size 64) and what a config and a tokenizer must agree on.
Weights, folders and generation are `families`', pictures are `family_vision`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as hf
from transformers import PreTrainedTokenizerFast

from tests.model import family_tokenizer as tok
from tests.model.family_tokenizer import template, tokenizer


@dataclass(frozen=True)
class Recipe:
    """A config, and what turns messages and pictures into its inputs."""

    config: Any
    processor: Any  # a tokenizer where the model takes no images


BODY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
WINDOW = 24  # keys a sliding layer's query reads, itself included


def ids(t: PreTrainedTokenizerFast, size: int | None = None) -> dict[str, Any]:
    """The config entries that follow from a tokenizer."""
    return {
        "vocab_size": len(t) if size is None else size,
        "bos_token_id": t.bos_token_id,
        "eos_token_id": t.eos_token_id,
        "pad_token_id": t.pad_token_id,
    }


def llama_tokens(image: str = "<image>", *more: str, **roles: str) -> PreTrainedTokenizerFast:
    special = ["<unk>", "<s>", "</s>", "<pad>", image, *more]
    return tokenizer(special, bos="<s>", eos="</s>", pad="<pad>", add_bos=True, roles=roles)


def chatml_tokens(image: str | None, *more: str, **roles: str) -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more]
    return tokenizer(
        special,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        roles=roles,
        chat_template=template(tok.CHATML, image or ""),
    )


def gemma_tokens(*more: str, chat: str = "", **roles: str) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", *more]
    return tokenizer(
        special,
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        add_bos=True,
        roles=roles,
        chat_template=template(tok.GEMMA, chat),
    )


def llama3_tokens(last: list[str] | None = None) -> PreTrainedTokenizerFast:
    return tokenizer(
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
            "<|finetune_right_pad_id|>",
        ],
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
        add_bos=True,
        last=last or (),
        chat_template=template(tok.LLAMA3, "<|image|>"),
    )


def llama(
    key_value_heads: int = 2, rope: dict[str, Any] | None = None, trained: int = 4096
) -> Recipe:
    """Llama with 4 query heads; `rope` scales positions beyond `trained`."""
    t = llama3_tokens()
    body = {**BODY, "num_key_value_heads": key_value_heads, "max_position_embeddings": trained}
    scaling = {} if rope is None else {"rope_parameters": {"rope_theta": 10000.0, **rope}}
    return Recipe(hf.LlamaConfig(**body, **ids(t), **scaling), t)


def qwen2() -> Recipe:
    t = chatml_tokens(None)
    return Recipe(hf.Qwen2Config(**BODY, **ids(t), tie_word_embeddings=False), t)


def qwen3() -> Recipe:
    t = chatml_tokens(None)
    return Recipe(hf.Qwen3Config(**BODY, **ids(t), tie_word_embeddings=False), t)


def mistral() -> Recipe:
    """A sliding window in every layer."""
    t = llama_tokens("[INST]", "[/INST]")
    t.chat_template = template(tok.MISTRAL, "")
    return Recipe(hf.MistralConfig(**BODY, **ids(t), sliding_window=WINDOW), t)


def gemma2_body() -> dict[str, Any]:
    """Sliding and full layers in turn, both softcaps in reach of the values they cap."""
    return {
        **BODY,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 20.0,
    }


def gemma2() -> Recipe:
    t = gemma_tokens()
    return Recipe(hf.Gemma2Config(**gemma2_body(), **ids(t)), t)


def gemma3_body() -> dict[str, Any]:
    """Five sliding layers, then a full one; each kind has its own rotary base."""
    return {
        **BODY,
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def gemma3_text() -> Recipe:
    t = gemma_tokens()
    return Recipe(hf.Gemma3TextConfig(**gemma3_body(), **ids(t)), t)


def phi3() -> Recipe:
    """LongRoPE: other factors once a sequence is longer than 64 tokens."""
    t = llama_tokens("<|user|>", "<|assistant|>", "<|end|>")
    body = {key: value for key, value in BODY.items() if key != "head_dim"}
    config = hf.Phi3Config(
        **{**body, "max_position_embeddings": 512},
        **ids(t),
        original_max_position_embeddings=64,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
        },
    )
    t.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    return Recipe(config, t)


def phi() -> Recipe:
    """Rotary on half of each head, attention and feed-forward side by side, a head with a bias."""
    t = chatml_tokens(None)
    body = {key: value for key, value in BODY.items() if key != "head_dim"}
    return Recipe(hf.PhiConfig(**body, **ids(t), partial_rotary_factor=0.5), t)


ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 7.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def scaled(kind: str) -> Callable[[], Recipe]:
    trained = 64 if kind == "dynamic" else 256
    return lambda: llama(rope=ROPE[kind], trained=trained)


TEXT: dict[str, Callable[[], Recipe]] = {
    "llama_mha": lambda: llama(4),
    "llama_gqa": lambda: llama(2),
    "llama_mqa": lambda: llama(1),
    **{f"llama_{kind}": scaled(kind) for kind in ROPE},
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi": phi,
    "phi3": phi3,
}
