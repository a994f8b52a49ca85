"""The lowest logit that top-k and top-p leave of a row, without sorting it, in Triton.

Owns the kernels that find it, and what a token's mass is. Knows nothing of draws.

A token's *mass* is exp(scaled logit - the row's best) in steps of 2^-44, an integer: sums of masses
do not depend on their order, so programs may add in any, and a row's result depends on that row
alone. Tokens more than 30.5 below the best have no mass; all of them together would have less than
2^-26 of a row of 262,144 tokens, less than one step of a float32 random number.

The threshold is found in three steps:

1. `narrow`, ROUNDS times: count and weigh the tokens at or above each of EDGES values, first from
   the best logit down to 31 below it, then within the range that must hold the threshold;
2. `compact`: copy that range's logits, usually a few, to a list;
3. `select`: search the list (the row itself, should the list overflow) over the order of floats,
   WAYS at a time, until one value is left.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MAX_VOCAB = 2**18  # with 2^44 to a mass, a row's sum fits into 63 bits
CHUNK = 2048  # tokens of one program
EDGES = 32
LANES = 128  # tokens compared with all edges at once; twice as many would leave one program a core
ROUNDS = 2
CAPACITY = 4096  # of a row's list
WAYS = 16
TILE = 512  # tokens compared with all ways at once

LOW = tl.constexpr(-3e38)  # finite, so that differences are numbers
HIGH = tl.constexpr(3e38)
ONE = tl.constexpr(2.0**44)  # mass of the best token
GREEDY = tl.constexpr(1e-5)  # temperatures below it: the best token
NO_LIMIT = tl.constexpr(2**31 - 1)


@triton.jit
def scaled_logits(logits, row, row_stride, token, ok, temperature):
    """Logits of one row after temperature; what is no number is the lowest."""
    at = logits + row.to(tl.int64) * row_stride + token
    x = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    x = tl.div_rn(x, temperature)
    x = tl.where(x == x, x, LOW)  # what `maximum` makes of a NaN is not promised
    return tl.minimum(tl.maximum(x, LOW), HIGH)


@triton.jit
def mass_of(x, best):
    return (tl.exp(x - best) * ONE).to(tl.int64)


@triton.jit
def row_best(chunk_best, row, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    chunk = tl.arange(0, PADDED)
    return tl.max(tl.load(chunk_best + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=LOW), 0)


@triton.jit
def _order(x):
    """float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_order(key):
    """The float32 that `_order` turns into `key`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _goal(top_p, whole):
    """The mass that top-p asks for, of `whole`."""
    return tl.maximum((top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _edges(lower, upper, best, EDGES: tl.constexpr):
    """EDGES values from `upper`, or from the best logit, down to exactly `lower`."""
    edge = tl.arange(0, EDGES)
    top = tl.minimum(upper, best)
    # Written as fma, lest one kernel rounds the product and another does not.
    value = tl.maximum(tl.fma(lower - top, edge.to(tl.float32) * (1 / (EDGES - 1)), top), lower)
    return tl.where(edge == EDGES - 1, lower, value)


@triton.jit
def _range(
    counts, masses, row, best, k, top_p,
    DONE: tl.constexpr, ROUNDS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Where the thresholds of top-k and top-p lie after DONE rounds.

    -> (cut, lower, upper, count, mass, whole): both lie in [lower, upper), `count` tokens of
    `mass` are at or above `upper`, `whole` is the row's mass; if not `cut`, nothing with mass is
    cut and the range means nothing.
    """
    edge = tl.arange(0, EDGES)
    cut = k > 0
    lower = best - 31.0
    upper = best + float("inf")
    count = tl.full([], 0, tl.int64)
    mass = tl.full([], 0, tl.int64)
    whole = tl.full([], 0, tl.int64)
    for done in tl.static_range(DONE):
        at = (row * ROUNDS + done) * EDGES + edge
        n = tl.load(counts + at).to(tl.int64)
        m = tl.load(masses + at)
        if done == 0:
            whole = tl.max(m, 0)
        last = tl.sum((n < k).to(tl.int32), 0)  # k's own bin; EDGES: beyond all tokens with mass
        least = tl.where(last == 0, mass, tl.sum(tl.where(edge == last - 1, m, 0), 0))
        least = tl.where(last == EDGES, whole, least)
        first = tl.minimum(tl.sum((m < _goal(top_p, least)).to(tl.int32), 0), last)
        first = tl.where(top_p < 1.0, first, last)
        last = tl.where(last == EDGES, first, last)
        cut = cut & (last < EDGES)
        values = _edges(lower, upper, best, EDGES)
        if first > 0:
            upper = tl.max(tl.where(edge == first - 1, values, LOW), 0)
            count = tl.sum(tl.where(edge == first - 1, n, 0), 0)
            mass = tl.sum(tl.where(edge == first - 1, m, 0), 0)
        lower = tl.max(tl.where(edge == last, values, LOW), 0)
    return cut, lower, upper, count, mass, whole


@triton.jit
def _parameters(temperature, top_k, top_p, row, VOCAB: tl.constexpr):
    """(temperature, k, top_p, ranked) of a row; `ranked`: it needs a threshold."""
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    k = tl.where((k > 0) & (k < VOCAB), k, NO_LIMIT)
    p = tl.load(top_p + row)
    return t, k, p, (t >= GREEDY) & ((k < NO_LIMIT) | (p < 1.0))


@triton.jit
def narrow(
    logits, row_stride, temperature, top_k, top_p, chunk_best, counts, masses,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    LANES: tl.constexpr, EDGES: tl.constexpr, ROUND: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Add one chunk to the row's counts and masses at or above this round's edges."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    t, k, p, ranked = _parameters(temperature, top_k, top_p, row, VOCAB)
    if ranked:
        best = row_best(chunk_best, row, CHUNKS, PADDED)
        cut, lower, upper, _, _, _ = _range(
            counts, masses, row, best, k, p, ROUND, ROUNDS, EDGES
        )  # fmt: skip
        if cut & (tl.load(chunk_best + row * CHUNKS + chunk) >= lower):
            edges = _edges(lower, upper, best, EDGES)
            n = tl.zeros([EDGES, LANES], tl.int32)
            m = tl.zeros([EDGES, LANES], tl.int64)
            for part in tl.static_range(CHUNK // LANES):
                at = chunk * CHUNK + part * LANES + tl.arange(0, LANES)
                ok = at < VOCAB
                x = scaled_logits(logits, row, row_stride, at, ok, t)
                above = (x[None, :] >= edges[:, None]) & ok[None, :]
                n += above.to(tl.int32)
                m += tl.where(above, mass_of(x, best)[None, :], 0)
            into = (row * ROUNDS + ROUND) * EDGES + tl.arange(0, EDGES)
            tl.atomic_add(counts + into, tl.sum(n, 1), sem="relaxed")
            tl.atomic_add(masses + into, tl.sum(m, 1), sem="relaxed")


@triton.jit
def compact(
    logits, row_stride, temperature, top_k, top_p, chunk_best, counts, masses, listed, candidates,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    EDGES: tl.constexpr, ROUNDS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Append one chunk's logits in the row's range to its list, in any order, while they fit."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    t, k, p, ranked = _parameters(temperature, top_k, top_p, row, VOCAB)
    if ranked:
        best = row_best(chunk_best, row, CHUNKS, PADDED)
        cut, lower, upper, _, _, _ = _range(
            counts, masses, row, best, k, p, ROUNDS, ROUNDS, EDGES
        )  # fmt: skip
        if cut & (tl.load(chunk_best + row * CHUNKS + chunk) >= lower):
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            ok = at < VOCAB
            x = scaled_logits(logits, row, row_stride, at, ok, t)
            inside = (ok & (x >= lower) & (x < upper)).to(tl.int32)
            place = tl.atomic_add(listed + row, tl.sum(inside, 0), sem="relaxed")
            place += tl.cumsum(inside, 0) - 1
            fits = (inside > 0) & (place < CAPACITY)
            tl.store(candidates + row * CAPACITY + place, x, mask=fits)


@triton.jit
def _search(
    logits, row, row_stride, temperature, best, candidates, length, lower, upper,
    lo, hi, count, mass, goal_count, goal_mass,
    VOCAB: tl.constexpr, CAPACITY: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key in [lo, hi) at or above which lie `goal_count` tokens and `goal_mass`.

    `lo` reaches the goals, `hi` does not; `count` and `mass` are those at or above `upper`.
    -> (key, count above it, mass above it)
    """
    way, lane = tl.arange(0, WAYS), tl.arange(0, TILE)
    is_listed = length <= CAPACITY
    num_tokens = tl.where(is_listed, length, VOCAB)
    found_count, found_mass = count, mass
    while hi - lo > 1:
        step = (hi - lo + WAYS - 1) // WAYS
        keys = lo + step * (way + 1)
        bounds = tl.minimum(keys, hi).to(tl.int32)
        n = tl.zeros([WAYS, TILE], tl.int32)
        m = tl.zeros([WAYS, TILE], tl.int64)
        for start in range(0, num_tokens, TILE):
            at = start + lane
            ok = at < num_tokens
            if is_listed:
                x = tl.load(candidates + row * CAPACITY + at, mask=ok, other=LOW)
            else:
                x = scaled_logits(logits, row, row_stride, at, ok, temperature)
            inside = ok & (x >= lower) & (x < upper)
            above = (_order(x)[None, :] >= bounds[:, None]) & inside[None, :]
            n += above.to(tl.int32)
            m += tl.where(above, mass_of(x, best)[None, :], 0)
        total_count = count + tl.sum(n, 1).to(tl.int64)
        total_mass = mass + tl.sum(m, 1)
        reached = (total_count >= goal_count) & (total_mass >= goal_mass)
        passed = tl.sum(reached.to(tl.int32), 0)
        if lo + step * (passed + 1) < hi:
            hi = lo + step * (passed + 1)
            found_count = tl.sum(tl.where(way == passed, total_count, 0), 0)
            found_mass = tl.sum(tl.where(way == passed, total_mass, 0), 0)
        lo = lo + step * passed
    return lo, found_count, found_mass


@triton.jit
def select(
    logits, row_stride, temperature, top_k, top_p, chunk_best, counts, masses, listed, candidates,
    lowest,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, EDGES: tl.constexpr,
    ROUNDS: tl.constexpr, CAPACITY: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The lowest logit that top-k, then top-p leave of one row."""
    row = tl.program_id(0)
    t, k, p, ranked = _parameters(temperature, top_k, top_p, row, VOCAB)
    threshold = tl.full([], LOW, tl.float32)
    if ranked:
        best = row_best(chunk_best, row, CHUNKS, PADDED)
        cut, lower, upper, count, mass, whole = _range(
            counts, masses, row, best, k, p, ROUNDS, ROUNDS, EDGES
        )  # fmt: skip
        if cut:
            length = tl.load(listed + row)
            key = _order(lower).to(tl.int64)
            hi = tl.where(upper > best, _order(best) + 1, _order(upper)).to(tl.int64)
            zero = tl.full([], 0, tl.int64)
            if count + length >= k:
                key, over_count, over_mass = _search(
                    logits, row, row_stride, t, best, candidates, length, lower, upper,
                    key, hi, count, mass, k.to(tl.int64), zero, VOCAB, CAPACITY, WAYS, TILE,
                )  # fmt: skip
                # Of the tokens at the threshold only as many weigh as top-k leaves room for.
                whole = over_mass + (k - over_count) * mass_of(_in_order(key), best)
            if p < 1.0:
                key, over_count, over_mass = _search(
                    logits, row, row_stride, t, best, candidates, length, lower, upper,
                    key, hi, count, mass, zero, _goal(p, whole), VOCAB, CAPACITY, WAYS, TILE,
                )  # fmt: skip
            threshold = _in_order(key)
    tl.store(lowest + row, threshold)
