"""A decoder layer whose attention stands beside its MLP, on a GPU: two matrix products.

Owns Phi's layer: one layer norm before both halves, biases everywhere. What both halves begin with
is one product, and so is what they end with. Knows nothing of sequences, scheduling or where keys
are held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.kernels.gemv import gemv
from mmserve.model.cuda_heads import CUDAHeads
from mmserve.model.cuda_layer import gate_of, pack
from mmserve.model.cuda_step import CUDAStep
from mmserve.model.shard import total_of


class CUDAParallelLayer(nn.Module):
    """Drop-in for transformers' Phi layer."""

    def __init__(self, layer: Any, softcap: float | None = None) -> None:
        """`softcap`: of its attention's scores."""
        super().__init__()
        attend, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
        self.gain, self.shift, self.eps = norm.weight.detach(), norm.bias.detach(), norm.eps
        first = (attend.q_proj, attend.k_proj, attend.v_proj, mlp.fc1)
        self.first, self.first_bias = pack(*first)
        self.last = torch.cat((attend.dense.weight, mlp.fc2.weight), 1).detach()
        self.last_bias = (attend.dense.bias + mlp.fc2.bias).detach()
        self.inner: int = mlp.fc1.out_features
        # For a row that is normed inside the product: what a mean of one, and the norm's bias, come
        # to behind it.
        shifted = self.first.float() @ self.shift.float()
        self.sums = self.first.float() @ self.gain.float()
        self.row_bias = shifted if self.first_bias is None else shifted + self.first_bias.float()
        self.heads = CUDAHeads(attend, softcap=softcap)

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether a decoder layer is of the kind this class computes."""
        if type(layer).__name__ != "PhiDecoderLayer" or total_of(layer.mlp.fc2) is not None:
            return False
        return gate_of(layer.mlp) == "gelu" and not layer.self_attn.qk_layernorm

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        step: CUDAStep,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden] -> the same, updated in place; see `CUDAHeads.read`."""
        x = hidden_states[0]
        if len(x) > 1:
            self._add_rows(x, step, position_embeddings)
            return hidden_states
        both = x.new_empty(1, self.last.shape[1])  # what the heads have read, and the MLP's inside
        read, inner = both[:, : -self.inner], both[:, -self.inner :]
        qkv = x.new_empty(1, len(self.first) - self.inner)
        norm: dict[str, Any] = {"norm": (self.gain, self.eps), "centred": self.sums}
        gemv(x, self.first, qkv, bias=self.row_bias, opened=inner, gate="gelu", **norm)
        self.heads.read(qkv, step, position_embeddings, out=read)
        gemv(both, self.last, x, bias=self.last_bias, add=True)
        return hidden_states

    def _add_rows(
        self, x: Tensor, step: CUDAStep, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> None:
        normed = functional.layer_norm(x, self.gain.shape, self.gain, self.shift, self.eps)
        begun = functional.linear(normed, self.first, self.first_bias)
        read = self.heads.read(begun[:, : -self.inner], step, position_embeddings)
        inner = functional.gelu(begun[:, -self.inner :], approximate="tanh")
        x += functional.linear(torch.cat((read, inner), 1), self.last, self.last_bias)
