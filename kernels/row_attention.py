"""All that lies between the first product and attention's output of a single row, in one kernel.

Owns the decode step of a single stream, whose attention reads little and is a matter of how many
launches follow each other: heads are normalised and turned where they are asked for, the row's own
key and value are stored by whoever reads them, and the last to end joins the partial results. What
is computed is `fused.rotate_store` and `attention.paged_attention`. Knows nothing of sequences or
scheduling.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.attention import LOG2_E, Scratch
from mmserve.kernels.attention_kernels import OWN, joined, run_keys, store_item, turn_back
from mmserve.kernels.chain import chained
from mmserve.kernels.fused import HeadNorm, Turns
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.launch import PARTS_AT_ONCE, Launch
from mmserve.kernels.work import HEADER, SMALL, SMALL_ROWS


@triton.jit
def _factor(x, at, ok, eps, D: tl.constexpr, WIDE: tl.constexpr):
    """What heads at x + at [M] are multiplied by for a root mean square of one; float32 [M]."""
    wide = tl.arange(0, WIDE)
    mask = ok[:, None] & (wide < D)[None, :]
    values = tl.load(x + at[:, None] + wide[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, 1) / D + eps)


@triton.jit
def _turned(
    x, at, ok, dims, weight, factor, cos, sin,
    D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The dimensions dims [N] of heads at x + at [M]: times factor [M] and gains where NORM, and
    turned where they are among the first ROTARY; rounded once; float32 [M, N]."""
    opens = dims < ROTARY // 2
    inside = dims < ROTARY
    angle = tl.where(opens, dims, dims - ROTARY // 2)
    other = tl.where(opens, dims + ROTARY // 2, angle)
    mask = ok[:, None] & (dims < D)[None, :]
    partly = mask & inside[None, :]
    a = tl.load(x + at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at[:, None] + other[None, :], mask=partly, other=0.0).to(tl.float32)
    if NORM:
        gain = tl.load(weight + dims, mask=dims < D, other=0.0).to(tl.float32)
        a *= factor[:, None] * gain[None, :]
        gain = tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
        b *= factor[:, None] * gain[None, :]
    c = tl.load(cos + angle, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.where(opens, -s, s)
    turned = a * c[None, :] + b * s[None, :]
    return turned.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep(
    x, head, keys, values, to, weight, eps, cos, sin,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The row's own key and value to place `to` of a head's pages, where all of the program sees
    them."""
    one = tl.zeros([1], tl.int64)
    here = one == 0
    at = (H + head) * D + one
    factor = one.to(tl.float32)
    if NORM:
        factor = _factor(x, at, here, eps, D, WIDE)
    half = tl.arange(0, HALF)
    for part in tl.static_range(2):
        dims = half + part * (D // 2)
        turned = _turned(x, at, here, dims, weight, factor, cos, sin, D, ROTARY, NORM)
        place = keys + to * D + one[:, None] + dims[None, :]
        tl.store(place, turned.to(keys.dtype.element_ty), mask=(half < D // 2)[None, :])
    wide = tl.arange(0, WIDE)
    value = tl.load(x + (H + KV_HEADS + head) * D + wide, mask=wide < D, other=0.0)
    tl.store(values + to * D + wide, value.to(values.dtype.element_ty), mask=wide < D)
    tl.debug_barrier()


@triton.jit
def _join_last(
    merges, head, arrived, out, parts, lses, sinks,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join a KV head's partial results, if this program's was the last of them."""
    GROUP: tl.constexpr = H // KV_HEADS
    first = tl.load(merges)
    count = tl.load(merges + 1)
    if count > 1:
        tl.debug_barrier()  # all of the program's is written
        before = tl.atomic_add(arrived + head, 1, sem="acq_rel", scope="gpu")
        if before == count - 1:
            tl.debug_barrier()
            wide = tl.arange(0, WIDE)
            for g in tl.static_range(GROUP):
                query_head = head * GROUP + g
                result = joined(
                    first, count, query_head, parts, lses, sinks, H, D, WIDE, BLOCK_P, HAS_SINKS
                )
                at = query_head * D + wide
                tl.store(out + at, result.to(out.dtype.element_ty), mask=wide < D)
            tl.store(arrived + head, 0)


@triton.jit
def _item(work, item, merges, PAGE: tl.constexpr):
    """Its page ids, first key, end, base, the slot of its result, -1 where that is the row's, and
    where in its pool its last key is."""
    table = work + tl.load(item + 2)
    first = tl.load(item + 3)
    last = tl.load(item + 4)
    slot = tl.load(merges) + tl.load(item + 1)
    slot = tl.where(tl.load(merges + 1) > 1, slot, -1).to(tl.int64)
    page = tl.load(table + (last - 1) // PAGE, mask=last > first, other=0).to(tl.int64)
    end = tl.where(last > first, page * PAGE + (last - 1) % PAGE, -1)
    return table, first, last, tl.load(item + 5), slot, end


@triton.jit
def _queries(
    x, at, ok, weight, eps, cos, sin, scale, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves [M, HALF] of heads at x + at [M], scaled for exp2."""
    half = tl.arange(0, HALF)
    factor = tl.where(ok, 1.0, 0.0)
    if NORM:
        factor = _factor(x, at, ok, eps, D, WIDE)
    a = _turned(x, at, ok, half, weight, factor, cos, sin, D, ROTARY, NORM)
    b = _turned(x, at, ok, half + D // 2, weight, factor, cos, sin, D, ROTARY, NORM)
    # Beyond D / 2 the first half would go on into the second.
    a = tl.where((half < D // 2)[None, :], a, 0.0)
    return a * (scale * 1.4426950408889634), b * (scale * 1.4426950408889634)


@triton.jit
def _attend_row(
    work, header, x, cos, sin, places, slots, q_weight, k_weight, eps, out, parts, lses, arrived,
    k_own, v_own, k_vision, v_vision, turn_row, own_head, vision_head, rope, scale, sinks,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, SMALL: tl.constexpr, PLACED: tl.constexpr,
    NORM: tl.constexpr, CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """All small items of the set with this header, which has one row; as `attend_one`."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    tasks = tl.load(header) * KV_HEADS
    items = work + tl.load(header + 1)
    merges = work + tl.load(header + 6)
    slot = tl.load(slots).to(tl.int64)
    turn = tl.load(places).to(tl.int64) * turn_row if PLACED else slot * 0
    g = tl.arange(0, BLOCK_M)
    ok = g < H // KV_HEADS
    none = tl.zeros([BLOCK_M], tl.int32)
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        item = items + task // KV_HEADS * SMALL
        head = tl.cast(task % KV_HEADS, tl.int64)
        table, first, last, base, target, end = _item(work, item, merges, PAGE)
        keys, values, own = k_own + head * own_head, v_own + head * own_head, slot
        if base != OWN:
            keys, values = k_vision + head * vision_head, v_vision + head * vision_head
            own = -2 - slot
        if CHAINED:
            tl.extra.cuda.gdc_wait()  # tables depend on nobody
        if (own >= 0) & (end == own):  # the row's own key is the last that it reads
            _keep(
                x, head, keys, values, own, k_weight, eps, cos + turn, sin + turn,
                H, KV_HEADS, D, HALF, WIDE, ROTARY, NORM,
            )  # fmt: skip
        query_head = head * (H // KV_HEADS) + g
        a, b = _queries(
            x, query_head * D, ok, q_weight, eps, cos + turn, sin + turn, scale,
            D, HALF, WIDE, ROTARY, NORM,
        )  # fmt: skip
        if base >= 0:
            a, b = turn_back(a, b, rope, base + none, ok, D, HALF)
        top, total, acc = run_keys(
            none - 1e30, none * 0.0, tl.zeros([BLOCK_M, WIDE], tl.float32),
            a.to(x.dtype.element_ty), b.to(x.dtype.element_ty), keys, values, table,
            first, last, first, last, none, none + 2147483647, none,
            D, HALF, WIDE, PAGE, BLOCK_N, False, CAP, PRECISION,
        )  # fmt: skip
        targets = target + none
        store_item(
            acc, top, total, ok, query_head * D, targets * H + query_head, targets, query_head,
            out, parts, lses, sinks, D, WIDE, HAS_SINKS,
        )  # fmt: skip
        _join_last(
            merges, head, arrived, out, parts, lses, sinks,
            H, KV_HEADS, D, WIDE, BLOCK_P, HAS_SINKS,
        )  # fmt: skip
    if CHAINED:
        tl.extra.cuda.gdc_wait()  # who had no task ends no sooner than what the next one reads


def _tuning(dim: int, itemsize: int) -> dict[str, int]:
    """A short item is one block where that fits."""
    if dim <= 128 and itemsize == 2:
        return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}


def attend_row(
    qkv: Tensor,
    turns: Turns,
    slots: Tensor,
    work: Tensor,
    text: Pages,
    vision: Pages,
    rope: Tensor,
    scale: float,
    scratch: Scratch,
    out: Tensor,
    launch: Launch,
    *,
    norm: HeadNorm | None = None,
    rotary: int | None = None,
    group: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """From packed q, k, v of one row to stored k and v, and to what its heads read.

    qkv [1, (H + 2 Hkv) D] as `fused.rotate_store` takes it, with turns, slots [1], norm and rotary;
    the rest as `attention.paged_attention` takes it; out [1, H, D]. `launch` has no large items,
    and the last key that the row reads of the pool that it is stored in is its own.
    """
    _, heads, dim = out.shape
    kv_heads, page = text.k.shape[0], text.size
    assert launch.large == 0 and qkv.shape == (1, (heads + 2 * kv_heads) * dim)
    assert qkv.stride(1) == 1 and out.is_contiguous()
    turned = dim if rotary is None else rotary
    cos, sin, places = turns
    q_weight, k_weight, eps = norm or (cos, cos, 0.0)
    shape: dict[str, Any] = {"H": heads, "KV_HEADS": kv_heads, "D": dim, "ROTARY": turned}
    shape |= {"HALF": max(triton.next_power_of_2(dim // 2), 16), "PAGE": page}
    shape["WIDE"] = max(triton.next_power_of_2(dim), 16)
    shape["PRECISION"] = "ieee" if qkv.dtype == torch.float32 else "tf32"
    shape |= {"CAP": (softcap or 0.0) * LOG2_E, "HAS_SINKS": sinks is not None}
    _attend_row[(launch.small if launch.few else -(-launch.small // 4),)](
        work, work[HEADER * group :], qkv, cos, sin, slots if places is None else places, slots,
        q_weight, k_weight, eps, out, scratch.parts, scratch.lses, scratch.arrived,
        *text[:2], *vision[:2],
        cos.stride(0), text.k.stride(0), vision.k.stride(0), rope, scale,
        qkv if sinks is None else sinks, BLOCK_M=SMALL_ROWS, BLOCK_P=launch.merge or PARTS_AT_ONCE,
        SMALL=SMALL, PLACED=places is not None, NORM=norm is not None, **shape,
        **_tuning(dim, qkv.element_size()), **chained(qkv.device),
    )  # fmt: skip
