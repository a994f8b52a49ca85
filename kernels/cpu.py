"""Fused CPU kernels compiled by Numba: everything between two 8-bit products.

Owns the loops that would otherwise be a dozen small tensor operations a layer (at one token their
dispatch costs more than the arithmetic). The format of `rows` is mmserve.kernels.int8's; the
meaning of the attention is mmserve.kernels.reference's. Every row is computed by the same
instructions whatever the batch, so batch mates cannot change its bits. Arrays are C-contiguous
numpy views of torch tensors, float32 unless said otherwise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import prange

from mmserve.kernels.int8 import TILE, Floats, Int32s, jit, quantize_row, threaded

Ints = npt.NDArray[np.int64]


@threaded
def norm_quantize(
    x: Floats, weight: Floats, eps: float, limit: float, rows: Int32s, scales: Floats
) -> None:
    """RMS norm of x [M, K] with weight [K], then quantised as `int8.quantize` does."""
    width = x.shape[1]
    for tile in prange(rows.shape[0]):
        normed = np.empty(width, np.float32)
        for m in range(tile * TILE, min((tile + 1) * TILE, x.shape[0])):
            total = np.float32(0)
            for k in range(width):
                total += x[m, k] * x[m, k]
            factor = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(eps))
            for k in range(width):
                normed[k] = x[m, k] * factor * weight[k]
            scales[m] = quantize_row(normed, limit, rows, m)


@jit
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


@jit
def _softmax(x: Floats, bits: Int32s) -> None:
    """In place; `bits`: scratch of x's length."""
    # As integers floats are in order once the negative ones are turned round; only integers
    # compare in vectors.
    own, peak = x.view(np.int32), np.empty(1, np.int32)
    most = np.int32(-(2**31))
    for t in range(x.shape[0]):
        most = max(most, own[t] ^ ((own[t] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    peak[0] = most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))
    _exp_minus(x, peak.view(np.float32)[0], bits, bits.view(np.float32))
    total = np.float32(0)
    for t in range(x.shape[0]):
        total += x[t]
    for t in range(x.shape[0]):
        x[t] /= total


@threaded
def gate_quantize(both: Floats, limit: float, rows: Int32s, scales: Floats) -> None:
    """silu(gate) * up of both [M, 2 F] (gate first), then quantised."""
    half = both.shape[1] // 2
    for tile in prange(rows.shape[0]):
        gated, decays = np.empty(half, np.float32), np.empty(half, np.float32)
        bits = np.empty(half, np.int32)
        for m in range(tile * TILE, min((tile + 1) * TILE, both.shape[0])):
            for n in range(half):
                decays[n] = -both[m, n]
            _exp_minus(decays, np.float32(0), bits, bits.view(np.float32))
            for n in range(half):
                gated[n] = both[m, n] / (np.float32(1) + decays[n]) * both[m, half + n]
            scales[m] = quantize_row(gated, limit, rows, m)


@threaded
def rotate_store(
    qkv: Floats, cos: Floats, sin: Floats, slots: Ints, q: Floats, k_pool: Floats, v_pool: Floats
) -> None:
    """From packed q, k, v to rotated q and stored k, v.

    qkv [M, (H + 2 Hkv) D], cos and sin [M, D / 2], slots int64 [M], q [M, H, D] (out), pools
    [Hkv, slots, D] (written).
    """
    heads, dim = q.shape[1:]
    kv_heads, half = k_pool.shape[0], dim // 2
    for m in prange(q.shape[0]):
        slot = slots[m]
        for h in range(heads + kv_heads):
            for d in range(half):
                a, b = qkv[m, h * dim + d], qkv[m, h * dim + half + d]
                x = a * cos[m, d] - b * sin[m, d]
                y = b * cos[m, d] + a * sin[m, d]
                if h < heads:
                    q[m, h, d], q[m, h, half + d] = x, y
                else:
                    k_pool[h - heads, slot, d], k_pool[h - heads, slot, half + d] = x, y
        for h in range(kv_heads):
            for d in range(dim):
                v_pool[h, slot, d] = qkv[m, (heads + kv_heads + h) * dim + d]


@jit
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


@jit
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


@threaded
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
    for task in prange(count * kv_heads):
        # From both ends by turns: later queries read more, and a thread takes neighbours.
        at_end, h = task // kv_heads, task % kv_heads
        m = count - 1 - at_end // 2 if at_end % 2 else at_end // 2
        first, last, length = image_first[m], image_last[m], hi[m]
        mine = pages[row[m]]
        total = length + image_len[first:last].sum()
        scores, bits = np.empty((group, total), np.float32), np.empty(total, np.int32)
        turned = np.empty((group, dim), np.float32)
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
            _softmax(scores[g], bits)
        result[:] = 0
        _add_values(scores, 0, own[1][h], mine, length, size, result)
        at = length
        for n in range(first, last):
            _add_values(scores, at, vision[1][h], image_pages[n], image_len[n], size, result)
            at += image_len[n]
