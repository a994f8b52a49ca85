"""The elementwise steps between a layer's matrix products on a GPU, in Triton.

Owns three kernels: residual + RMS norm, rotary + KV write, gated SiLU. Their plain statements are
in mmserve.kernels.plain. Knows nothing of models or of the meaning of a slot. Everything is
computed in float32 and rounded once, when written. Launches allocate nothing and read nothing back,
so they can be captured; a row's bits do not depend on how many rows there are, because the shapes
of programs follow from the row's width alone.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained

MAX_WIDTH = 16384  # a row stays in one program's registers
TOKENS = 4  # of one head, by one warp: 16-byte accesses at 128 dimensions, and no loss at one token
CHUNK = 1024  # of a row of gated outputs


class HeadNorm(NamedTuple):
    """RMS norm of every query and key head before the rotation; weights [D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, x_row, residual_row, out_row, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row. The strides are of rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    ok = at < WIDTH
    gain = tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(residual + row * residual_row + at, mask=ok, other=0.0)
    if ADDS:
        added = tl.load(x + row * x_row + at, mask=ok, other=0.0).to(tl.float32)
        # Rounded before the norm, which so sees what the next layer reads.
        total = (total.to(tl.float32) + added).to(residual.dtype.element_ty)
        tl.store(residual + row * residual_row + at, total, mask=ok)
    wide = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = wide * factor * gain
    tl.store(out + row * out_row + at, scaled.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_store(
    qkv, table, positions, slots, q_out, k_pool, v_pool, q_weight, k_weight, eps, num_tokens,
    qkv_row, q_row, k_head, k_page, k_token, v_head, v_page, v_token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """TILE tokens of one head. HALF is D / 2 padded to a power of two."""
    head = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    dim = tl.arange(0, HALF)
    ok = kept[:, None] & (dim < D // 2)[None, :]
    row = token.to(tl.int64)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = qkv + (row * qkv_row + head * D)[:, None] + dim[None, :]
    first = tl.load(source, mask=ok, other=0.0)
    second = tl.load(source + D // 2, mask=ok, other=0.0)
    if head < HEADS + KV_HEADS:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if NORM:
            weight = q_weight if head < HEADS else k_weight
            factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
            inside = dim < D // 2
            a *= factor * tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
            b *= (
                factor
                * tl.load(weight + D // 2 + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
            )
        position = tl.load(positions + token, mask=kept, other=0).to(tl.int64)
        angle = table + position[:, None] * D + dim[None, :]
        cos = tl.load(angle, mask=ok, other=1.0)
        sin = tl.load(angle + D // 2, mask=ok, other=0.0)
        x = a * cos - b * sin
        y = b * cos + a * sin
        if head < HEADS:
            target = q_out + (row * q_row + head * D)[:, None] + dim[None, :]
            tl.store(target, x.to(q_out.dtype.element_ty), mask=ok)
            tl.store(target + D // 2, y.to(q_out.dtype.element_ty), mask=ok)
        else:
            place = (head - HEADS) * k_head + (slot // PAGE) * k_page + (slot % PAGE) * k_token
            target = k_pool + place[:, None] + dim[None, :]
            tl.store(target, x.to(k_pool.dtype.element_ty), mask=ok)
            tl.store(target + D // 2, y.to(k_pool.dtype.element_ty), mask=ok)
    else:
        index = head - HEADS - KV_HEADS
        place = index * v_head + (slot // PAGE) * v_page + (slot % PAGE) * v_token
        target = v_pool + place[:, None] + dim[None, :]
        tl.store(target, first.to(v_pool.dtype.element_ty), mask=ok)
        tl.store(target + D // 2, second.to(v_pool.dtype.element_ty), mask=ok)


@triton.jit
def _silu_mul(
    both, out, both_row, out_row,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """CHUNK of the WIDTH outputs of one row."""
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    at = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    ok = at < WIDTH
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(both + row * both_row + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_row + WIDTH + at, mask=ok, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_row + at, gated.to(out.dtype.element_ty), mask=ok)


def add_rms_norm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor
) -> None:
    """residual += x, in place; out = residual / sqrt(mean(residual^2) + eps) * weight.

    x (None: nothing is added), residual and out [T, W], W at most 16384, weight [W]; each of any
    floating dtype, rows contiguous. The sum is rounded to residual's dtype before the norm.
    """
    num_tokens, width = residual.shape
    assert width <= MAX_WIDTH, "a row has to fit into one program"
    assert residual.stride(1) == 1 and out.stride(1) == 1 and (x is None or x.stride(1) == 1)
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(width)
    source = residual if x is None else x
    _add_rms_norm[(num_tokens,)](
        source, residual, weight, out, source.stride(0), residual.stride(0), out.stride(0), eps,
        WIDTH=width, PADDED=padded, ADDS=x is not None,
        num_warps=min(max(padded // 512, 1), 16), **chained(residual.device),
    )  # fmt: skip


def rotate_store(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    norm: HeadNorm | None = None,
) -> None:
    """From packed q, k, v to rotated q and stored k, v; rows with a negative slot write nothing.

    qkv [T, (H + 2 Hkv) D], rows contiguous; table float32 [positions, 2, D / 2] as `rope_table`
    makes it, of which row positions[t] turns token t in the half-split layout; positions and
    slots [T] int32 or int64, slot = page * page_size + offset; q_out [T, H, D], heads contiguous;
    pools [Hkv, pages, page_size, D] of any strides but the last. With `norm` every head of q and
    k is normalised before it is turned.
    """
    num_tokens, heads, dim = q_out.shape
    kv_heads, _, page_size, _ = k_pool.shape
    assert qkv.shape == (num_tokens, (heads + 2 * kv_heads) * dim) and dim % 2 == 0
    assert qkv.stride(1) == 1 and q_out.stride()[1:] == (dim, 1) and table.is_contiguous()
    assert k_pool.stride(3) == 1 and v_pool.stride(3) == 1 and v_pool.shape == k_pool.shape
    if num_tokens == 0:
        return
    q_weight, k_weight, eps = norm or (table, table, 0.0)
    # Heads first: programs that run together share the rows of `table`.
    _rotate_store[(heads + 2 * kv_heads, triton.cdiv(num_tokens, TOKENS))](
        qkv, table, positions, slots, q_out, k_pool, v_pool, q_weight, k_weight, eps, num_tokens,
        qkv.stride(0), q_out.stride(0), *k_pool.stride()[:3], *v_pool.stride()[:3],
        HEADS=heads, KV_HEADS=kv_heads, D=dim, HALF=triton.next_power_of_2(dim // 2),
        PAGE=page_size, TILE=TOKENS, NORM=norm is not None, num_warps=1,
        **chained(qkv.device),
    )  # fmt: skip


def silu_mul(both: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up of both [T, 2 F] (gate first), out [T, F]; rows contiguous."""
    num_tokens, width = out.shape
    assert both.shape == (num_tokens, 2 * width) and both.stride(1) == 1 and out.stride(1) == 1
    if num_tokens == 0:
        return
    chunks = triton.cdiv(width, CHUNK)
    _silu_mul[(num_tokens * chunks,)](
        both, out, both.stride(0), out.stride(0),
        WIDTH=width, CHUNKS=chunks, CHUNK=CHUNK, num_warps=4, **chained(both.device),
    )  # fmt: skip
