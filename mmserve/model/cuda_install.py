"""Fused layers in the place of transformers' own, on a GPU.

Owns which layers of a decoder are replaced, and what stands in for its last norm and its output
matrix. Knows nothing of what is in a layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.kernels.gemv import gemv
from mmserve.model.adapter import Adapter
from mmserve.model.attention import Probe
from mmserve.model.cuda_layer import BARE, CUDALayer, norm_of, rms_norm
from mmserve.model.cuda_parallel_layer import CUDAParallelLayer
from mmserve.model.cuda_prelude import install_rope

Kind = type[CUDALayer] | type[CUDAParallelLayer]
KINDS: tuple[Kind, ...] = (CUDALayer, CUDAParallelLayer)


class CUDANorm(nn.Module):
    """Drop-in for a transformers RMS norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm_of(norm)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[1, T, hidden] -> the same, anew."""
        return rms_norm(hidden_states[0], *self.norm)[None]


class CUDAHead(nn.Module):
    """Drop-in for an output matrix, of which a single row's product is a matter of reading it."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        rows = hidden.flatten(0, -2)
        if len(rows) != 1:
            return functional.linear(hidden, self.weight, self.bias)
        out = hidden.new_empty(1, len(self.weight))
        gemv(rows, self.weight, out, bias=self.bias)
        return out.view(*hidden.shape[:-1], -1)


def install(adapter: Adapter, *, bare: bool) -> bool:
    """Put ours in the place of a decoder's layers that fit, and of its last norm; whether all fit.

    `bare`: they are to be run one after another, without the decoder's own forward: all or none.
    """
    decoder, model = adapter.decoder, adapter.model
    model.set_output_embeddings(CUDAHead(model.get_output_embeddings()))
    found = {i: _kind_of(layer) for i, layer in enumerate(decoder.layers)}
    fitting = {i: kind for i, kind in found.items() if kind is not None}
    if not bare:
        install_rope(adapter)
    if not bare and fitting:
        turned = _turned_by_row(adapter)
        fitting = {i: kind for i, kind in fitting.items() if i in turned}
    elif any(type(layer).__name__ not in BARE for layer in decoder.layers):
        fitting = {}
    whole = len(fitting) == len(decoder.layers)
    if bare and not whole:
        return False
    norms = {type(decoder.layers[i].input_layernorm) for i in fitting}
    for i, kind in fitting.items():
        decoder.layers[i] = kind(decoder.layers[i], adapter.layers[i].softcap)
    last = getattr(decoder, "norm", None)  # others may call it otherwise
    if type(last) in norms:
        decoder.norm = CUDANorm(last)
    return whole


def _kind_of(layer: Any) -> Kind | None:
    return next((kind for kind in KINDS if kind.fits(layer)), None)


@torch.inference_mode()
def _turned_by_row(adapter: Adapter) -> set[int]:
    """The layers to which the decoder gives cosines and sines as `CUDALayer` takes them."""
    found = set()

    def hear(index: int, _: nn.Module, __: Any, given: dict[str, Any]) -> None:
        head_dim = adapter.layers[index].head_dim
        parts = given.get("position_embeddings") or ()
        whole = [p.dim() == 3 and p.shape[:2] == (1, 1) and p.shape[2] <= head_dim for p in parts]
        if len(whole) == 2 and all(whole):
            found.add(index)

    hooks = [
        layer.register_forward_pre_hook(partial(hear, i), with_kwargs=True)
        for i, layer in enumerate(adapter.decoder.layers)
    ]
    where = torch.zeros((adapter.axes, 1) if adapter.axes > 1 else (1,), dtype=torch.long)
    embeds = torch.zeros(1, adapter.hidden_size, device=adapter.device, dtype=adapter.dtype)
    try:
        adapter.decode(embeds, where.to(adapter.device), Probe())
    finally:
        for hook in hooks:
            hook.remove()
    return found
