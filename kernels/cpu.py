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
    qkv: Floats,
    cos: Floats,
    sin: Floats,
    slots: Ints,
    q: Floats,
    text: tuple[Floats, Floats],
    vision: tuple[Floats, Floats],
) -> None:
    """From packed q, k, v to rotated q and stored k, v.

    qkv [M, (H + 2 Hkv) D], cos and sin [M, D / 2], q [M, H, D] (out); slots int64 [M] as an
    `AttentionPlan` names them, in text and vision: (K, V), each [Hkv, slots, D] (written).
    """
    heads, dim = q.shape[1:]
    kv_heads, half = text[0].shape[0], dim // 2
    for m in prange(q.shape[0]):
        slot = slots[m]
        k_pool, v_pool = text if slot >= 0 else vision
        slot = slot if slot >= 0 else -2 - slot
        for h in range(heads + kv_heads):
            if h >= heads and slot < 0:
                break  # NOWHERE
            for d in range(half):
                a, b = qkv[m, h * dim + d], qkv[m, h * dim + half + d]
                x = a * cos[m, d] - b * sin[m, d]
                y = b * cos[m, d] + a * sin[m, d]
                if h < heads:
                    q[m, h, d], q[m, h, half + d] = x, y
                else:
                    k_pool[h - heads, slot, d], k_pool[h - heads, slot, half + d] = x, y
        for h in range(kv_heads if slot >= 0 else 0):
            for d in range(dim):
                v_pool[h, slot, d] = qkv[m, (heads + kv_heads + h) * dim + d]


@jit
def _find_slots(pages: Ints, lo: int, hi: int, mask: int, size: int, slots: Ints) -> int:
    """slots of the tokens lo : hi in pages, then of hi + j for the bits j of mask; their number."""
    for number in range(lo // size, -(-hi // size)):
        first = number * size
        for t in range(max(lo, first), min(hi, first + size)):
            slots[t - lo] = pages[number] * size + t - first
    count = hi - lo
    for t in range(hi, hi + 64 if mask else hi):
        if mask >> (t - hi) & 1:
            slots[count] = pages[t // size] * size + t % size
            count += 1
    return count


@jit
def _read_scores(q: Floats, keys: Floats, slots: Ints, scores: Floats, at: int) -> None:
    """scores [G, at : at + N] of q [G, D] by the keys in slots [N] of keys [slots, D]."""
    for i in range(len(slots)):
        for g in range(q.shape[0]):
            total = np.float32(0)
            for d in range(q.shape[1]):
                total += q[g, d] * keys[slots[i], d]
            scores[g, at + i] = total


@jit
def _add_values(
    weights: Floats, at: int, values: Floats, slots: Ints, lo: int, out: Floats
) -> None:
    """out [G, D] += weights [G, at : at + N] times the values in slots [N] of tokens from lo on.

    Four values at a time, from each multiple of four, save three of four passes over `out`.
    """
    count = len(slots)
    start = min(-lo % 4, count)
    fours = start + (count - start) // 4 * 4
    for i in range(start, fours, 4):
        a, b, c, e = slots[i], slots[i + 1], slots[i + 2], slots[i + 3]
        for g in range(out.shape[0]):
            w = weights[g, at + i : at + i + 4]
            for d in range(out.shape[1]):
                out[g, d] += (w[0] * values[a, d] + w[1] * values[b, d]) + (
                    w[2] * values[c, d] + w[3] * values[e, d]
                )
    for single in range(count - (fours - start)):
        i = single if single < start else single + fours - start
        for g in range(out.shape[0]):
            weight = weights[g, at + i]
            for d in range(out.shape[1]):
                out[g, d] += weight * values[slots[i], d]


@jit
def _turn(q: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    """out [G, D] = q [G, D] rotated by an angle, cos and sin [D / 2]."""
    half = len(cos)
    for g in range(q.shape[0]):
        for d in range(half):
            x, y = q[g, d], q[g, half + d]
            out[g, d] = x * cos[d] - y * sin[d]
            out[g, half + d] = y * cos[d] + x * sin[d]


@threaded
def row_attention(
    q: Floats,
    text: tuple[Floats, Floats],
    vision: tuple[Floats, Floats],
    size: int,
    pages: Ints,
    row: Ints,
    query: Ints,
    reads: Ints,
    images: Ints,
    image_pages: Ints,
    image_reads: Ints,
    cos: Floats,
    sin: Floats,
    scale: float,
    out: Floats,
) -> None:
    """Every query by itself over its sequence's text and images.

    q, out [M, H, D]; text and vision: (K, V), each [Hkv, slots, D]. All else of a query is int64:
    it is number query[m] of sequence row[m], reads in pages[row[m]], pages [B, P], the tokens
    lo : hi and then hi + j for the bits j of mask, reads[m] = lo, hi, mask, and of the images n
    from images[m, 0] to images[m, 1] the tokens image_reads[n, query[m]] = lo, hi in
    image_pages[n], [N, V]. cos, sin [N, D / 2]: of -base.
    """
    count, heads, dim = q.shape
    kv_heads, group = len(text[0]), heads // len(text[0])
    for task in prange(count * kv_heads):
        # From both ends by turns: later queries read more, and a thread takes neighbours.
        at_end, h = task // kv_heads, task % kv_heads
        m = count - 1 - at_end // 2 if at_end % 2 else at_end // 2
        first, last = images[m]
        lo, hi, total = reads[m, 0], max(reads[m, 0], reads[m, 1]), 0
        for n in range(first, last):
            total += image_reads[n, query[m], 1] - image_reads[n, query[m], 0]
        slots = np.empty(hi - lo + 64 + total, np.int64)
        own = at = _find_slots(pages[row[m]], lo, hi, reads[m, 2], size, slots)
        total += own
        scores, bits = np.empty((group, total), np.float32), np.empty(total, np.int32)
        turned = np.empty((group, dim), np.float32)
        mine = slice(h * group, (h + 1) * group)
        asked, result = q[m, mine] * np.float32(scale), out[m, mine]
        _read_scores(asked, text[0][h], slots[:own], scores, 0)
        for n in range(first, last):
            start, end = image_reads[n, query[m]]
            if end <= start:
                continue
            _turn(asked, cos[n], sin[n], turned)
            _find_slots(image_pages[n], start, end, 0, size, slots[at:])
            _read_scores(turned, vision[0][h], slots[at : at + end - start], scores, at)
            at += end - start
        for g in range(group):
            _softmax(scores[g], bits)
        result[:] = 0
        _add_values(scores, 0, text[1][h], slots[:own], lo, result)
        at = own
        for n in range(first, last):
            start, end = image_reads[n, query[m]]
            _add_values(scores, at, vision[1][h], slots[at : at + end - start], start, result)
            at += end - start
