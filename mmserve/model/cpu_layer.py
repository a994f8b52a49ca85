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

from mmserve.kernels import cpu, int8, reference
from mmserve.kernels.kv_formats import Pages
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
        size, kv_heads = text.shape.page_size, text.shape.num_kv_heads
        heads = qkv.shape[1] // self.head_dim - 2 * kv_heads
        q = np.empty((len(qkv), heads, self.head_dim), np.float32)
        out, turns = np.empty_like(q), (plan.cos.numpy(), plan.sin.numpy())
        plain = text.shape.kind.plain and vision.shape.kind.plain
        if plain:
            pools = text.arrays[index], vision.arrays[index]
            cpu.rotate_store(qkv, *turns, plan.slots.numpy(), q, *pools)
        else:
            new = np.empty((2, kv_heads, len(qkv), self.head_dim), np.float32)
            fresh: Any = (new[0], new[1])
            cpu.rotate_store(qkv, *turns, np.arange(len(qkv)), q, fresh, fresh)
            k, v = torch.from_numpy(new).transpose(1, 2)
            reference.write_step(plan, text.layer(index), vision.layer(index), k, v)
        groups = plan.groups
        if not plain:
            *numbers, groups = plan.alone
            pools = (
                _decoded(text.layer(index), numbers[0]),
                _decoded(vision.layer(index), numbers[1]),
            )
        for group in groups:
            span = slice(group.start, group.start + group.num_seqs * group.num_queries)
            arrays: Any = (q[span], *pools, size, *group.arrays, self.scaling, out[span])
            cpu.row_attention(*arrays)
        return out.reshape(len(qkv), -1)


def _decoded(pages: Pages, numbers: Tensor) -> tuple[Any, Any]:
    """K and V of the pages with these numbers [P], as `cpu.row_attention` reads pools."""
    k, v = reference.read_pages(pages, numbers[None])
    return k[0].contiguous().numpy(), v[0].contiguous().numpy()
