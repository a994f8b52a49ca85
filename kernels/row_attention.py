"""All that lies between the first product and attention's output of a single row, in one kernel.

Owns the decode step of a single stream, whose attention reads little and is a matter of how much
follows each other, launches and instructions: heads are normalised and turned where they are asked
for, the row's own key and value are stored by who reads them, and the last to end joins the partial
results. Each query head is a program of its own, without tensor cores, which would multiply sixteen
rows for one; what heads share they all read, from the cache. What is computed is
`fused.rotate_store` and `attention.paged_attention`. Knows nothing of sequences or scheduling.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels.attention import LOG2_E, Scratch
from mmserve.kernels.attention_kernels import OWN, joined
from mmserve.kernels.chain import chained
from mmserve.kernels.fused import HeadNorm, Turns
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.launch import PARTS_AT_ONCE, Launch
from mmserve.kernels.work import HEADER, SMALL


@triton.jit
def _turned(
    x, at, dims, weight, eps, cos, sin, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The dimensions dims [N], each once, of a head at x + at: normalised where NORM, and turned
    where they are among the first ROTARY; rounded once; float32."""
    opens = dims < ROTARY // 2
    inside = dims < ROTARY
    angle = tl.where(opens, dims, dims - ROTARY // 2)
    other = tl.where(opens, dims + ROTARY // 2, angle)
    a = tl.load(x + at + dims, mask=dims < D, other=0.0).to(tl.float32)
    b = tl.load(x + at + other, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(a * a, 0) / D + eps)
        a *= factor * tl.load(weight + dims, mask=dims < D, other=0.0).to(tl.float32)
        b *= factor * tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
    turned = a * c + b * tl.where(opens, -s, s)
    return turned.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _query(
    x, at, weight, eps, cos, sin, rope, base,
    D: tl.constexpr, WIDE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A head of q, [WIDE] float32, turned back where base is no less than 0."""
    wide = tl.arange(0, WIDE)
    q = _turned(x, at, wide, weight, eps, cos, sin, D, ROTARY, NORM)
    if base >= 0:
        opens = wide < D // 2
        angle = tl.where(opens, wide, wide - D // 2)
        other = tl.where(opens, wide + D // 2, angle)
        other = tl.where(wide < D, other, wide)
        r = _turned(x, at, other, weight, eps, cos, sin, D, ROTARY, NORM)
        row = rope + tl.cast(base, tl.int64) * D
        c = tl.load(row + angle, mask=wide < D, other=1.0)
        s = tl.load(row + D // 2 + angle, mask=wide < D, other=0.0)
        q = q * c + r * tl.where(opens, s, -s)
    return q


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
def _known(
    keys, values, table, at, first, last, own,
    D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_N, WIDE] from number `at` on, and which are read: those of [first,
    last) that are not at place `own`."""
    n = at + tl.arange(0, BLOCK_N)
    wide = tl.arange(0, WIDE)
    read = (n >= first) & (n < last)
    page = tl.load(table + n // PAGE, mask=read, other=0).to(tl.int64)
    place = page * PAGE + n % PAGE
    read = read & (place != own)
    mask = read[:, None] & (wide < D)[None, :]
    here = place[:, None] * D + wide[None, :]
    k = tl.load(keys + here, mask=mask, other=0.0)
    v = tl.load(values + here, mask=mask, other=0.0)
    return k, v, read


@triton.jit
def _capped(s, CAP: tl.constexpr):
    if CAP > 0:
        # CAP tanh(s / CAP), by an exponential that may overflow.
        s = CAP - 2 * CAP / (tl.exp2(s * (2.8853900817779268 / CAP)) + 1)
    return s


@triton.jit
def _own(
    x, q, head, keys, values, to, stores, weight, eps, cos, sin, H: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The row's own key: its score, and its value [WIDE]. Who `stores` writes both to place `to` of
    the head's pages."""
    wide = tl.arange(0, WIDE)
    k = _turned(x, (H + head) * D, wide, weight, eps, cos, sin, D, ROTARY, NORM)
    k = k.to(keys.dtype.element_ty)
    v = tl.load(x + (H + KV_HEADS + head) * D + wide, mask=wide < D, other=0.0)
    v = v.to(values.dtype.element_ty)
    tl.store(keys + to * D + wide, k, mask=(wide < D) & stores)
    tl.store(values + to * D + wide, v, mask=(wide < D) & stores)
    return _capped(tl.sum(q * k.to(tl.float32), 0), CAP), v.to(tl.float32)


@triton.jit
def _put(
    acc, top, total, slot, query_head, out, parts, lses, sinks,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """A finished item: the whole result, or a partial one at `slot`."""
    wide = tl.arange(0, WIDE)
    if slot < 0:
        if HAS_SINKS:
            sink = tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634
            high = tl.maximum(top, sink)
            total = total * tl.exp2(top - high) + tl.exp2(sink - high)
            acc = acc * tl.exp2(top - high)
        whole = acc / tl.maximum(total, 1e-30)
        tl.store(out + query_head * D + wide, whole.to(out.dtype.element_ty), mask=wide < D)
    else:
        place = slot * H + query_head
        tl.store(parts + place * D + wide, acc / tl.maximum(total, 1e-30), mask=wide < D)
        lse = tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), -1e30)
        tl.store(lses + place, lse)


@triton.jit
def _join_last(
    merges, query_head, arrived, out, parts, lses, sinks,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join a head's partial results, if this program's was the last of them."""
    first = tl.load(merges)
    count = tl.load(merges + 1)
    if count > 1:
        tl.debug_barrier()  # all of the program's is written
        before = tl.atomic_add(arrived + query_head, 1, sem="acq_rel", scope="gpu")
        if before == count - 1:
            tl.debug_barrier()
            result = joined(
                first, count, query_head, parts, lses, sinks, H, D, WIDE, BLOCK_P, HAS_SINKS
            )
            wide = tl.arange(0, WIDE)
            tl.store(out + query_head * D + wide, result.to(out.dtype.element_ty), mask=wide < D)
            tl.store(arrived + query_head, 0)


@triton.jit
def _attend_row(
    work, header, x, cos, sin, places, slots, q_weight, k_weight, eps, out, parts, lses, arrived,
    k_own, v_own, k_vision, v_vision, turn_row, own_head, vision_head, rope, scale, sinks,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ROTARY: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    SMALL: tl.constexpr, PLACED: tl.constexpr, NORM: tl.constexpr, CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """All small items of the set with this header, which has one row, each by every head alone."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    tasks = tl.load(header) * H
    items = work + tl.load(header + 1)
    merges = work + tl.load(header + 6)
    slot = tl.load(slots).to(tl.int64)
    turn = tl.load(places).to(tl.int64) * turn_row if PLACED else slot * 0
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        query_head = tl.cast(task % H, tl.int64)
        head = query_head // (H // KV_HEADS)
        item = items + task // H * SMALL
        table, first, last, base, target, end = _item(work, item, merges, PAGE)
        keys, values, own = k_own + head * own_head, v_own + head * own_head, slot
        if base != OWN:
            keys, values = k_vision + head * vision_head, v_vision + head * vision_head
            own = -2 - slot
        begin = first - first % BLOCK_N
        # Tables depend on nobody, nor do the keys of other steps.
        k, v, read = _known(keys, values, table, begin, first, last, own, D, WIDE, PAGE, BLOCK_N)
        if CHAINED:
            tl.extra.cuda.gdc_wait()
        q = _query(
            x, query_head * D, q_weight, eps, cos + turn, sin + turn, rope, base,
            D, WIDE, ROTARY, NORM,
        )  # fmt: skip
        q *= scale * 1.4426950408889634
        top, total = tl.full([], -1e30, tl.float32), tl.full([], 0.0, tl.float32)
        acc = tl.zeros([WIDE], tl.float32)
        if (own >= 0) & (end == own):  # the row's own key is the last that it reads
            top, acc = _own(
                x, q, head, keys, values, own, query_head % (H // KV_HEADS) == 0, k_weight, eps,
                cos + turn, sin + turn, H, KV_HEADS, D, WIDE, ROTARY, NORM, CAP,
            )  # fmt: skip
            total += 1.0
        for at in tl.range(begin, last, BLOCK_N, num_stages=1):
            s = _capped(tl.sum(k.to(tl.float32) * q[None, :], 1), CAP)
            high = tl.maximum(top, tl.max(tl.where(read, s, -1e30), 0))
            p = tl.where(read, tl.exp2(s - high), 0.0)
            fade = tl.exp2(top - high)
            total = total * fade + tl.sum(p, 0)
            acc = acc * fade + tl.sum(p[:, None] * v.to(tl.float32), 0)
            top = high
            k, v, read = _known(
                keys, values, table, at + BLOCK_N, first, last, own, D, WIDE, PAGE, BLOCK_N
            )  # fmt: skip
        _put(acc, top, total, target, query_head, out, parts, lses, sinks, H, D, WIDE, HAS_SINKS)
        _join_last(
            merges, query_head, arrived, out, parts, lses, sinks, H, D, WIDE, BLOCK_P, HAS_SINKS
        )
    if CHAINED:
        tl.extra.cuda.gdc_wait()  # who had no task ends no sooner than what the next one reads


def _tuning(dim: int) -> dict[str, int]:
    """Few instructions, as a program runs through them once, and few registers, so that two or more
    programs fit on a processor side by side."""
    return {"BLOCK_N": 64 if dim <= 64 else 32, "num_warps": 4}


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
    shape |= {"WIDE": max(triton.next_power_of_2(dim), 16), "PAGE": page}
    shape |= {"CAP": (softcap or 0.0) * LOG2_E, "HAS_SINKS": sinks is not None}
    # Enough for four to a processor.
    programs = 4 * launch.small if launch.few else -(-launch.small // 4)
    _attend_row[(programs,)](
        work, work[HEADER * group :], qkv, cos, sin, slots if places is None else places, slots,
        q_weight, k_weight, eps, out, scratch.parts, scratch.lses, scratch.arrived,
        *text[:2], *vision[:2],
        cos.stride(0), text.k.stride(0), vision.k.stride(0), rope, scale,
        qkv if sinks is None else sinks, BLOCK_P=launch.merge or PARTS_AT_ONCE,
        SMALL=SMALL, PLACED=places is not None, NORM=norm is not None, **shape,
        **_tuning(dim), **chained(qkv.device),
    )  # fmt: skip
