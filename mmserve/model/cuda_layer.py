"""A whole Llama-style decoder layer on a GPU: four matrix products and Triton between them.

Owns the fused layer that takes the place of transformers' one, and `CUDAStep`, what one model call
reads and writes. Knows nothing of sequences or scheduling. Long products are cuBLAS's; a single row
is a matter of reading weights and has a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmserve.cache.kv_pool import KVPool
from mmserve.kernels import attention, fused
from mmserve.kernels.gemv import gemv
from mmserve.kernels.launch import Launch
from mmserve.model.attention import Place

# Of PyTorch's dense attention, the best first: on an H200 cuDNN's is twice its flash one's speed.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
DENSE_MULTIPLE = 512  # keys of a dense chunk

FITTING = (
    *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
    *("Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer"),
)


class DenseChunk(NamedTuple):
    """A long chunk that reads nothing but itself, causally: rows [first_row, first_row + num_rows).

    `slots` [N] int64 are those of its keys, N >= num_rows a multiple of DENSE_MULTIPLE (any slot
    stands for what is missing): the library prepares itself once for each length.
    """

    first_row: int
    num_rows: int
    slots: Tensor


@dataclass(frozen=True)
class CUDAStep:
    """One model call's attention, by layer group where not said otherwise.

    `work` int32: the tables of mmserve.kernels.work, one set a group; `slots` [groups, T] int32 as
    an `AttentionPlan` names them; `rope` [positions, 2, D / 2] float32: by it queries are turned
    back before images stored at local positions; `turns`: what fused layers rotate by, None where
    the model computes it; `places`: each layer's group, and its number there.
    """

    work: Tensor
    slots: Tensor
    rope: Tensor
    turns: fused.Turns | None
    scratch: attention.Scratch
    launch: Launch
    text: tuple[KVPool, ...]
    vision: tuple[KVPool, ...]
    places: dict[int, Place]
    dense: tuple[tuple[DenseChunk, ...], ...] = ()

    def pools(self, layer: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(K, V) of text and of images, each [Hkv, pages, page_size, D]."""
        group, number = self.places[layer]
        return self.text[group].layer(number), self.vision[group].layer(number)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D], rotated -> [T, H, D]; stores k and v."""
        fused.store(k, v, self.slots[self.places[layer][0]], *self.pools(layer))
        return self.read(layer, q.contiguous(), scale, softcap, sinks)

    def look(self, layer: int, q: Tensor, kv_heads: int, scale: float) -> Tensor:
        """q [T, H, D] over images that are stored already -> [T, H, D]."""
        return self.read(layer, q.contiguous(), scale)

    def read(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] over what is stored -> [T, H, D]."""
        group, out, (text, vision) = self.places[layer][0], torch.empty_like(q), self.pools(layer)
        attention.paged_attention(
            *(q, self.work, text, vision, self.rope, scale, self.scratch, out, self.launch),
            group=group,
            softcap=softcap,
            sinks=sinks,
        )
        for chunk in self.dense[group] if self.dense else ():
            assert softcap is None and sinks is None
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            out[rows] = _read_densely(chunk, q[rows], text, scale)
        return out


def _read_densely(
    chunk: DenseChunk, q: Tensor, text: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """q [num_rows, H, D] -> the same."""
    keys, values = (pool.flatten(1, 2).index_select(1, chunk.slots)[None] for pool in text)
    asked = functional.pad(q, (0, 0, 0, 0, 0, len(chunk.slots) - chunk.num_rows))
    with sdpa_kernel(BACKENDS, set_priority=True):
        read = functional.scaled_dot_product_attention(
            asked.transpose(0, 1)[None], keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return read[0, :, : chunk.num_rows].transpose(0, 1)


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
        gated = type(mlp.act_fn).__name__.startswith("SiLU")
        return gated and all(linear.bias is None for linear in plain)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        step: CUDAStep,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden] -> the same, updated in place.

        `position_embeddings`: cos and sin [1, T, D] by the model's own rotary module, for steps
        without `turns`.
        """
        x = hidden_states[0]
        qkv = self._normed(x, 0, self.qkv, self.qkv_bias)
        text, vision = step.pools(self.index)
        num_heads = qkv.shape[1] // self.head_dim - 2 * text[0].shape[0]
        q = x.new_empty(len(x), num_heads, self.head_dim)
        turns = step.turns
        if turns is None:
            assert position_embeddings is not None
            turns = fused.Turns(position_embeddings[0][0], position_embeddings[1][0])
        slots = step.slots[step.places[self.index][0]]
        fused.rotate_store(qkv, turns, slots, q, text, vision, self.head_norm)
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
