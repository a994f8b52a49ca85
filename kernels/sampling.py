"""One token per row of logits on a GPU: temperature, top-k, top-p, min-p and the draw, in Triton.

Owns the launches and the draw; what they compute is mmserve.kernels.plain's `sample`. Knows nothing
of requests, penalties or log-probabilities. All launches have fixed shapes, allocate nothing and
read nothing back, so they can be captured. A row that needs no search skips it, and a row's token
does not depend on its neighbours.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmserve.kernels import threshold
from mmserve.kernels.threshold import GREEDY, LOW, mass_of, row_best, scaled_logits


class Workspace(NamedTuple):
    """What passes from launch to launch, for up to B rows of S chunks; reused by every call.

    best float32 and token int32 [B, S]: a chunk's largest scaled logit and its lowest id; counts
    int32 and masses int64 [B, ROUNDS, EDGES]: at or above each edge; listed int32 [B] and
    candidates float32 [B, CAPACITY]; lowest float32 [B]: what top-k and top-p leave; chunk_mass
    int64 [B, S]: what all filters leave.
    """

    best: Tensor
    token: Tensor
    counts: Tensor
    masses: Tensor
    listed: Tensor
    candidates: Tensor
    lowest: Tensor
    chunk_mass: Tensor


@triton.jit
def _chunks(
    logits, row_stride, temperature, best, token, counts, masses, listed,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TOTALS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Best of one chunk. Also clears the row's sums, unless PLAIN: temperature 1, no sampling."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    t = tl.full([], 1.0, tl.float32)
    if not PLAIN:
        given = tl.load(temperature + row)
        t = tl.where(given < GREEDY, 1.0, given)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = at < VOCAB
    x = tl.where(ok, scaled_logits(logits, row, row_stride, at, ok, t), LOW)
    most = tl.max(x, 0)
    tl.store(best + row * CHUNKS + chunk, most)
    tl.store(token + row * CHUNKS + chunk, tl.min(tl.where(ok & (x == most), at, VOCAB), 0))
    if not PLAIN:
        if chunk == 0:
            total = tl.arange(0, TOTALS)
            tl.store(counts + row * TOTALS + total, tl.zeros([TOTALS], tl.int32))
            tl.store(masses + row * TOTALS + total, tl.zeros([TOTALS], tl.int64))
            tl.store(listed + row, 0)


@triton.jit
def _kept_mass(
    logits, row, row_stride, chunk, temperature, best, lowest, min_p,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Masses [CHUNK] of one chunk after all filters."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = at < VOCAB
    x = scaled_logits(logits, row, row_stride, at, ok, temperature)
    # A GPU's exp is 1 a few steps below 0, too; a min_p of 1 leaves the best only.
    lowest = tl.where(min_p < 1, lowest, best)
    kept = ok & (x >= lowest) & (tl.exp(x - best) >= min_p)
    return tl.where(kept, mass_of(x, best), 0)


@triton.jit
def _weigh(
    logits, row_stride, temperature, min_p, chunk_best, lowest, chunk_mass,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Mass of one chunk after all filters."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    t = tl.load(temperature + row)
    if t >= GREEDY:
        best = row_best(chunk_best, row, CHUNKS, PADDED)
        mass = _kept_mass(
            logits, row, row_stride, chunk, t, best, tl.load(lowest + row), tl.load(min_p + row),
            VOCAB, CHUNK,
        )  # fmt: skip
        tl.store(chunk_mass + row * CHUNKS + chunk, tl.sum(mass, 0))


@triton.jit
def _draw(
    logits, row_stride, temperature, min_p, uniform, chunk_best, chunk_token, lowest, chunk_mass,
    out,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """The token of one row; of a greedy one, and if PLAIN, the best."""
    row = tl.program_id(0)
    chunks = tl.arange(0, PADDED)
    real = chunks < CHUNKS
    bests = tl.load(chunk_best + row * CHUNKS + chunks, mask=real, other=LOW)
    best = tl.max(bests, 0)
    tokens = tl.load(chunk_token + row * CHUNKS + chunks, mask=real, other=VOCAB)
    token = tl.min(tl.where(bests == best, tokens, VOCAB), 0)
    if not PLAIN:
        t = tl.load(temperature + row)
        if t >= GREEDY:
            mass = tl.load(chunk_mass + row * CHUNKS + chunks, mask=real, other=0)
            total = tl.sum(mass, 0)
            at = (tl.load(uniform + row).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            at = tl.minimum(at, total - 1)
            through = tl.cumsum(mass, 0)
            chunk = tl.sum((through <= at).to(tl.int32), 0)
            at -= tl.sum(tl.where(chunks < chunk, mass, 0), 0)
            own = _kept_mass(
                logits, row, row_stride, chunk, t, best, tl.load(lowest + row),
                tl.load(min_p + row), VOCAB, CHUNK,
            )  # fmt: skip
            token = chunk * CHUNK + tl.sum((tl.cumsum(own, 0) <= at).to(tl.int32), 0)
    tl.store(out + row, token.to(tl.int64))


def workspace(batch: int, vocab: int, device: torch.device) -> Workspace:
    """Room for up to `batch` rows of `vocab` tokens."""
    assert vocab <= threshold.MAX_VOCAB, "masses of a longer row could overflow"
    chunks = triton.cdiv(vocab, threshold.CHUNK)

    def room(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, *size, dtype=dtype, device=device)

    return Workspace(
        best=room(chunks, dtype=torch.float32),
        token=room(chunks, dtype=torch.int32),
        counts=room(threshold.ROUNDS, threshold.EDGES, dtype=torch.int32),
        masses=room(threshold.ROUNDS, threshold.EDGES, dtype=torch.int64),
        listed=room(dtype=torch.int32),
        candidates=room(threshold.CAPACITY, dtype=torch.float32),
        lowest=room(dtype=torch.float32),
        chunk_mass=room(chunks, dtype=torch.int64),
    )


def argmax(logits: Tensor, out: Tensor, work: Workspace) -> None:
    """The best token of each row, the lowest id among equals: two launches.

    logits [B, V] float32 or bf16, rows contiguous; out [B] int64.
    """
    batch, vocab = logits.shape
    chunks = work.best.shape[1]
    _chunks[(chunks, batch)](
        logits, logits.stride(0), logits, work.best, work.token, work.counts, work.masses,
        work.listed, vocab, chunks, threshold.CHUNK, work.counts[0].numel(), PLAIN=True,
    )  # fmt: skip
    _draw[(batch,)](
        logits, logits.stride(0), logits, logits, logits, work.best, work.token, work.lowest,
        work.chunk_mass, out, vocab, chunks, triton.next_power_of_2(chunks), threshold.CHUNK,
        PLAIN=True,
    )  # fmt: skip


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    out: Tensor,
    work: Workspace,
) -> None:
    """One token of each row into out [B] int64; rows with a temperature below 1e-5 take the best.

    logits [B, V] float32 or bf16, rows contiguous; temperature, top_p, min_p and uniform (in
    [0, 1)) [B] float32, top_k [B] int32 (0: off); work: from `workspace` with this V. Masses are
    rounded to 2^-44 of the best one's and exp to about 2e-6 of itself: the token is that of exact
    arithmetic unless top_p or `uniform` lies within 4e-6 of a sum of probabilities, or a
    probability within 4e-6 of itself of min_p times the best one.
    """
    batch, vocab = logits.shape
    chunks = work.best.shape[1]
    assert chunks == triton.cdiv(vocab, threshold.CHUNK) and batch <= len(work.best)
    row, grid = logits.stride(0), (chunks, batch)
    sizes = (vocab, chunks, triton.next_power_of_2(chunks))
    size, edges, rounds = threshold.CHUNK, threshold.EDGES, threshold.ROUNDS
    _chunks[grid](
        logits, row, temperature, work.best, work.token, work.counts, work.masses, work.listed,
        vocab, chunks, size, rounds * edges, PLAIN=False,
    )  # fmt: skip
    ranks = (logits, row, temperature, top_k, top_p, work.best, work.counts, work.masses)
    for done in range(rounds):
        threshold.narrow[grid](
            *ranks, *sizes, size, threshold.LANES, edges, done, rounds, num_warps=8
        )
    found = (*ranks, work.listed, work.candidates)
    capacity = threshold.CAPACITY
    threshold.compact[grid](*found, *sizes, size, edges, rounds, capacity)
    threshold.select[(batch,)](
        *found, work.lowest, *sizes, edges, rounds, capacity, threshold.WAYS, threshold.TILE,
        num_warps=8,
    )  # fmt: skip
    kept = (work.lowest, work.chunk_mass)
    _weigh[grid](logits, row, temperature, min_p, work.best, *kept, *sizes, size)
    _draw[(batch,)](
        logits, row, temperature, min_p, uniform, work.best, work.token, *kept, out, *sizes, size,
        PLAIN=False,
    )  # fmt: skip
