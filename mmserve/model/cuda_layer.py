"""A whole Llama-style decoder layer on a GPU: four matrix products and Triton between them.

Owns the fused layer that takes the place of transformers' one, and `CUDAStep`, what one model call
reads and writes. Knows nothing of sequences or scheduling. Long products are cuBLAS's; a single row
is a matter of reading weights and has a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.cache.kv_pool import KVPool
from mmserve.kernels import attention, fused
from mmserve.kernels.gemv import gemv
from mmserve.kernels.reference import write_kv

FITTING = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


@dataclass(frozen=True)
class CUDAStep:
    """One model call's attention: `own` is written at `slots` and read with `vision`.

    `work` int32: the tables of mmserve.kernels.work; `positions`, `slots` [T] int32, slot -1 where
    a row is padding; `rope` [positions, 2, D / 2] float32.
    """

    work: Tensor
    positions: Tensor
    slots: Tensor
    rope: Tensor
    scratch: attention.Scratch
    launch: attention.Launch
    own: KVPool
    vision: KVPool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D], rotated -> [T, H, D]; stores k and v. No padding."""
        for pool, new in zip(self.own.layer(layer), (k, v), strict=True):
            write_kv(pool, self.slots.long(), new)
        return self.read(layer, q.contiguous(), scale)

    def read(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q [T, H, D] over what is stored -> [T, H, D]."""
        out = torch.empty_like(q)
        pools = self.own.layer(layer), self.vision.layer(layer)
        attention.paged_attention(
            q, self.work, *pools, self.rope, scale, self.scratch, out, self.launch
        )
        return out


class CUDALayer(nn.Module):
    """Drop-in for a transformers decoder layer with RMS norms and SwiGLU."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attend, mlp = layer.self_attn, layer.mlp
        self.index: int = attend.layer_idx
        self.head_dim: int = attend.head_dim
        self.scaling: float = attend.scaling
        self.qkv, self.qkv_bias = _pack(attend.q_proj, attend.k_proj, attend.v_proj)
        self.out, _ = _pack(attend.o_proj)
        self.gate_up, _ = _pack(mlp.gate_proj, mlp.up_proj)
        self.down, _ = _pack(mlp.down_proj)
        self.norms = [_norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)]
        self.head_norm: fused.HeadNorm | None = None
        if hasattr(attend, "q_norm"):
            (q_weight, eps), (k_weight, _) = _norm(attend.q_norm), _norm(attend.k_norm)
            self.head_norm = fused.HeadNorm(q_weight, k_weight, eps)

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether a decoder layer is of the kind this class computes."""
        if type(layer).__name__ not in FITTING:
            return False
        attend, mlp = layer.self_attn, layer.mlp
        plain = (attend.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        window = getattr(attend, "sliding_window", None)
        return all(linear.bias is None for linear in plain) and window is None

    def forward(self, hidden_states: Tensor, *_: Any, step: CUDAStep, **__: Any) -> Tensor:
        """hidden_states [1, T, hidden] -> the same, updated in place."""
        x = hidden_states[0]
        qkv = self._normed(x, 0, self.qkv, self.qkv_bias)
        keys, values = step.own.layer(self.index)
        num_heads = qkv.shape[1] // self.head_dim - 2 * keys.shape[0]
        q = x.new_empty(len(x), num_heads, self.head_dim)
        fused.rotate_store(
            qkv, step.rope, step.positions, step.slots, q, keys, values, self.head_norm
        )
        self._add(x, step.read(self.index, q, self.scaling).flatten(1), self.out)
        self._add(x, self._gated(x), self.down)
        return hidden_states

    def _normed(self, x: Tensor, norm: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1:
            out = x.new_empty(1, len(weight))
            gemv(x, weight, out, bias=bias, norm=self.norms[norm])
            return out
        return functional.linear(rms_norm(x, *self.norms[norm]), weight, bias)

    def _gated(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(self.gate_up) // 2)
        if len(x) == 1:
            gemv(x, self.gate_up, out, norm=self.norms[1], gated=True)
        else:
            fused.silu_mul(self._normed(x, 1, self.gate_up, None), out)
        return out

    def _add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """x += y times weight."""
        if len(x) == 1:
            gemv(y, weight, x, add=True)
        else:
            x.addmm_(y, weight.t())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden]."""
    out = torch.empty_like(x)
    fused.add_rms_norm(None, x, weight, eps, out)
    return out


def _norm(norm: Any) -> tuple[Tensor, float]:
    return norm.weight.detach(), float(norm.variance_epsilon)


def _pack(*layers: Any) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return weight, torch.cat(biases) if biases else None
