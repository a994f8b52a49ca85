"""Fusing at load: fewer, larger operations in a transformers causal LM, in place.

Owns packed projections, 8-bit weights, the one-call RMS norm and the exact rotary table. Works on
any decoder that names its projections q_proj, k_proj, v_proj and gate_proj, up_proj, as nearly all
of transformers do; what has other names is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.kernels import int8
from mmserve.model.cpu_layer import CPULayer

PACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class DenseLinear(nn.Module):
    """x [..., K] -> [..., N] in the weight's own dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Int8Linear(nn.Module):
    """x [..., K] float32 -> [..., N] float32 with 8-bit weights (see mmserve.kernels.int8)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = int8.pack(weight)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        out = int8.linear(x.flatten(0, -2), self.weight)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


class Pack:
    """Several linear layers on one input as one product.

    The model calls them in turn on the same tensor; the first call computes all outputs, each
    later one collects its own.
    """

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        self.linear = linear
        self.sizes = sizes
        self.outputs: list[Tensor] = []

    def compute(self, x: Tensor) -> Tensor:
        assert not self.outputs, "the last packed outputs were not collected"
        outputs: list[Tensor] = list(self.linear(x).split(self.sizes, -1))
        self.outputs = outputs[1:]
        return outputs[0]


class PackedFirst(nn.Module):
    """Stands where the first of a pack's layers stood."""

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        self.linear = pack.linear
        self.pack = pack

    def forward(self, x: Tensor) -> Tensor:
        return self.pack.compute(x)


class PackedNext(nn.Module):
    """Stands where a later one stood."""

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Tensor:
        return self.pack.outputs.pop(0)


class FusedRMSNorm(nn.Module):
    """transformers' RMS norm as one call, in float32 or the input's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TableRotary(nn.Module):
    """Rotary cos and sin from a float64-built table instead of float32 angles."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", torch.cat((table, table), -1), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [1, T] -> cos, sin [1, T, D] in x's dtype."""
        cos, sin = self.table[position_ids].to(x.dtype).unbind(-2)
        return cos, sin


def _held(weight: Tensor, bias: Tensor | None, weights: str) -> nn.Module:
    """A linear layer with `weights`; the 8-bit product multiplies pairs of inputs."""
    if weights == "int8" and weight.shape[1] % 2 == 0:
        return Int8Linear(weight, bias)
    return DenseLinear(weight, bias)


def _pack(parent: nn.Module, names: tuple[str, ...], weights: str) -> None:
    layers = [getattr(parent, name) for name in names]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases).detach() if biases else None
    pack = Pack(_held(weight, bias, weights), [layer.out_features for layer in layers])
    setattr(parent, names[0], PackedFirst(pack))
    for name in names[1:]:
        setattr(parent, name, PackedNext(pack))


def fuse(lm: Any, *, table: Tensor, weights: str) -> None:
    """Fuse a causal LM in place. `weights` is "int8" or "dense"; `table` is `rope_table`'s."""
    if weights == "int8":
        layers = lm.model.layers
        for index, layer in enumerate(layers):
            if CPULayer.fits(layer):
                layers[index] = CPULayer(layer)
    for parent in list(lm.modules()):
        for names in PACKS:
            if all(isinstance(getattr(parent, name, None), nn.Linear) for name in names):
                _pack(parent, names, weights)
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, _held(child.weight.detach(), bias, weights))
            elif type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                norm: Any = child
                setattr(parent, name, FusedRMSNorm(norm.weight.detach(), norm.variance_epsilon))
    lm.model.rotary_emb = TableRotary(table)
