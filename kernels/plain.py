"""Plain PyTorch of the GPU's elementwise kernels and of its sampling: their specification.

Owns the meaning of mmserve.kernels.fused and mmserve.kernels.sampling, function by function, under
the same names and with the same arguments. Runs on any device and cares for clarity alone. Knows
nothing of models, requests or the filters' parameters beyond their numbers.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mmserve.kernels.reference import rotate


def add_rms_norm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor
) -> None:
    """residual [T, W] += x [T, W] (None: nothing), in place; out [T, W] = its RMS norm * weight."""
    if x is not None:
        residual.copy_(residual.float() + x.float())
    out.copy_(functional.rms_norm(residual.float(), weight.shape, weight.float(), eps))


def rotate_store(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    norm: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Rotated q and stored k, v from packed qkv [T, (H + 2 Hkv) D]; see `fused.rotate_store`."""
    _, heads, dim = q_out.shape
    kv_heads, _, page_size, _ = k_pool.shape
    kept = slots >= 0
    rows = qkv[kept].view(-1, heads + 2 * kv_heads, dim).float()
    q, k, v = rows[:, :heads], rows[:, heads:-kv_heads], rows[:, -kv_heads:]
    if norm is not None:
        q_weight, k_weight, eps = norm
        q = functional.rms_norm(q, (dim,), q_weight.float(), eps)
        k = functional.rms_norm(k, (dim,), k_weight.float(), eps)
    cos, sin = table[positions[kept].long()].unsqueeze(2).unbind(1)  # [K, 1, D / 2]
    q_out[kept] = rotate(q, cos, sin).to(q_out.dtype)
    page, offset = slots[kept].long() // page_size, slots[kept].long() % page_size
    k_pool[:, page, offset] = rotate(k, cos, sin).transpose(0, 1).to(k_pool.dtype)
    v_pool[:, page, offset] = v.transpose(0, 1).to(v_pool.dtype)


def silu_mul(both: Tensor, out: Tensor) -> None:
    """out [T, F] = silu(gate) * up of both [T, 2 F], gate first."""
    gate, up = both.float().chunk(2, 1)
    out.copy_(functional.silu(gate) * up)
