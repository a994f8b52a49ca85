"""A tiny random model on the CPU, and its plain dense counterpart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCAB, IMAGE_TOKENS, IMAGE_SIZE = 48, 97, 20, 8


class TinyVision(nn.Module):
    """uint8 [N, 3, 8, 8] -> [N, 20, 48]: a fixed random linear map."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shape = (IMAGE_TOKENS * HIDDEN, 3 * IMAGE_SIZE * IMAGE_SIZE)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator) * 0.05)

    def encode(self, pixels: Tensor) -> Tensor:
        flat = pixels.flatten(1).float() / 127.5 - 1
        return (flat @ self.weight.T).view(-1, IMAGE_TOKENS, HIDDEN)


def tiny_lm() -> Any:
    """A 3-layer Llama with grouped heads, float32, seeded."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    lm = LlamaForCausalLM(config).eval()
    for parameter in lm.parameters():  # livelier than the small default initialisation
        parameter.data.mul_(3) if parameter.dim() > 1 else None
    return lm


def tiny_model() -> Any:
    """What the loader returns, for the tiny model."""
    return SimpleNamespace(lm=tiny_lm(), vision=TinyVision())
