"""A whole Llama-style decoder layer on the CPU with 8-bit weights: four products and the compiled
kernels between them.

Owns the fused layer that takes the place of transformers' one. Knows nothing of sequences or
scheduling.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmserve.kernels import cpu, int8
from mmserve.model.attention import Step


def _pack(*layers: Any) -> int8.Packed:
    return int8.pack(torch.cat([layer.weight.detach() for layer in layers]))


def _multiply(rows: Any, scales: Any, weight: int8.Packed, out: Any, *, add: bool = False) -> None:
    int8.product(rows, scales, weight.blocks, weight.scale, out, add)


class CPULayer(nn.Module):
    """Drop-in for a transformers decoder layer with RMS norms, SwiGLU and no biases."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.norms = [
            (norm.weight.detach().numpy(), float(norm.variance_epsilon))
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        self.qkv = _pack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _pack(attention.o_proj)
        self.gate_up = _pack(mlp.gate_proj, mlp.up_proj)
        self.down = _pack(mlp.down_proj)

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether a decoder layer is of the kind this class computes."""
        if type(layer).__name__ != "LlamaDecoderLayer":
            return False
        linears: list[Any] = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        gated = type(layer.mlp.act_fn).__name__.startswith("SiLU")
        return gated and all(m.bias is None and m.in_features % 2 == 0 for m in linears)

    def forward(self, hidden_states: Tensor, *_: Any, step: Step, **__: Any) -> Tensor:
        """hidden_states [1, T, hidden] float32 -> the same, updated in place."""
        x = hidden_states[0].numpy()
        scales = np.empty(len(x), np.float32)
        rows = int8.empty_rows(*x.shape)
        cpu.norm_quantize(x, *self.norms[0], self.qkv.limit, rows, scales)
        qkv = np.empty((len(x), len(self.qkv.scale)), np.float32)
        _multiply(rows, scales, self.qkv, qkv)
        attended = self._attend(qkv, step)
        heads = int8.empty_rows(*attended.shape)
        int8.quantize(attended, self.out.limit, heads, scales)
        _multiply(heads, scales, self.out, x, add=True)
        cpu.norm_quantize(x, *self.norms[1], self.gate_up.limit, rows, scales)
        both = np.empty((len(x), len(self.gate_up.scale)), np.float32)
        _multiply(rows, scales, self.gate_up, both)
        gated = int8.empty_rows(len(x), both.shape[1] // 2)
        cpu.gate_quantize(both, self.down.limit, gated, scales)
        _multiply(gated, scales, self.down, x, add=True)
        return hidden_states

    def _attend(self, qkv: Any, step: Step) -> Any:
        """Rotate and store packed q, k, v [T, (H + 2 Hkv) D]; attend. -> [T, H D]."""
        (plan, text, vision), index = step.of(self.index)
        pools = text.arrays[index], vision.arrays[index]
        heads = qkv.shape[1] // self.head_dim - 2 * len(pools[0][0])
        q = np.empty((len(qkv), heads, self.head_dim), np.float32)
        cos, sin, slots = plan.cos.numpy(), plan.sin.numpy(), plan.slots.numpy()
        cpu.rotate_store(qkv, cos, sin, slots, q, *pools)
        out, size = np.empty_like(q), text.shape.page_size
        for group in plan.groups:
            span = slice(group.start, group.start + group.num_seqs * group.num_queries)
            arrays: Any = (q[span], *pools, size, *group.arrays, self.scaling, out[span])
            cpu.row_attention(*arrays)
        return out.reshape(len(qkv), -1)
