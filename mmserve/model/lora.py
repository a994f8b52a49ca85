"""Merging LoRA weights (PEFT's file format) into a model's linear layers.

Owns the names of that format and the sum W + (alpha / rank) B A. PEFT itself would do it too, but
is a heavy dependency for one line of algebra; its file format is kept so that its users' adapters
load.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


@torch.no_grad()
def merge_lora(model: nn.Module, tensors: Mapping[str, Tensor], alpha: float) -> None:
    """Adds (alpha / rank) B A to each named linear layer's weight, in float32, in place.

    tensors: `base_model.model.<layer>.lora_A.weight` [rank, in] and `...lora_B.weight`
    [out, rank], any float dtype. Raises `ValueError` for a tensor that has no partner or no layer.
    """
    layers = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    expected = {layer + end for layer in layers for end in (_A, _B)}
    if expected != tensors.keys():
        raise ValueError(f"not a LoRA file: {sorted(expected ^ tensors.keys())[0]}")
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for layer in sorted(layers):
        linear = linears.get(layer.removeprefix(_PREFIX))
        if linear is None:
            raise ValueError(f"the model has no linear layer {layer.removeprefix(_PREFIX)}")
        down, up = (tensors[layer + end].to(linear.weight.device).float() for end in (_A, _B))
        if (up.shape[0], down.shape[1]) != tuple(linear.weight.shape):
            raise ValueError(f"{layer}: the LoRA's shape is not that of {linear.weight.shape}")
        merged = linear.weight.float() + (alpha / down.shape[0]) * (up @ down)
        linear.weight = nn.Parameter(merged.to(linear.weight.dtype), requires_grad=False)
