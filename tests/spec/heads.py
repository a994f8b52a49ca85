"""A tiny model's parts, heads for it, and its features, as drafters are told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmserve.spec.drafter import Context, Landed
from mmserve.spec.eagle import EagleConfig, EagleHead, load_eagle
from mmserve.spec.head_files import read_head, write_head
from mmserve.spec.target_parts import TargetParts

HIDDEN, VOCAB, LAYERS = 32, 50, 8


def parts() -> TargetParts:
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    matrix = torch.randn(VOCAB, HIDDEN, generator=generator)
    return TargetParts(
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        embed=lambda ids: embedding[ids],
        logits=lambda x: x @ matrix.T,
        head_rows=lambda ids: matrix[ids],
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def eagle_config(third: bool, **changes: Any) -> EagleConfig:
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope_theta": 10_000.0,
        "eps": 1e-5,
        "taps": (1, 3, 4) if third else (-1,),
        "third": third,
        "draft_vocab": 20 if third else None,
    }
    return EagleConfig(**{**settings, **changes})


def random_eagle(third: bool, seed: int = 0, **changes: Any) -> EagleHead:
    """Untrained, lively, without its vocabulary."""
    torch.manual_seed(seed)
    head = EagleHead(eagle_config(third, **changes))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    return head


def saved_eagle(folder: Path, third: bool, **further: Tensor) -> EagleHead:
    """As public checkpoints lie in a folder, d2t in those of the third kind; read again."""
    head = random_eagle(third)
    tensors = dict(head.state_dict())
    if third:
        tensors["d2t"] = torch.arange(20) + 3
    else:
        tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    config = head.config.as_json()
    del config["eagle_config"]  # public ones do not say
    write_head(folder, config, {**tensors, **further})
    return load_eagle(read_head(folder), parts())


def context(name: str, tokens: list[int], prompt: int = 1) -> Context:
    return Context(name, tokens, prompt)


def told(first: int, features: Tensor) -> Landed:
    return Landed(None, (), (), first, features)
