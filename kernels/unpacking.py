"""Elements of tiles as operands of tensor cores, in Triton.

Owns the codes by which kernels know the formats of mmserve.kernels.kv_formats, and the arithmetic
that makes float16, in which all levels are exact, of their elements. Knows nothing of attention.

A tile's data is read as words of two bytes, which the tensor cores' loads can turn like any other
16-bit element. A word holds elements of `2 * parts` parts of a head, two bytes of `parts` each:
part i holds the dimensions 2 c + i % 2 + i // 2 * D / parts, c counting words.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mmserve.kernels import kv_formats

NAMES = tuple(kv_formats.FORMATS)  # a format's code is its place
PLAIN, E5M2, INT8 = (tl.constexpr(NAMES.index(name)) for name in ("auto", "fp8_e5m2", "int8"))


def form(pages: kv_formats.Pages, dim: int) -> tuple[int, int, int]:
    """How kernels see a pool: its format's code, bytes of a tile, tokens of a page."""
    kind = pages.kind
    tile = 0 if kind.plain else kind.tile_bytes(pages.size, dim)
    return NAMES.index(kind.name), tile, pages.size


@triton.constexpr_function
def bits_of(code):
    return kv_formats.FORMATS[NAMES[code]].bits


@triton.constexpr_function
def has_outliers(code):
    return kv_formats.FORMATS[NAMES[code]].outliers


@triton.constexpr_function
def value_groups(code, dim):
    return kv_formats.FORMATS[NAMES[code]].value_groups(dim)


@triton.constexpr_function
def group_of(code, dim, part):
    """Which of a token's scales of values is a part's."""
    kind = kv_formats.FORMATS[NAMES[code]]
    return part // kind.parts if kind.value_groups(dim) == 2 else 0


@triton.constexpr_function
def width(parts, dim):
    """Of a part's dimensions, padded."""
    return max(triton.next_power_of_2(dim // parts), 16)


@triton.constexpr_function
def magnified(code):
    """What scales of values are multiplied by, so that float16 holds their products with
    probabilities: a power of two, by which values come to about twice their size."""
    powers = {"fp8_e4m3": 10, "fp8_e5m2": 17, "int8": 8, "int4": 5, "int2": 3}
    return 2.0 ** powers[NAMES[code].removesuffix("_outliers")]


@triton.constexpr_function
def unit(code):
    """What one is of the elements that `elements` gives."""
    return {"fp8_e4m3": 2.0**8, "fp8_e5m2": 1.0}.get(NAMES[code], 2.0**24)


@triton.constexpr_function
def zero(code):
    """What is zero of them, in units."""
    return 128.0 if NAMES[code] == "int8" else 0.0


@triton.constexpr_function
def place_of(code, part):
    """The lowest bit of a group's part in its byte, 0 of bytes."""
    kind = kv_formats.FORMATS[NAMES[code]]
    return part // 2 * kind.bits if kind.whole_pages else 0


@triton.constexpr_function
def assembly(code, part):
    """Two elements of a part from two words; with outliers, times $2 plus $3.

    Instructions that convert integers run at a quarter of the rate. Here an integer stands where it
    is in the mantissa: a float16 too small to be normal, which the tensor cores take as any other.
    With outliers levels are to be whole: the mantissa is a power of two's, which is subtracted.
    """
    kind, odd = kv_formats.FORMATS[NAMES[code]], part % 2
    body = "shr.b32 t, $1, 8;" if odd else "mov.b32 t, $1;"
    if kind.name == "int8":  # its sign bit turned, it is 128 more
        body += " lop3.b32 $0, t, 0x00ff00ff, 0x00800080, 0x6A;"
    elif kind.bits == 8:  # each byte to the upper half of 16 bits
        body = f"prmt.b32 t, $1, 0, {0x3414 if odd else 0x2404};"
        body += {
            "fp8_e4m3": " shr.b32 u, t, 1; and.b32 u, u, 0x3f803f80;"
            " lop3.b32 $0, t, 0x80008000, u, 0xEA;",
            "fp8_e5m2": " mov.b32 $0, t;",
        }[kind.name]
    else:
        at = place_of(code, part)
        mask = (2**kind.bits - 1 << at) * 0x10001
        if kind.outliers:
            power = (0x6400 - at * 0x400) * 0x10001  # whose mantissa counts in units of bit `at`
            body += f" lop3.b32 t, t, {mask}, {power}, 0xEA; mov.b32 u, {power};"
            body += " sub.rn.f16x2 t, t, u; fma.rn.f16x2 $0, t, $2, $3;"
        else:
            body += f" and.b32 $0, t, {mask};"
    return "{ .reg .b32 t, u; " + body + " }"


@triton.jit
def elements(words, CODE: tl.constexpr, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A part: float16 in the shape of the words uint16, `zero` more than they are, in units of
    `unit`, which of groups count in the part's lowest bit."""
    if ASSEMBLY:
        x = tl.inline_asm_elementwise(
            assembly(CODE, PART), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        byte = (words >> (PART % 2 * 8)) & 0xFF
        if bits_of(CODE) < 8:
            bits = byte & (((1 << bits_of(CODE)) - 1) << place_of(CODE, PART))
        elif CODE == INT8:
            bits = byte ^ 0x80
        elif CODE == E5M2:
            bits = byte << 8
        else:
            bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        x = bits.to(tl.uint16).to(tl.float16, bitcast=True)
    return x


@triton.jit
def levels(words, scale, low, CODE: tl.constexpr, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A part of groups that have outliers, in the shape of the words; scale and low float16, to be
    broadcast."""
    if ASSEMBLY:
        x = tl.inline_asm_elementwise(
            assembly(CODE, PART), "=r,r,r,r", [words, scale, low],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        BITS: tl.constexpr = bits_of(CODE)
        level = (words >> (PART % 2 * 8 + PART // 2 * BITS)) & ((1 << BITS) - 1)
        x = level.to(tl.float32) * scale.to(tl.float32) + low.to(tl.float32)
        x = x.to(tl.float16)
    return x


@triton.jit
def halves(pairs):
    """Two bfloat16s of each uint32, as float32."""
    first = (pairs << 16).to(tl.float32, bitcast=True)
    second = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def outlying_keys(
    x, tile, dim, ok, token, D: tl.constexpr, PAGE: tl.constexpr, DATA: tl.constexpr
):  # fmt: skip
    """Keys x [N, C] with each channel's outlier in its place."""
    at = tile + 2 * DATA + 4 * D
    value = tl.load(at.to(tl.pointer_type(tl.bfloat16)) + dim, mask=ok, other=0.0)
    place = tl.load(at + 2 * D + dim, mask=ok, other=255)
    value = value.to(tl.float32).to(tl.float16)
    return tl.where(place[None, :] == token[:, None], value[None, :], x)


@triton.jit
def outlying_values(
    x, tile, dim, token, group,
    D: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, DATA: tl.constexpr,
):  # fmt: skip
    """Values x [C, N] of a group of their token's with the group's outlier in its place."""
    which = token * GROUPS
    first = dim
    if GROUPS == 2:
        which += group
        first = dim - group * (D // 2)
    at = tile + 2 * DATA + 4 * GROUPS * PAGE
    value = tl.load(at.to(tl.pointer_type(tl.bfloat16)) + which)
    place = tl.load(at + 2 * GROUPS * PAGE + which)
    value = value.to(tl.float32).to(tl.float16)
    return tl.where(place[None, :] == first[:, None], value[None, :], x)
