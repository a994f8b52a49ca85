"""A whole decoder layer on a GPU: four matrix products and Triton between them.

Owns the layer of most families, which takes the place of transformers' own, and which of theirs it
can stand for. Knows nothing of sequences, scheduling or where keys are held. Long products are
cuBLAS's; a single row is a matter of reading weights and has a kernel of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.kernels import fused
from mmserve.kernels.fused import Gate, Norm
from mmserve.kernels.gemv import gemv
from mmserve.model.cuda_heads import CUDAHeads
from mmserve.model.cuda_step import CUDAStep
from mmserve.model.shard import Total, total_of

# Of decoders that are nothing but such layers and a norm behind them.
BARE = (
    *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
    *("Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer"),
)
FITTING = (
    *BARE,
    *("GemmaDecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer", "Phi3DecoderLayer"),
    "MllamaSelfAttentionDecoderLayer",
)

GATES: dict[Gate, Any] = {
    "silu": functional.silu,
    "gelu": partial(functional.gelu, approximate="tanh"),
}


class CUDALayer(nn.Module):
    """Drop-in for a transformers decoder layer with RMS norms and a gated MLP."""

    def __init__(self, layer: Any, softcap: float | None = None) -> None:
        """`softcap`: of its attention's scores."""
        super().__init__()
        attend, mlp = layer.self_attn, layer.mlp
        self.qkv, self.qkv_bias = pack(*_parts(attend, "qkv", ("q", "k", "v")))
        self.out, _ = pack(attend.o_proj)
        self.gate_up, _ = pack(*_parts(mlp, "gate_up", ("gate", "up")))
        self.down, _ = pack(mlp.down_proj)
        # Where `out` and `down` are split over ranks.
        self.total = total_of(mlp.down_proj) or Total(first=True)
        self.adds = self.total.first
        gate = gate_of(mlp)
        assert gate is not None, "does not fit"
        self.gate: Gate = gate
        first, second = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        self.before, self.after = (first, second), None
        if hasattr(layer, "pre_feedforward_layernorm"):  # the second is what its name says
            self.before = first, norm_of(layer.pre_feedforward_layernorm)
            self.after = second, norm_of(layer.post_feedforward_layernorm)
        head_norm: fused.HeadNorm | None = None
        if hasattr(attend, "q_norm"):
            (q_weight, eps), (k_weight, _) = norm_of(attend.q_norm), norm_of(attend.k_norm)
            head_norm = fused.HeadNorm(q_weight, k_weight, eps)
        self.heads = CUDAHeads(attend, head_norm, softcap)

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether a decoder layer is of the kind this class computes."""
        if type(layer).__name__ not in FITTING:
            return False
        attend, mlp = layer.self_attn, layer.mlp
        plain = (attend.o_proj, mlp.down_proj, *_parts(mlp, "gate_up", ("gate", "up")))
        return gate_of(mlp) is not None and all(linear.bias is None for linear in plain)

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
        if len(x) == 1:
            qkv = x.new_empty(1, len(self.qkv))
            gemv(x, self.qkv, qkv, bias=self.qkv_bias, norm=self.before[0])
        else:
            qkv = functional.linear(rms_norm(x, *self.before[0]), self.qkv, self.qkv_bias)
        read = self.heads.read(qkv, step, position_embeddings)
        if len(x) == 1:
            self._finish_row(x, read)
        else:
            self._finish_rows(x, read)
        return hidden_states

    def _finish_row(self, x: Tensor, read: Tensor) -> None:
        """x [1, hidden] and what its heads have read [1, H D] -> x behind the layer, in place."""
        gated = x.new_empty(1, len(self.gate_up) // 2)
        if self.after is None:
            gemv(read, self.out, x, add=self.adds)
            self.total(x)
            gemv(x, self.gate_up, gated, norm=self.before[1], gated=True, gate=self.gate)
            gemv(gated, self.down, x, add=self.adds)
            self.total(x)
            return
        added = torch.empty_like(x)
        gemv(read, self.out, added)
        fused.add_normed(self.total(added), x, *self.after[0])
        gemv(x, self.gate_up, gated, norm=self.before[1], gated=True, gate=self.gate)
        gemv(gated, self.down, added)
        fused.add_normed(self.total(added), x, *self.after[1])

    def _finish_rows(self, x: Tensor, read: Tensor) -> None:
        """The same of several rows."""
        normed = torch.empty_like(x)
        if self.after is None:
            self._add(x, read, self.out)
            fused.add_rms_norm(None, x, *self.before[1], normed)
        else:
            added = self.total(functional.linear(read, self.out))
            fused.add_rms_norm(added, x, *self.before[1], normed, after=self.after[0])
        gated = x.new_empty(len(x), len(self.gate_up) // 2)
        fused.gated_mul(functional.linear(normed, self.gate_up), gated, self.gate)
        if self.after is None:
            self._add(x, gated, self.down)
        else:
            added = self.total(functional.linear(gated, self.down))
            fused.add_normed(added, x, *self.after[1])

    def _add(self, x: Tensor, inputs: Tensor, weight: Tensor) -> None:
        """To x, in place. Where inputs are split over ranks, one of these brings in x."""
        if self.adds:
            x.addmm_(inputs, weight.t())
        else:
            torch.mm(inputs, weight.t(), out=x)
        self.total(x)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [T, hidden]."""
    out = torch.empty_like(x)
    fused.add_rms_norm(None, x, gain, eps, out)
    return out


def norm_of(norm: Any) -> Norm:
    weight = norm.weight.detach()
    if type(norm).__name__.startswith("Gemma"):  # which keeps how far the gain is from one
        return 1 + weight.float(), float(norm.eps)
    return weight, float(norm.variance_epsilon)


def gate_of(mlp: Any) -> Gate | None:
    """Which of GATES an MLP's activation is."""
    activation = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    x = torch.linspace(-8, 8, 65)
    equal = (g for g, f in GATES.items() if torch.allclose(activation(x), f(x), atol=1e-6))
    return next(equal, None)


def _parts(module: Any, packed: str, names: tuple[str, ...]) -> list[Any]:
    """A module's projections of these names, or the one that it has packed them into."""
    whole = getattr(module, f"{packed}_proj", None)
    return [getattr(module, f"{name}_proj") for name in names] if whole is None else [whole]


def pack(*layers: Any) -> tuple[Tensor, Tensor | None]:
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
    return weight, torch.cat(biases) if biases else None
