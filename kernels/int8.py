"""Products of 8-bit weights with 16-bit activations on CPUs, compiled by Numba.

Owns the number format and the product. A weight row n is s_n times bytes, an activation row m is
s_m times 16-bit integers; the product sums them exactly in 32 bits, so a row's result does not
depend on its batch mates or on how the work is split, and only then scales. Activation integers
stop at `Packed.limit`, at which the largest possible sum of the matrix still fits.

Activations stand as the product reads them: `rows` int32 [ceil(M / TILE), K / 2, TILE], each
element the 16-bit integers of one row at 2 k and 2 k + 1 (`empty_rows`).

At small batches reading the weights is the cost, so they stay bytes in memory and are widened in
registers: one vector instruction (pmaddwd, with VNNI pdpwssd) multiplies pairs along K for 16
outputs at once. LLVM makes it from plain vector code, so CPUs without it run the same source.

Measured against float32 weights and activations on SmolLM2-135M (KL per token): 8-bit activations
0.050, 15 or more bits 0.005, which is what rounding the weights costs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from torch import Tensor

Floats = npt.NDArray[np.float32]
Int16s = npt.NDArray[np.int16]
Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.int8]

# Reassociation lets LLVM keep several partial sums; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_F = TypeVar("_F", bound=Callable[..., Any])

# Numba's own thread pool takes 100 us to begin a loop, OpenMP's 2.
_THREADS = importlib.util.find_spec("numba.np.ufunc.omppool") is not None

LANES = 16  # 32-bit sums in one vector
BLOCK = 2 * LANES  # outputs whose weights lie together
AHEAD = 32  # pairs of K: how far in front of the product weights are fetched
# Rows that share one reading of the weights; their sums have to fit into the registers.
TILE = 8 if binding.get_host_cpu_features().get("avx512f") else 2


def jit(function: _F) -> _F:
    """Compile at the first call, or take it from the cache on disk beside its file."""
    compiled: _F = njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")(function)
    return compiled


def threaded(function: _F) -> _F:
    """`jit` whose `prange` loops use numba.get_num_threads() threads."""
    options: Any = {"cache": True, "nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    compiled: _F = njit(parallel=_THREADS, **options)(function)
    return compiled


class Packed(NamedTuple):
    """A weight matrix [N, K] as the product reads it.

    `blocks` int8 [ceil(N / 32), K / 2, 32, 2] (missing outputs are zeros), `scale` float32 [N],
    `limit`: the largest activation integer.
    """

    blocks: Bytes
    scale: Floats
    limit: float


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] float -> (int8 [N, K], float32 scales [N])."""
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    rounded = (weight / scale[:, None]).round().clamp_(-127, 127)
    return rounded.to(torch.int8), scale.float()


def pack(weight: Tensor) -> Packed:
    """weight [N, K] float, K even."""
    held, scale = quantize_weight(weight)
    num_out, width = held.shape
    assert width % 2 == 0, "the product multiplies pairs"
    padded = torch.zeros(-(-num_out // BLOCK) * BLOCK, width, dtype=torch.int8)
    padded[:num_out] = held
    blocks = padded.view(-1, BLOCK, width // 2, 2).transpose(1, 2).contiguous()
    largest = int(held.abs().sum(1, dtype=torch.long).max())
    return Packed(blocks.numpy(), scale.numpy(), float(min(32767, (2**31 - 1) // max(largest, 1))))


def empty_rows(count: int, width: int) -> Int32s:
    """Room for `count` activation rows of `width`."""
    return np.empty((-(-count // TILE), width // 2, TILE), np.int32)


def linear(x: Tensor, weight: Packed) -> Tensor:
    """x [M, K] float32 -> [M, N] float32."""
    count, width = x.shape
    rows, scales = empty_rows(count, width), np.empty(count, np.float32)
    out = torch.empty(count, len(weight.scale))
    quantize(x.contiguous().numpy(), weight.limit, rows, scales)
    product(rows, scales, weight.blocks, weight.scale, out.numpy(), False)
    return out


@jit
def quantize_row(x: Floats, limit: float, rows: Int32s, m: int) -> np.float32:
    """x [K] -> row m of rows; returns its scale."""
    # Sizes compare as their bits do, and only integers compare in vectors.
    bits, peak = x.view(np.int32), np.zeros(1, np.int32)
    most = np.int32(0)
    for k in range(x.shape[0]):
        most = max(most, bits[k] & np.int32(0x7FFFFFFF))
    peak[0] = most
    top = max(peak.view(np.float32)[0], np.float32(1e-12))
    inverse = np.float32(limit) / top
    row = np.empty(x.shape[0], np.int16)
    for k in range(x.shape[0]):
        row[k] = np.int16(np.rint(x[k] * inverse))
    pairs = row.view(np.int32)
    for k in range(pairs.shape[0]):
        rows[m // TILE, k, m % TILE] = pairs[k]
    scale: np.float32 = top / np.float32(limit)
    return scale


@threaded
def quantize(x: Floats, limit: float, rows: Int32s, scales: Floats) -> None:
    """x [M, K] -> rows, scales [M]."""
    for tile in prange(rows.shape[0]):
        for m in range(tile * TILE, min((tile + 1) * TILE, x.shape[0])):
            scales[m] = quantize_row(x[m], limit, rows, m)


@threaded
def product(
    rows: Int32s, scales: Floats, blocks: Bytes, weight_scale: Floats, out: Floats, add: bool
) -> None:
    """out [M, N] = (or +=, if `add`) rows with scales [M] times a `Packed` weight."""
    count, num_out = out.shape
    for block in prange(blocks.shape[0]):
        sums = np.empty((TILE, BLOCK), np.int32)
        first = block * BLOCK
        width = min(BLOCK, num_out - first)
        for tile in range(rows.shape[0]):
            size = min(TILE, count - tile * TILE)
            _sum_tile(rows, tile, size, blocks, block, sums)
            for r in range(size):
                m = tile * TILE + r
                for n in range(width):
                    factor = weight_scale[first + n] * scales[m]
                    value = np.float32(sums[r, n]) * factor
                    out[m, first + n] = value + (out[m, first + n] if add else np.float32(0))


class _TileWriter:
    """Writes `_sum_tile` as LLVM code: for each possible row count a loop with all sums in
    registers, which no compiler arranges by itself."""

    int8, int16, int32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
    int64 = ir.IntType(64)
    sums = ir.VectorType(int32, LANES)
    wide = ir.VectorType(int32, 2 * LANES)

    def __init__(self, builder: Any, pairs: Any) -> None:
        self.builder, self.pairs = builder, pairs

    def at(self, pointer: Any, *offsets: Any) -> Any:
        """`pointer` plus a sum of offsets, numbers or values."""
        total = ir.Constant(self.int64, 0)
        for offset in offsets:
            if isinstance(offset, int):
                offset = ir.Constant(self.int64, offset)
            total = self.builder.add(total, offset)
        return self.builder.gep(pointer, [total])

    def write(self, count: int, rows: Any, weights: Any, out: Any) -> None:
        """For `count` rows. rows: pointer to int32 pairs of activations; weights: to vectors of
        16 pairs of bytes; out: to vectors of sums."""
        builder = self.builder
        halves = range(BLOCK // LANES)
        sums = [[cgutils.alloca_once(builder, self.sums) for _ in halves] for _ in range(count)]
        for row in sums:
            for cell in row:
                builder.store(ir.Constant(self.sums, None), cell)
        with cgutils.for_range(builder, self.pairs) as loop:
            first = builder.mul(loop.index, ir.Constant(self.int64, len(halves)))
            self._prefetch(self.at(weights, first, AHEAD * len(halves)))
            held = [
                builder.sext(builder.load(self.at(weights, first, h), align=1), self.wide)
                for h in halves
            ]
            pairs = builder.mul(loop.index, ir.Constant(self.int64, TILE))
            for r, cells in enumerate(sums):
                pair = self._broadcast(builder.load(self.at(rows, pairs, r), align=4))
                for weight, cell in zip(held, cells, strict=True):
                    builder.store(builder.add(builder.load(cell), self._dot(pair, weight)), cell)
        for r, cells in enumerate(sums):
            for h, cell in zip(halves, cells, strict=True):
                builder.store(builder.load(cell), self.at(out, r * len(halves) + h), align=4)

    def _prefetch(self, pointer: Any) -> None:
        byte = self.int8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, self.int32, self.int32, self.int32])
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        read, keep, data = (ir.Constant(self.int32, n) for n in (0, 3, 1))
        self.builder.call(function, [self.builder.bitcast(pointer, byte), read, keep, data])

    def _broadcast(self, pair: Any) -> Any:
        """Two int16 in one int32 -> the pair in all lanes, widened."""
        empty = ir.Constant(self.sums, ir.Undefined)
        one = self.builder.insert_element(empty, pair, ir.Constant(self.int32, 0))
        lanes = self.builder.shuffle_vector(one, empty, ir.Constant(self.sums, [0] * LANES))
        narrow = self.builder.bitcast(lanes, ir.VectorType(self.int16, 2 * LANES))
        return self.builder.sext(narrow, self.wide)

    def _dot(self, a: Any, b: Any) -> Any:
        """Sums of the products of neighbours, the form in which LLVM finds pmaddwd."""
        both = self.builder.mul(a, b)
        empty = ir.Constant(self.wide, ir.Undefined)
        even, odd = (
            self.builder.shuffle_vector(
                both, empty, ir.Constant(self.sums, list(range(start, 2 * LANES, 2)))
            )
            for start in (0, 1)
        )
        return self.builder.add(even, odd)


@intrinsic  # type: ignore[untyped-decorator]
def _sum_tile(
    typing: Any, rows: Any, tile: Any, count: Any, blocks: Any, block: Any, out: Any
) -> Any:
    """out [TILE, 32] int32 = the first `count` rows of one tile times one block of weights."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        arrays = [make_array(kinds[i])(context, builder, arguments[i]) for i in (0, 3, 5)]
        x, weights, sums = arrays
        pairs = cgutils.unpack_tuple(builder, weights.shape)[1]
        writer = _TileWriter(builder, pairs)
        halves = ir.VectorType(writer.int8, 2 * LANES).as_pointer()
        row = builder.mul(pairs, builder.mul(arguments[1], ir.Constant(writer.int64, TILE)))
        vector = builder.mul(pairs, builder.mul(arguments[4], ir.Constant(writer.int64, 2)))
        pointers = (
            writer.at(x.data, row),
            writer.at(builder.bitcast(weights.data, halves), vector),
            builder.bitcast(sums.data, writer.sums.as_pointer()),
        )
        after = builder.append_basic_block("summed")
        cases = [builder.append_basic_block(f"rows{n}") for n in range(1, TILE + 1)]
        switch = builder.switch(arguments[2], after)
        for n, case in enumerate(cases, 1):
            switch.add_case(ir.Constant(writer.int64, n), case)
            builder.position_at_end(case)
            writer.write(n, *pointers)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(rows, types.int64, types.int64, blocks, types.int64, out), generate
