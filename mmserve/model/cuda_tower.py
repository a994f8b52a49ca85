"""Vision towers of public models on a GPU: in few passes what transformers computes in many.

Owns what is replaced in a tower, and by what; what comes out is the same up to rounding. Knows
nothing of images, streams or language models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.kernels import spans
from mmserve.model import span_attention

# Patches come as rows, attention is over spans, heads are rotated whole.
SPAN_TOWERS = ("Qwen2_5_VisionTransformerPretrainedModel", "Qwen3VLVisionModel")
WIDTH_MULTIPLE = 64  # of what a product adds up or gives: Qwen2.5-VL's 3,420 are no whole lines


def fuse_towers(model: nn.Module) -> None:
    """In place, all towers of a model."""
    for module in model.modules():
        if isinstance(getattr(module, "patch_embedding", None), nn.Conv2d):
            module.register_forward_hook(_compact)
    towers: list[Any] = [m for m in model.modules() if type(m).__name__ in SPAN_TOWERS]
    for tower in towers:
        tower.patch_embed = PatchProduct(tower.patch_embed.proj)
        for block in tower.blocks:
            block.attn = SpanAttention(block.attn)
            for name in ("norm1", "norm2"):
                setattr(block, name, _fused_norm(getattr(block, name)))
            if hasattr(block.mlp, "gate_proj"):
                _widen(block.mlp)


def _compact(_: nn.Module, __: Any, out: Any) -> Any:
    """Patches [N, T, C] of a convolution lie channel by channel, and so would every sum with them
    in all layers: each would be read against the grain, and copied for each norm. A whole tower
    that holds its convolution itself (Llama 3.2 Vision) gives no tensor."""
    return out.contiguous() if isinstance(out, Tensor) else out


def _fused_norm(norm: Any) -> nn.Module:
    """PyTorch's own RMS norm for transformers' chain of six operations; others as they are."""
    if not hasattr(norm, "variance_epsilon"):
        return norm  # type: ignore[no-any-return]
    fused = nn.RMSNorm(len(norm.weight), norm.variance_epsilon, device="meta")
    fused.weight = norm.weight
    return fused


def _widen(mlp: Any) -> None:
    """Inner features up to a multiple of WIDTH_MULTIPLE, which are 0 and add nothing: rows that are
    not whole lines of memory make products several times slower."""
    extra = -len(mlp.gate_proj.weight) % WIDTH_MULTIPLE
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = _padded(linear.weight, (0, 0, 0, extra))
        if linear.bias is not None:
            linear.bias = _padded(linear.bias, (0, extra))
    mlp.down_proj.weight = _padded(mlp.down_proj.weight, (0, extra))


def _padded(parameter: Tensor, sides: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(functional.pad(parameter.detach(), sides), requires_grad=False)


class PatchProduct(nn.Module):
    """Patches' pixels [T, C] -> embeddings [T, hidden]: what a convolution does whose steps are as
    long as its kernel."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        assert convolution.kernel_size == convolution.stride
        self.weight, self.bias = convolution.weight.detach().flatten(1), convolution.bias

    def forward(self, patches: Tensor) -> Tensor:
        rows = patches.to(self.weight.dtype).view(-1, self.weight.shape[1])
        return functional.linear(rows, self.weight, self.bias)


class SpanAttention(nn.Module):
    """Drop-in for the attention of a tower in SPAN_TOWERS: each row reads its own span."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.num_heads, self.scaling = attention.num_heads, attention.scaling

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """hidden_states [T, hidden]; borders cu_seqlens [S + 1] int32; cos and sin [T, D]."""
        packed = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
        spans.turn(packed[:, :2], *position_embeddings)
        q, k, v = packed.unbind(1)
        out: Tensor = self.proj(self._read(q, k, v, cu_seqlens).flatten(1))
        return out

    def _read(self, q: Tensor, k: Tensor, v: Tensor, borders: Tensor) -> Tensor:
        """q, k, v [T, H, D] -> the same."""
        if len(borders) == 2:  # the whole image
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            read = functional.scaled_dot_product_attention(q, k, v, scale=self.scaling)
            return read[0].transpose(0, 1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        longest = span_attention.longest(borders)
        spans.attend(q, k, v, borders, longest, self.scaling, out)
        return out
