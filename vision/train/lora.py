"""Low-rank additions to a model's linear layers, as they are trained.

Owns the layers that add them and the names of PEFT's file format. What is trained here is merged by
`model.lora` when it is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class LoraLinear(nn.Module):
    """W x + (alpha / rank) B A x, of which W stays as it is."""

    weight: Tensor

    def __init__(self, linear: nn.Linear, down: Tensor, up: Tensor, alpha: float) -> None:
        """down [rank, in], up [out, rank]. Raises ValueError for other shapes."""
        super().__init__()
        if (up.shape[0], down.shape[1]) != tuple(linear.weight.shape):
            raise ValueError(f"a LoRA of {up.shape[0]} x {down.shape[1]} is for another layer")
        self.register_buffer("weight", linear.weight.detach(), persistent=False)
        self.down = nn.Parameter(down.detach().float().clone())
        self.up = nn.Parameter(up.detach().float().clone())
        self.scale = alpha / len(down)
        self.off = False  # the base model's own answer

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        if self.off:
            return out
        return out + self.scale * F.linear(F.linear(x, self.down), self.up)


class Lora:
    """All of a model's additions."""

    def __init__(self, lm: nn.Module, tensors: Mapping[str, Tensor], alpha: float) -> None:
        """Puts them in place of `lm`'s linear layers. `tensors`: of a file in PEFT's format.

        Raises ValueError for a tensor without a layer.
        """
        self._layers: dict[str, LoraLinear] = {}
        linears = {name: m for name, m in lm.named_modules() if isinstance(m, nn.Linear)}
        for key in sorted(k for k in tensors if k.endswith(DOWN)):
            name = key.removeprefix(PREFIX).removesuffix(DOWN)
            if name not in linears:
                raise ValueError(f"the model has no linear layer {name}")
            up = tensors[f"{PREFIX}{name}{UP}"]
            made = LoraLinear(linears[name], tensors[key], up, alpha)
            parent, _, last = name.rpartition(".")
            setattr(lm.get_submodule(parent), last, made.to(linears[name].weight.device))
            self._layers[name] = made

    def parameters(self) -> list[nn.Parameter]:
        return [p for layer in self._layers.values() for p in (layer.down, layer.up)]

    def tensors(self) -> dict[str, Tensor]:
        """For a file in PEFT's format."""
        layers = self._layers.items()
        down = {f"{PREFIX}{name}{DOWN}": layer.down.detach() for name, layer in layers}
        return down | {f"{PREFIX}{name}{UP}": layer.up.detach() for name, layer in layers}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """What `tensors` gave."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(tensors[name])

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """The model answers as its base does."""
        for layer in self._layers.values():
            layer.off = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.off = False
