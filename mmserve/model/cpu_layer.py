"""A whole Llama-style decoder layer on the CPU with 8-bit weights: four products and the compiled
kernels between them.

Owns the fused layer that takes the place of transformers' one. Knows nothing of sequences or
scheduling. Long chunks use the reference attention, where large matrix products are best.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmserve.kernels import cpu, int8, reference
from mmserve.model.attention import Step

# A query over its keys one row at a time takes 0.12 us a pair; the reference's tensor operations
# take 0.8 ms to begin with, and little more for a long chunk.
ROW_READS = 8192


class Product:
    """One 8-bit weight matrix: int8 rows in, int32 sums and the scales to read them with out."""

    def __init__(self, *layers: Any) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.weight, scale = int8.quantize_weight(weight)
        self.scale: Any = scale.numpy()

    def __call__(self, rows: Any) -> Any:
        return torch._int_mm(torch.from_numpy(rows), self.weight).numpy()


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
        self.qkv = Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = Product(attention.o_proj)
        self.gate_up = Product(mlp.gate_proj, mlp.up_proj)
        self.down = Product(mlp.down_proj)

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether a decoder layer is of the kind this class computes."""
        return type(layer).__name__ == "LlamaDecoderLayer" and not any(
            isinstance(m, nn.Linear) and m.bias is not None for m in layer.modules()
        )

    def forward(self, hidden_states: Tensor, *_: Any, step: Step, **__: Any) -> Tensor:
        """hidden_states [1, T, hidden] float32 -> the same, updated in place."""
        x = hidden_states[0].numpy()
        count, width = x.shape
        rows, scales = np.empty((2 * count, width), np.int8), np.empty(count, np.float32)
        cpu.norm_quantize(x, *self.norms[0], rows, scales)
        attended = self._attend(self.qkv(rows), scales, step)
        heads = np.empty((2 * count, attended.shape[1]), np.int8)
        cpu.quantize(attended, heads, scales)
        cpu.dequantize_add(self.out(heads), self.out.scale, scales, x)
        cpu.norm_quantize(x, *self.norms[1], rows, scales)
        acc = self.gate_up(rows)
        gated = np.empty((2 * count, acc.shape[1] // 2), np.int8)
        gated_scales = np.empty(count, np.float32)
        cpu.gate_quantize(acc, self.gate_up.scale, scales, gated, gated_scales)
        cpu.dequantize_add(self.down(gated), self.down.scale, gated_scales, x)
        return hidden_states

    def _attend(self, acc: Any, scales: Any, step: Step) -> Any:
        """Rotate and store the packed q, k, v product; attend. -> [T, H * D]."""
        plan, own, vision = step.plan, step.own, step.vision
        keys, values = own.arrays[self.index]
        heads = acc.shape[1] // self.head_dim - 2 * keys.shape[0]
        q = np.empty((len(scales), heads, self.head_dim), np.float32)
        cos, sin, slots = plan.cos.numpy(), plan.sin.numpy(), plan.slots.numpy()
        cpu.rotate_store(acc, self.qkv.scale, scales, cos, sin, slots, q, keys, values)
        out = np.empty_like(q)
        for group in plan.groups:
            span = slice(group.start, group.start + group.num_seqs * group.num_queries)
            if group.num_reads < ROW_READS or group.num_queries == 1:
                pools = (keys, values), vision.arrays[self.index], own.shape.page_size
                arrays: Any = (q[span], *pools, *group.arrays, self.scaling, out[span])
                cpu.row_attention(*arrays)
                continue
            queries = torch.from_numpy(q[span])
            queries = queries.view(group.num_seqs, group.num_queries, *q.shape[1:])
            layers = own.layer(self.index), vision.layer(self.index)
            result = reference.group_attention(queries, group, *layers, self.scaling)
            out[span] = result.flatten(0, 1).numpy()
        return out.reshape(len(scales), -1)
