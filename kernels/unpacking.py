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
def width(parts, dim):
    """Of a part's dimensions, padded."""
    return max(triton.next_power_of_2(dim // parts), 16)


@triton.constexpr_function
def magnified(code):
    """What scales of values are multiplied by, so that float16 holds their products with
    probabilities: a power of two, by which values come to about twice their size."""
    return {"fp8_e4m3": 2.0**10, "fp8_e5m2": 2.0**17, "int8": 2.0**8}[NAMES[code]]


@triton.constexpr_function
def element_unit(code):
    """What one is of the elements that `elements` gives."""
    return 2.0**8 if NAMES[code] == "fp8_e4m3" else 1.0


@triton.constexpr_function
def assembly(code, part):
    """Two elements of a part from two words; of groups times $2 plus $3.

    Instructions that convert integers run at a quarter of the rate. Here an integer is put into the
    mantissa of a power of two, which is then subtracted.
    """
    kind, odd = kv_formats.FORMATS[NAMES[code]], part % 2
    if kind.bits == 8:
        # fp8: each byte to the upper half of 16 bits. int8: its sign bit turned, it is 128 more.
        shifted = f"prmt.b32 t, $1, 0, {0x3414 if odd else 0x2404};"
        body = {
            "fp8_e4m3": f"{shifted} shr.b32 u, t, 1; and.b32 u, u, 0x3f803f80;"
            " lop3.b32 $0, t, 0x80008000, u, 0xEA;",
            "fp8_e5m2": f"{shifted} mov.b32 $0, t;",
            "int8": f"shr.b32 t, $1, {8 if odd else 0};"
            " lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6A; mov.b32 u, 0x64806480;"
            " sub.rn.f16x2 $0, t, u;",
        }[kind.name]
    else:
        at = part // 2 * kind.bits
        mask = (2**kind.bits - 1 << at) * 0x10001
        power = (0x6400 - at * 0x400) * 0x10001  # whose mantissa counts in units of bit `at`
        body = "shr.b32 t, $1, 8;" if odd else "mov.b32 t, $1;"
        body += f" lop3.b32 t, t, {mask}, {power}, 0xEA; mov.b32 u, {power};"
        body += " sub.rn.f16x2 t, t, u; fma.rn.f16x2 $0, t, $2, $3;"
    return "{ .reg .b32 t, u; " + body + " }"


@triton.jit
def elements(words, CODE: tl.constexpr, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A part of bytes: float16 in the shape of the words uint16, in units of `element_unit`."""
    if ASSEMBLY:
        x = tl.inline_asm_elementwise(
            assembly(CODE, PART), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        byte = (words >> (PART % 2 * 8)) & 0xFF
        if CODE == INT8:
            x = byte.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float16)
        elif CODE == E5M2:
            x = (byte << 8).to(tl.float16, bitcast=True)
        else:
            x = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return x


@triton.jit
def levels(words, scale, low, CODE: tl.constexpr, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A part of groups in the shape of the words; scale and low float16, to be broadcast."""
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
    """Two bfloat16s of each uint32, as float16."""
    first = (pairs << 16).to(tl.float32, bitcast=True).to(tl.float16)
    second = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.float16)
    return first, second
