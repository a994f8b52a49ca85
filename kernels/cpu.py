"""Fused CPU kernels for decoding, compiled by Numba: everything between two integer products.

Owns the loops that would otherwise be a dozen small tensor operations a layer (at one token their
dispatch costs more than the arithmetic). The format of `rows` is mmserve.kernels.int8's; the
meaning of the attention is mmserve.kernels.reference's. Every row is computed by the same
instructions whatever the batch, so batch mates cannot change its bits. Arrays are C-contiguous
numpy views of torch tensors, float32 unless said otherwise. One thread: the products between these
calls use the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.int8]

# Reassociation lets LLVM keep several partial sums; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_F = TypeVar("_F", bound=Callable[..., Any])


def _jit(function: _F) -> _F:
    """Compile at the first call, or take it from the cache on disk beside this file."""
    compiled: _F = njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")(function)
    return compiled


@_jit
def _quantize_row(x: Floats, high: Bytes, low: Bytes) -> np.float32:
    top = np.float32(1e-12)
    for k in range(x.shape[0]):
        top = max(top, abs(x[k]))
    scale = top / np.float32(127)
    inverse = np.float32(127) / top
    for k in range(x.shape[0]):
        scaled = x[k] * inverse
        whole = np.rint(scaled)
        high[k] = np.int8(whole)
        low[k] = np.int8(np.rint((scaled - whole) * np.float32(254)))
    return scale


@_jit
def quantize(x: Floats, rows: Bytes, scales: Floats) -> None:
    """x [M, K] -> rows int8 [2 M, K], scales [M]."""
    count = x.shape[0]
    for m in range(count):
        scales[m] = _quantize_row(x[m], rows[m], rows[count + m])


@_jit
def norm_quantize(x: Floats, weight: Floats, eps: float, rows: Bytes, scales: Floats) -> None:
    """RMS norm of x [M, K] with weight [K], then quantised as `quantize` does."""
    count, width = x.shape
    normed = np.empty(width, np.float32)
    for m in range(count):
        total = np.float32(0)
        for k in range(width):
            total += x[m, k] * x[m, k]
        factor = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(eps))
        for k in range(width):
            normed[k] = x[m, k] * factor * weight[k]
        scales[m] = _quantize_row(normed, rows[m], rows[count + m])


@_jit
def dequantize_add(acc: Int32s, weight: Floats, scales: Floats, out: Floats) -> None:
    """out [M, N] += the real value of the product acc int32 [2 M, N]; weight [N], scales [M]."""
    count, width = out.shape
    for m in range(count):
        for n in range(width):
            value = np.float32(acc[m, n]) + np.float32(acc[count + m, n]) * np.float32(1 / 254)
            out[m, n] += value * weight[n] * scales[m]


@_jit
def _exp_minus(x: Floats, top: np.float32, bits: Int32s, powers: Floats) -> None:
    """x becomes exp(x - top), in a form that vectorises; relative error below 1e-6.

    exp(y) = 2^w 2^f with |f| <= 1/2: 2^f by its Taylor polynomial in f ln 2, 2^w by writing the
    exponent's bits. `bits` and `powers` are one scratch array of x's length seen as int32 and
    float32. Results below 2^-126 come out as 2^-126.
    """
    for t in range(x.shape[0]):
        y = (x[t] - top) * np.float32(1.4426950408889634)
        y = min(max(y, np.float32(-126)), np.float32(126))
        whole = np.rint(y)
        f = y - whole
        bits[t] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        p = np.float32(1.5403530e-4) * f + np.float32(1.3333558e-3)
        p = p * f + np.float32(9.6181291e-3)
        p = p * f + np.float32(5.5504109e-2)
        p = p * f + np.float32(2.4022651e-1)
        p = p * f + np.float32(6.9314718e-1)
        x[t] = p * f + np.float32(1)
    for t in range(x.shape[0]):
        x[t] *= powers[t]


@_jit
def gate_quantize(
    acc: Int32s, weight: Floats, scales: Floats, rows: Bytes, out_scales: Floats
) -> None:
    """silu(gate) * up from the product acc int32 [2 M, 2 F] -> quantised [2 M, F], [M]."""
    count, half = rows.shape[0] // 2, rows.shape[1]
    gates, decays = np.empty(half, np.float32), np.empty(half, np.float32)
    bits = np.empty(half, np.int32)
    powers = bits.view(np.float32)
    for m in range(count):
        scale = scales[m]
        for n in range(half):
            gate = np.float32(acc[m, n]) + np.float32(acc[count + m, n]) * np.float32(1 / 254)
            gates[n] = gate * (weight[n] * scale)
            decays[n] = -gates[n]
        _exp_minus(decays, np.float32(0), bits, powers)
        for n in range(half):
            k = half + n
            up = np.float32(acc[m, k]) + np.float32(acc[count + m, k]) * np.float32(1 / 254)
            gates[n] = gates[n] / (np.float32(1) + decays[n]) * (up * (weight[k] * scale))
        out_scales[m] = _quantize_row(gates, rows[m], rows[count + m])


@_jit
def rotate_store(
    acc: Int32s,
    weight: Floats,
    scales: Floats,
    cos: Floats,
    sin: Floats,
    slots: Ints,
    q: Floats,
    k_pool: Floats,
    v_pool: Floats,
) -> None:
    """From the packed q, k, v product to rotated q and stored k, v.

    acc int32 [2 M, (H + 2 Hkv) D], cos and sin [M, D / 2], slots int64 [M], q [M, H, D] (out),
    pools [Hkv, slots, D] (written).
    """
    count, heads, dim = q.shape
    kv_heads, half = k_pool.shape[0], dim // 2
    for m in range(count):
        scale, slot = scales[m], slots[m]
        for h in range(heads + 2 * kv_heads):
            base = h * dim
            for d in range(half):
                i, j = base + d, base + half + d
                a = np.float32(acc[m, i]) + np.float32(acc[count + m, i]) * np.float32(1 / 254)
                b = np.float32(acc[m, j]) + np.float32(acc[count + m, j]) * np.float32(1 / 254)
                a *= weight[i] * scale
                b *= weight[j] * scale
                if h < heads:
                    q[m, h, d] = a * cos[m, d] - b * sin[m, d]
                    q[m, h, half + d] = b * cos[m, d] + a * sin[m, d]
                elif h < heads + kv_heads:
                    k_pool[h - heads, slot, d] = a * cos[m, d] - b * sin[m, d]
                    k_pool[h - heads, slot, half + d] = b * cos[m, d] + a * sin[m, d]
                else:
                    v_pool[h - heads - kv_heads, slot, d] = a
                    v_pool[h - heads - kv_heads, slot, half + d] = b


@_jit
def _read_scores(
    q: Floats, keys: Floats, pages: Ints, count: int, size: int, scores: Floats, at: int
) -> None:
    """scores [G, at : at + count] of q [G, D] against `count` keys in pages of keys [slots, D]."""
    for t in range(count):
        slot = pages[t // size] * size + t % size
        for g in range(q.shape[0]):
            total = np.float32(0)
            for d in range(q.shape[1]):
                total += q[g, d] * keys[slot, d]
            scores[g, at + t] = total


@_jit
def _add_values(
    weights: Floats, at: int, values: Floats, pages: Ints, count: int, size: int, out: Floats
) -> None:
    """out [G, D] += weights [G, at : at + count] times `count` values in pages.

    Four values at a time save three of four passes over `out`, where no four cross a page.
    """
    fours = count // 4 * 4 if size % 4 == 0 else 0
    for t in range(0, fours, 4):
        slot = pages[t // size] * size + t % size
        for g in range(out.shape[0]):
            w = weights[g, at + t : at + t + 4]
            for d in range(out.shape[1]):
                out[g, d] += (w[0] * values[slot, d] + w[1] * values[slot + 1, d]) + (
                    w[2] * values[slot + 2, d] + w[3] * values[slot + 3, d]
                )
    for t in range(fours, count):
        slot = pages[t // size] * size + t % size
        for g in range(out.shape[0]):
            weight = weights[g, at + t]
            for d in range(out.shape[1]):
                out[g, d] += weight * values[slot, d]


@_jit
def row_attention(
    q: Floats,
    own: tuple[Floats, Floats],
    vision: tuple[Floats, Floats],
    size: int,
    pages: Ints,
    row: Ints,
    hi: Ints,
    image_first: Ints,
    image_last: Ints,
    image_pages: Ints,
    image_len: Ints,
    cos: Floats,
    sin: Floats,
    scale: float,
    out: Floats,
) -> None:
    """Every query by itself over its own pages and the images before it.

    q, out [M, H, D]; own and vision: (K, V), each [Hkv, slots, D]; query m reads hi[m] tokens in
    pages[row[m]], pages int64 [B, P], and the images image_first[m] : image_last[m] of image_pages
    int64 [N, V], image_len int64 [N] and cos, sin [N, D / 2] of the angle -base.
    """
    count, heads, dim = q.shape
    kv_heads, half = own[0].shape[0], dim // 2
    group = heads // kv_heads
    turned = np.empty((group, dim), np.float32)
    for m in range(count):
        first, last, length = image_first[m], image_last[m], hi[m]
        mine = pages[row[m]]
        total = length + image_len[first:last].sum()
        scores, bits = np.empty((group, total), np.float32), np.empty(total, np.int32)
        powers = bits.view(np.float32)
        for h in range(kv_heads):
            asked = q[m, h * group : (h + 1) * group] * np.float32(scale)
            result = out[m, h * group : (h + 1) * group]
            _read_scores(asked, own[0][h], mine, length, size, scores, 0)
            at = length
            for n in range(first, last):
                for g in range(group):
                    for d in range(half):
                        x, y = asked[g, d], asked[g, half + d]
                        turned[g, d] = x * cos[n, d] - y * sin[n, d]
                        turned[g, half + d] = y * cos[n, d] + x * sin[n, d]
                _read_scores(turned, vision[0][h], image_pages[n], image_len[n], size, scores, at)
                at += image_len[n]
            for g in range(group):
                _exp_minus(scores[g], scores[g].max(), bits, powers)
                scores[g] /= scores[g].sum()
            result[:] = 0
            _add_values(scores, 0, own[1][h], mine, length, size, result)
            at = length
            for n in range(first, last):
                _add_values(scores, at, vision[1][h], image_pages[n], image_len[n], size, result)
                at += image_len[n]
