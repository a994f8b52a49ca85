"""Plain PyTorch of the GPU's elementwise kernels and of its sampling: their specification.

Owns the meaning of mmserve.kernels.fused and mmserve.kernels.sampling, function by function, under
the same names and with the same arguments. Runs on any device and cares for clarity alone. Knows
nothing of models, requests or the filters' parameters beyond their numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.reference import AttentionPlan, rotate, write_step


def add_rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    after: tuple[Tensor, float] | None = None,
) -> None:
    """residual [T, W] += x [T, W] (None: nothing), in place; out [T, W] = its RMS norm * weight.

    `after` (weight, eps): x is normalised before it is added.
    """
    if after is not None and x is not None:
        add_normed(x, residual, *after)
    elif x is not None:
        residual.copy_(residual.float() + x.float())
    out.copy_(functional.rms_norm(residual.float(), weight.shape, weight.float(), eps))


def add_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual [T, W] += the RMS norm * weight of x [T, W], in place."""
    normed = functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    residual.copy_(residual.float() + normed)


def rotate_store(
    qkv: Tensor,
    turns: tuple[Tensor, Tensor, Tensor | None],
    slots: Tensor,
    q_out: Tensor,
    text: Pages,
    vision: Pages,
    norm: tuple[Tensor, Tensor, float] | None = None,
    rotary: int | None = None,
) -> None:
    """Rotated q and stored k, v from packed qkv [T, (H + 2 Hkv) D]; see `fused.rotate_store`."""
    _, heads, dim = q_out.shape
    kv_heads = text.k.shape[0]
    rows = qkv.view(-1, heads + 2 * kv_heads, dim).float()
    q, k, v = rows[:, :heads], rows[:, heads:-kv_heads], rows[:, -kv_heads:]
    if norm is not None:
        q_weight, k_weight, eps = norm
        q = functional.rms_norm(q, (dim,), q_weight.float(), eps)
        k = functional.rms_norm(k, (dim,), k_weight.float(), eps)
    turn = slice(len(qkv)) if turns[2] is None else turns[2].long()
    turned = dim if rotary is None else rotary
    cos, sin = (part[turn, None, : turned // 2].float() for part in turns[:2])  # [T, 1, half]
    q, k = (torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), -1) for x in (q, k))
    q_out.copy_(q)
    store(k, v, slots, text, vision)


def store(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    text: Pages,
    vision: Pages,
) -> None:
    """k and v [T, Hkv, D] at the slots of either pool; see `fused.store`."""
    none = torch.zeros(0, device=k.device)
    write_step(AttentionPlan(slots.long(), none, none, ()), text, vision, k, v)


def gated_mul(both: Tensor, out: Tensor, gate: str = "silu") -> None:
    """out [T, F] = gate(x) * up of both [T, 2 F], x first; `gate`: silu, or gelu by its tanh."""
    x, up = both.float().chunk(2, 1)
    opened = functional.gelu(x, approximate="tanh") if gate == "gelu" else functional.silu(x)
    out.copy_(opened * up)


def kept_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The tokens [B, V] bool that top-k, top-p of what it left, then min-p leave; a min_p of 1
    leaves the best, and none that is only equal to it by rounding.

    logits [B, V] float32 after temperature; parameters [B] as `sample` takes them. Equals at a
    threshold all stay; the token that reaches top_p stays, and a top_p of 1 cuts nothing.
    """
    vocab = logits.shape[1]
    best = logits.amax(1, keepdim=True)
    masses = (logits - best).double().exp()
    ranked, order = logits.sort(1, descending=True)
    rank = torch.arange(vocab, device=logits.device)
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long().unsqueeze(1)
    reached = masses.gather(1, order).masked_fill(rank >= k, 0).cumsum(1)
    goal = torch.where(top_p < 1, top_p.double(), torch.inf).unsqueeze(1) * reached[:, -1:]
    count = torch.minimum((reached < goal).sum(1, keepdim=True) + 1, k)
    least = min_p.double().unsqueeze(1)
    heavy = (masses >= least) & ((least < 1) | (logits == best))
    return (logits >= ranked.gather(1, count - 1)) & heavy


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [B, V] of any dtype over temperature [B] -> finite float32 (no number: the lowest)."""
    scaled = logits.float() / temperature.unsqueeze(1)
    return scaled.nan_to_num(-3e38).clamp(-3e38, 3e38)


def argmax(logits: Tensor, out: Tensor) -> None:
    """The best token of each row of logits [B, V] into out [B] int64; the lowest id of equals."""
    scaled = scale(logits, torch.ones(len(logits), device=logits.device))
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(scaled)
    best = scaled == scaled.amax(1, keepdim=True)
    out.copy_(ids.masked_fill(~best, logits.shape[1]).amin(1))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    out: Tensor,
) -> None:
    """One token per row into out [B] int64; see `sampling.sample`. Sums are float64.

    A draw is the first token, by id, at which the kept tokens' sum exceeds uniform times their
    total.
    """
    argmax(logits, out)
    rows = (temperature >= 1e-5).nonzero().squeeze(1)
    scaled = scale(logits[rows], temperature[rows])
    kept = kept_tokens(scaled, top_k[rows], top_p[rows], min_p[rows])
    masses = (scaled - scaled.amax(1, keepdim=True)).double().exp().masked_fill(~kept, 0)
    reached = masses.cumsum(1)
    goal = reached[:, -1:] * uniform[rows].double().unsqueeze(1)
    out[rows] = (reached <= goal).sum(1).clamp(max=logits.shape[1] - 1)
