"""The elementwise steps between a layer's matrix products on a GPU, in Triton.

Owns four kernels: residual + RMS norm, rotary + KV write, KV write alone, gating. Their plain
statements are in mmserve.kernels.plain. Knows nothing of models or requests. Everything is
computed in float32 and rounded once, when written. Launches allocate nothing and read nothing back,
so they can be captured; a row's bits do not depend on how many rows there are, because the shapes
of programs follow from the row's width alone.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.chain import chained
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.packed_pages import store_pages
from mmserve.kernels.packed_store import keep, write
from mmserve.kernels.unpacking import form

MAX_WIDTH = 16384  # a row stays in one program's registers
TOKENS = 4  # of one head, by one warp: 16-byte accesses at 128 dimensions, and no loss at one token
CHUNK = 1024  # of a row of gated outputs

Gate = Literal["silu", "gelu"]  # the latter by its tanh
Norm = tuple[Tensor, float]  # gain [W] of any floating dtype, eps


class HeadNorm(NamedTuple):
    """RMS norm of every query and key head before the rotation; gains [D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Turns(NamedTuple):
    """By what tokens are rotated, in the half-split layout: token t by row places[t] of cos and
    sin, or by row t where `places` is None.

    cos, sin [N, at least D / 2] of any floating dtype, rows contiguous and equally far apart;
    places [T] int32 or int64.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor | None = None

    @classmethod
    def by_table(cls, table: Tensor, positions: Tensor) -> Turns:
        """`table` [positions, 2, D / 2] as `rope_table` makes it."""
        return cls(table[:, 0], table[:, 1], positions)


@triton.jit
def _rms(x, eps, WIDTH: tl.constexpr):
    """What a row x, float32 and zero beyond WIDTH, is divided by, as a factor."""
    return tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)


@triton.jit
def _add_rms_norm(
    x, residual, after, weight, out, x_row, residual_row, out_row, after_eps, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, AFTER: tl.constexpr,
    NORMS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row. The strides are of rows. ADDS x, by AFTER normalised, and NORMS what it then is."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    ok = at < WIDTH
    # Gains depend on nobody: they arrive while the launch before ends.
    if AFTER:
        after_gain = tl.load(after + at, mask=ok, other=0.0).to(tl.float32)
    if NORMS:
        gain = tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(residual + row * residual_row + at, mask=ok, other=0.0)
    if ADDS:
        added = tl.load(x + row * x_row + at, mask=ok, other=0.0).to(tl.float32)
        if AFTER:
            added = added * _rms(added, after_eps, WIDTH) * after_gain
        # Rounded before the norm, which so sees what the next layer reads.
        total = (total.to(tl.float32) + added).to(residual.dtype.element_ty)
        tl.store(residual + row * residual_row + at, total, mask=ok)
    if NORMS:
        wide = total.to(tl.float32)
        scaled = wide * _rms(wide, eps, WIDTH) * gain
        tl.store(out + row * out_row + at, scaled.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _gain(weight, at, ok):
    """float32 [1, len(at)]"""
    return tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _norm_heads(a, b, c, weight, eps, half, tail, ROTARY: tl.constexpr, D: tl.constexpr):
    """RMS norm of heads: the halves a and b of what is turned, and the rest c, float32."""
    inside = half < ROTARY // 2
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if ROTARY < D:
        squares += tl.sum(c * c, 1)
    factor = tl.rsqrt(squares / D + eps)[:, None]
    a *= factor * _gain(weight, half, inside)
    b *= factor * _gain(weight + ROTARY // 2, half, inside)
    if ROTARY < D:
        c *= factor * _gain(weight, tail, tail < D)
    return a, b, c


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_store(
    qkv, cos_rows, sin_rows, places, slots, q_out, k_text, v_text, k_vision, v_vision,
    q_weight, k_weight, eps, num_tokens, qkv_row, turn_row, q_row, text_head, vision_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, TILE: tl.constexpr, PLACED: tl.constexpr,
    NORM: tl.constexpr, BACK: tl.constexpr, TEXT_FORM: tl.constexpr, VISION_FORM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """TILE tokens of one head, whose first ROTARY dimensions are turned. HALF and REST: ROTARY / 2
    and D - ROTARY padded to powers of two."""
    head = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    dim = tl.arange(0, HALF)
    tail = ROTARY + tl.arange(0, REST)
    here = (token < num_tokens)[:, None]
    ok = here & (dim < ROTARY // 2)[None, :]
    tail_ok = here & (tail < D)[None, :]
    row = token.to(tl.int64)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = qkv + (row * qkv_row + head * D)[:, None]
    first = tl.load(source + dim[None, :], mask=ok, other=0.0)
    second = tl.load(source + ROTARY // 2 + dim[None, :], mask=ok, other=0.0)
    rest = first
    if ROTARY < D:
        rest = tl.load(source + tail[None, :], mask=tail_ok, other=0.0)
    if head < HEADS + KV_HEADS:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        c = rest.to(tl.float32)
        if NORM:
            weight = q_weight if head < HEADS else k_weight
            a, b, c = _norm_heads(a, b, c, weight, eps, dim, tail, ROTARY, D)
        place = row
        if PLACED:
            place = tl.load(places + token, mask=token < num_tokens, other=0).to(tl.int64)
        turn = place[:, None] * turn_row + dim[None, :]
        cos = tl.load(cos_rows + turn, mask=ok, other=1.0).to(tl.float32)
        sin = tl.load(sin_rows + turn, mask=ok, other=0.0).to(tl.float32)
        x = a * cos - b * sin
        y = b * cos + a * sin
        if head < HEADS:
            target = q_out + row * q_row + head * D
            write(target, x, y, c, dim, ok, tail, tail_ok, ROTARY, D)
        else:
            if BACK:  # for who stores pages as a whole
                back = qkv + row * qkv_row + head * D
                write(back, x, y, c, dim, ok, tail, tail_ok, ROTARY, D)
            keep(
                slot, k_text, k_vision, head - HEADS, text_head, vision_head, x, y, c, dim, ok,
                tail, tail_ok, TEXT_FORM, VISION_FORM, ROTARY, D,
            )  # fmt: skip
    else:
        index = head - HEADS - KV_HEADS
        keep(
            slot, v_text, v_vision, index, text_head, vision_head, first, second, rest, dim, ok,
            tail, tail_ok, TEXT_FORM, VISION_FORM, ROTARY, D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _store(
    k, v, slots, k_text, v_text, k_vision, v_vision, num_tokens, k_row, k_own_head, v_row,
    v_own_head, text_head, vision_head,
    D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, TEXT_FORM: tl.constexpr,
    VISION_FORM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """TILE tokens of one head. HALF is D / 2 padded to a power of two."""
    head = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    dim = tl.arange(0, HALF)
    ok = (slot != -1)[:, None] & (dim < D // 2)[None, :]
    row = token.to(tl.int64)
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    keys = k + (row * k_row + head * k_own_head)[:, None] + dim[None, :]
    values = v + (row * v_row + head * v_own_head)[:, None] + dim[None, :]
    first = tl.load(keys, mask=ok, other=0.0)
    second = tl.load(keys + D // 2, mask=ok, other=0.0)
    keep(
        slot, k_text, k_vision, head, text_head, vision_head, first, second, first, dim, ok, dim,
        ok, TEXT_FORM, VISION_FORM, D, D,
    )  # fmt: skip
    first = tl.load(values, mask=ok, other=0.0)
    second = tl.load(values + D // 2, mask=ok, other=0.0)
    keep(
        slot, v_text, v_vision, head, text_head, vision_head, first, second, first, dim, ok, dim,
        ok, TEXT_FORM, VISION_FORM, D, D,
    )  # fmt: skip


@triton.jit
def opening(x, GELU: tl.constexpr):
    """silu of float32 x, or gelu by its tanh: either is x times a sigmoid."""
    steep = x
    if GELU:
        steep = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-steep))


@triton.jit
def _gated_mul(
    both, out, both_row, out_row, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    GELU: tl.constexpr, CHAINED: tl.constexpr,
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
    gated = opening(gate, GELU) * up
    tl.store(out + row * out_row + at, gated.to(out.dtype.element_ty), mask=ok)


def add_rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    after: Norm | None = None,
) -> None:
    """residual += x, in place; out = residual / sqrt(mean(residual^2) + eps) * weight.

    x (None: nothing is added), residual and out [T, W], W at most 16384, weight [W]; each of any
    floating dtype, rows contiguous. The sum is rounded to residual's dtype before the norm.
    `after`: by what x is normalised before it is added.
    """
    _norm(x, residual, after, (weight, eps), out)


def add_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x / sqrt(mean(x^2) + eps) * weight, in place; the rest as above."""
    _norm(x, residual, (weight, eps), None, residual)


def _norm(
    x: Tensor | None, residual: Tensor, after: Norm | None, norm: Norm | None, out: Tensor
) -> None:
    num_tokens, width = residual.shape
    assert width <= MAX_WIDTH, "a row has to fit into one program"
    added = residual if x is None else x
    assert residual.stride(1) == added.stride(1) == out.stride(1) == 1
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(width)
    (after_gain, after_eps), (gain, eps) = (part or (residual, 0.0) for part in (after, norm))
    _add_rms_norm[(num_tokens,)](
        added, residual, after_gain, gain, out, added.stride(0), residual.stride(0), out.stride(0),
        after_eps, eps, WIDTH=width, PADDED=padded, ADDS=x is not None, AFTER=after is not None,
        NORMS=norm is not None, num_warps=min(max(padded // 512, 1), 16),
        **chained(residual.device),
    )  # fmt: skip


def rotate_store(
    qkv: Tensor,
    turns: Turns,
    slots: Tensor,
    q_out: Tensor,
    text: Pages,
    vision: Pages,
    norm: HeadNorm | None = None,
    rotary: int | None = None,
) -> None:
    """From packed q, k, v to rotated q and stored k, v.

    qkv [T, (H + 2 Hkv) D], rows contiguous; slots [T] int32 or int64 as an `AttentionPlan` names
    them: page * page_size + offset in text, a `vision_slot` or NOWHERE; q_out [T, H, D], heads
    contiguous; a head's pages are contiguous in text and vision. Where vision's are stored as a
    whole, k is rotated in qkv, too.
    With `norm` every head of q and k is normalised before it is turned. `rotary`: how many of a
    head's dimensions are turned, its first ones; None: all.
    """
    num_tokens, heads, dim = q_out.shape
    kv_heads = text.k.shape[0]
    assert qkv.shape == (num_tokens, (heads + 2 * kv_heads) * dim)
    assert qkv.stride(1) == 1 and q_out.stride()[1:] == (dim, 1)
    turned = dim if rotary is None else rotary
    assert turned % 2 == 0 and 0 < turned <= dim
    cos, sin, places = turns
    assert cos.stride() == sin.stride() == (cos.stride(0), 1) and cos.shape[1] >= turned // 2
    strides = _head_strides(text, vision)
    if num_tokens == 0:
        return
    q_weight, k_weight, eps = norm or (cos, cos, 0.0)
    # Heads first: programs that run together share the rows of cos and sin.
    _rotate_store[(heads + 2 * kv_heads, triton.cdiv(num_tokens, TOKENS))](
        qkv, cos, sin, slots if places is None else places, slots, q_out, *text[:2], *vision[:2],
        q_weight, k_weight, eps, num_tokens, qkv.stride(0), cos.stride(0), q_out.stride(0),
        *strides,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, ROTARY=turned,
        HALF=triton.next_power_of_2(turned // 2), REST=triton.next_power_of_2(max(dim - turned, 1)),
        TILE=TOKENS, PLACED=places is not None, NORM=norm is not None, num_warps=1,
        TEXT_FORM=form(text, dim), VISION_FORM=form(vision, dim), BACK=vision.kind.whole_pages,
        **chained(qkv.device),
    )  # fmt: skip
    if vision.kind.whole_pages:
        k, v = qkv[:, heads * dim :].view(num_tokens, 2, kv_heads, dim).unbind(1)
        store_pages(k, v, slots, vision)


def store(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    text: Pages,
    vision: Pages,
) -> None:
    """Store k and v [T, Hkv, D], whose last dimension is contiguous; the rest as above."""
    num_tokens, heads, dim = k.shape
    assert k.shape == v.shape and k.stride(2) == v.stride(2) == 1
    strides = _head_strides(text, vision)
    if num_tokens == 0:
        return
    _store[(heads, triton.cdiv(num_tokens, TOKENS))](
        k, v, slots, *text[:2], *vision[:2], num_tokens, *k.stride()[:2], *v.stride()[:2], *strides,
        D=dim, HALF=triton.next_power_of_2(dim // 2), TILE=TOKENS, num_warps=1,
        TEXT_FORM=form(text, dim), VISION_FORM=form(vision, dim), **chained(k.device),
    )  # fmt: skip
    if vision.kind.whole_pages:
        store_pages(k, v, slots, vision)


def _head_strides(text: Pages, vision: Pages) -> tuple[int, int]:
    """From head to head in either pool, each (K, V)."""
    assert not text.kind.whole_pages, "text comes token by token"
    for k, v, *_ in (text, vision):
        assert k[0].is_contiguous() and v.stride() == k.stride()
    return text.k.stride(0), vision.k.stride(0)


def gated_mul(both: Tensor, out: Tensor, gate: Gate = "silu") -> None:
    """out = gate(x) * up of both [T, 2 F], x first; out [T, F]; rows contiguous."""
    num_tokens, width = out.shape
    assert both.shape == (num_tokens, 2 * width) and both.stride(1) == 1 and out.stride(1) == 1
    if num_tokens == 0:
        return
    chunks = triton.cdiv(width, CHUNK)
    _gated_mul[(num_tokens * chunks,)](
        both, out, both.stride(0), out.stride(0), WIDTH=width, CHUNKS=chunks, CHUNK=CHUNK,
        GELU=gate == "gelu", num_warps=4, **chained(both.device),
    )  # fmt: skip
