"""A whole decoder layer on a GPU: four matrix products and Triton between them.

Owns the layer and the final norm that take the place of transformers' own, and which of them they
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
from mmserve.model.adapter import Adapter
from mmserve.model.attention import Probe
from mmserve.model.cuda_step import CUDAStep

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
        self.index: int = attend.layer_idx
        self.head_dim: int = attend.head_dim
        self.scaling: float = attend.scaling
        self.softcap = softcap
        self.qkv, self.qkv_bias = _pack(*_parts(attend, "qkv", ("q", "k", "v")))
        self.out, _ = _pack(attend.o_proj)
        self.gate_up, _ = _pack(*_parts(mlp, "gate_up", ("gate", "up")))
        self.down, _ = _pack(mlp.down_proj)
        gate = _gate_of(mlp)
        assert gate is not None, "does not fit"
        self.gate: Gate = gate
        first, second = _norm_of(layer.input_layernorm), _norm_of(layer.post_attention_layernorm)
        self.before, self.after = (first, second), None
        if hasattr(layer, "pre_feedforward_layernorm"):  # the second is what its name says
            self.before = first, _norm_of(layer.pre_feedforward_layernorm)
            self.after = second, _norm_of(layer.post_feedforward_layernorm)
        self.head_norm: fused.HeadNorm | None = None
        if hasattr(attend, "q_norm"):
            (q_weight, eps), (k_weight, _) = _norm_of(attend.q_norm), _norm_of(attend.k_norm)
            self.head_norm = fused.HeadNorm(q_weight, k_weight, eps)

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether a decoder layer is of the kind this class computes."""
        if type(layer).__name__ not in FITTING:
            return False
        attend, mlp = layer.self_attn, layer.mlp
        plain = (attend.o_proj, mlp.down_proj, *_parts(mlp, "gate_up", ("gate", "up")))
        return _gate_of(mlp) is not None and all(linear.bias is None for linear in plain)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        step: CUDAStep,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden] -> the same, updated in place.

        `position_embeddings`: cos and sin [1, T, R] by the model's own rotary module, for steps
        without `turns`; the first R of a head's dimensions are turned.
        """
        x = hidden_states[0]
        if len(x) == 1:
            qkv = x.new_empty(1, len(self.qkv))
            gemv(x, self.qkv, qkv, bias=self.qkv_bias, norm=self.before[0])
        else:
            qkv = functional.linear(rms_norm(x, *self.before[0]), self.qkv, self.qkv_bias)
        turns, rotary = step.turns, None
        if turns is None:
            assert position_embeddings is not None
            cos, sin = (part[0] for part in position_embeddings)
            turns, rotary = fused.Turns(cos, sin), cos.shape[1]
        text, vision = step.pools(self.index)
        num_heads = qkv.shape[1] // self.head_dim - 2 * text[0].shape[0]
        q = x.new_empty(len(x), num_heads, self.head_dim)
        slots = step.slots[step.places[self.index][0]]
        fused.rotate_store(qkv, turns, slots, q, text, vision, self.head_norm, rotary)
        read = step.read(self.index, q, self.scaling, self.softcap).flatten(1)
        if len(x) == 1:
            self._finish_row(x, read)
        else:
            self._finish_rows(x, read)
        return hidden_states

    def _finish_row(self, x: Tensor, read: Tensor) -> None:
        """x [1, hidden] and what its heads have read [1, H D] -> x behind the layer, in place."""
        gated = x.new_empty(1, len(self.gate_up) // 2)
        if self.after is None:
            gemv(read, self.out, x, add=True)
            gemv(x, self.gate_up, gated, norm=self.before[1], gated=True, gate=self.gate)
            gemv(gated, self.down, x, add=True)
            return
        added = torch.empty_like(x)
        gemv(read, self.out, added)
        fused.add_normed(added, x, *self.after[0])
        gemv(x, self.gate_up, gated, norm=self.before[1], gated=True, gate=self.gate)
        gemv(gated, self.down, added)
        fused.add_normed(added, x, *self.after[1])

    def _finish_rows(self, x: Tensor, read: Tensor) -> None:
        """The same of several rows."""
        normed = torch.empty_like(x)
        if self.after is None:
            x.addmm_(read, self.out.t())
            fused.add_rms_norm(None, x, *self.before[1], normed)
        else:
            added = functional.linear(read, self.out)
            fused.add_rms_norm(added, x, *self.before[1], normed, after=self.after[0])
        gated = x.new_empty(len(x), len(self.gate_up) // 2)
        fused.gated_mul(functional.linear(normed, self.gate_up), gated, self.gate)
        if self.after is None:
            x.addmm_(gated, self.down.t())
        else:
            fused.add_normed(functional.linear(gated, self.down), x, *self.after[1])


class CUDANorm(nn.Module):
    """Drop-in for a transformers RMS norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = _norm_of(norm)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[1, T, hidden] -> the same, anew."""
        return rms_norm(hidden_states[0], *self.norm)[None]


def install(adapter: Adapter, *, bare: bool) -> bool:
    """Put ours in the place of a decoder's layers that fit, and of its last norm; whether all fit.

    `bare`: they are to be run one after another, without the decoder's own forward: all or none.
    """
    decoder = adapter.decoder
    fitting = {i for i, layer in enumerate(decoder.layers) if CUDALayer.fits(layer)}
    if not bare:
        fitting &= _turned_by_row(adapter) if fitting else set()
    elif any(type(layer).__name__ not in BARE for layer in decoder.layers):
        fitting = set()
    whole = len(fitting) == len(decoder.layers)
    if bare and not whole:
        return False
    norms = {type(decoder.layers[i].input_layernorm) for i in fitting}
    for i in fitting:
        decoder.layers[i] = CUDALayer(decoder.layers[i], adapter.layers[i].softcap)
    if norms and type(decoder.norm) in norms:  # others may call it otherwise
        decoder.norm = CUDANorm(decoder.norm)
    return whole


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


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x [T, hidden]."""
    out = torch.empty_like(x)
    fused.add_rms_norm(None, x, gain, eps, out)
    return out


def _norm_of(norm: Any) -> Norm:
    weight = norm.weight.detach()
    if type(norm).__name__.startswith("Gemma"):  # which keeps how far the gain is from one
        return 1 + weight.float(), float(norm.eps)
    return weight, float(norm.variance_epsilon)


def _gate_of(mlp: Any) -> Gate | None:
    """Which of GATES an MLP's activation is."""
    activation = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    x = torch.linspace(-8, 8, 65)
    equal = (g for g, f in GATES.items() if torch.allclose(activation(x), f(x), atol=1e-6))
    return next(equal, None)


def _parts(module: Any, packed: str, names: tuple[str, ...]) -> list[Any]:
    """A module's projections of these names, or the one that it has packed them into."""
    whole = getattr(module, f"{packed}_proj", None)
    return [getattr(module, f"{name}_proj") for name in names] if whole is None else [whole]


def _pack(*layers: Any) -> tuple[Tensor, Tensor | None]:
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
    return weight, torch.cat(biases) if biases else None
