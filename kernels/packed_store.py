"""Storing tokens in the pools that their slots name, in Triton.

Owns how heads are written as mmserve.kernels.fused rotates them: as they are, or as bytes in tiles
of mmserve.kernels.kv_formats. Knows nothing of layers or steps.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mmserve.kernels.kv_formats import FORMATS, largest
from mmserve.kernels.unpacking import NAMES, PLAIN, bits_of

E4M3, E5M2 = (tl.constexpr(NAMES.index(name)) for name in ("fp8_e4m3", "fp8_e5m2"))

LARGEST = tuple(largest(kind) if kind.bits == 8 else 0.0 for kind in FORMATS.values())  # by code


@triton.constexpr_function
def largest_of(code):
    return LARGEST[code]


@triton.jit
def at_least(x):
    """The bits uint16 of the bfloat16 that is not below x float32, which is finite."""
    bits = x.to(tl.uint32, bitcast=True)
    higher = (x > 0) & ((bits & 0xFFFF) != 0)
    return ((bits >> 16) + higher.to(tl.uint32)).to(tl.uint16)


@triton.jit
def widened(bits):
    """bfloat16 of these bits as float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _float8(x, FRACTION: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr):
    """x float32 rounded to even, as bytes with FRACTION bits of fraction and exponents from BIAS
    on, at most MOST. By integers: not all devices have the instruction."""
    bits = x.to(tl.uint32, bitcast=True)
    mag = bits & 0x7FFFFFFF
    CUT: tl.constexpr = 23 - FRACTION
    usual = (mag + ((1 << (CUT - 1)) - 1) + ((mag >> CUT) & 1)) >> CUT
    usual = usual.to(tl.int32) - ((127 - BIAS) << FRACTION)
    # Below the least normal number all are as far apart: rounded by the addition.
    steps = tl.abs(x) * (1 << (BIAS - 1 + FRACTION))
    small = ((tl.minimum(steps, 1024.0) + 12582912.0) - 12582912.0).to(tl.int32)
    level = tl.where(steps < (1 << FRACTION), small, tl.minimum(usual, MOST))
    return (level | (bits >> 31 << 7).to(tl.int32)).to(tl.uint8)


@triton.jit
def _bytes(x, scale, CODE: tl.constexpr):
    """Elements of x [N, M] by scales float32 [N]."""
    x = x / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
    if CODE == E4M3:
        x = _float8(x, 3, 7, 0x7E)
    elif CODE == E5M2:
        x = _float8(x, 2, 15, 0x7B)
    else:
        # Rounded to even by the addition.
        x = ((x + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    return x


@triton.jit
def encode(a, b, c, ok, tail_ok, CODE: tl.constexpr, TAIL: tl.constexpr):
    """Bytes of heads in three pieces [N, ...], the last of which counts with TAIL only, and the
    scales' bits [N]."""
    a = tl.where(ok, a.to(tl.float32), 0.0)
    b = tl.where(ok, b.to(tl.float32), 0.0)
    top = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    if TAIL:
        c = tl.where(tail_ok, c.to(tl.float32), 0.0)
        top = tl.maximum(top, tl.max(tl.abs(c), 1))
    bits = at_least(top / largest_of(CODE))
    scale = widened(bits)
    a = _bytes(a, scale, CODE)
    b = _bytes(b, scale, CODE)
    if TAIL:
        c = _bytes(c, scale, CODE)
    return a, b, c, bits


@triton.jit
def _keep(
    pool, slot, here, a, b, c, dim, ok, tail, tail_ok,
    FORM: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store a head of tokens, in halves of its first ROTARY dimensions and the rest, at those slots
    [N] of a head's pages that are `here`."""
    CODE: tl.constexpr = FORM[0]
    PAGE: tl.constexpr = FORM[2]
    ok = ok & here[:, None]
    tail_ok = tail_ok & here[:, None]
    if CODE == PLAIN:
        at = slot * D
    else:
        a, b, c, scale = encode(a, b, c, ok, tail_ok, CODE, ROTARY < D)
        tile = pool + slot // PAGE * FORM[1]
        scales = (tile + PAGE * D).to(tl.pointer_type(tl.uint16)) + slot % PAGE
        tl.store(scales, scale, mask=here)
        at = slot // PAGE * FORM[1] + slot % PAGE * D
    kind = pool.dtype.element_ty
    tl.store(pool + at[:, None] + dim[None, :], a.to(kind), mask=ok)
    tl.store(pool + at[:, None] + ROTARY // 2 + dim[None, :], b.to(kind), mask=ok)
    if ROTARY < D:
        tl.store(pool + at[:, None] + tail[None, :], c.to(kind), mask=tail_ok)


@triton.jit
def _place(slot, text, vision, head, text_head, vision_head, D: tl.constexpr):
    """The first elements of slots [N] in a head of the pool that each names by its sign."""
    in_text = text + head * text_head + slot * D
    in_vision = vision + head * vision_head + (-2 - slot) * D
    return tl.where(slot >= 0, in_text, in_vision)


@triton.jit
def write(at, first, second, rest, half, ok, tail, tail_ok, ROTARY: tl.constexpr, D: tl.constexpr):
    """Heads from `at` [TILE] on: the halves of what is turned, and the rest."""
    kind = at.dtype.element_ty
    tl.store(at[:, None] + half[None, :], first.to(kind), mask=ok)
    tl.store(at[:, None] + ROTARY // 2 + half[None, :], second.to(kind), mask=ok)
    if ROTARY < D:
        tl.store(at[:, None] + tail[None, :], rest.to(kind), mask=tail_ok)


@triton.jit
def keep(
    slot, text, vision, head, text_head, vision_head, first, second, rest, dim, ok, tail, tail_ok,
    TEXT_FORM: tl.constexpr, VISION_FORM: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store heads at slots [N] of the pools that they name."""
    if TEXT_FORM[0] == PLAIN and VISION_FORM[0] == PLAIN:
        target = _place(slot, text, vision, head, text_head, vision_head, D)
        stored = (slot != -1)[:, None]
        write(target, first, second, rest, dim, ok & stored, tail, tail_ok & stored, ROTARY, D)
    else:
        _keep(
            text + head * text_head, slot, slot >= 0, first, second, rest, dim, ok, tail, tail_ok,
            TEXT_FORM, ROTARY, D,
        )  # fmt: skip
        if bits_of(VISION_FORM[0]) % 8 == 0:  # else pages are stored as a whole
            _keep(
                vision + head * vision_head, -2 - slot, slot < -1, first, second, rest, dim, ok,
                tail, tail_ok, VISION_FORM, ROTARY, D,
            )  # fmt: skip
