"""Bytes times 16-bit integers: as right as the bits allow, and blind to batch mates."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.kernels import int8
from mmserve.kernels.int8 import TILE, empty_rows, pack, quantize, quantize_weight

WIDTHS = st.sampled_from([2, 8, 30, 64, 200])
OUTS = st.sampled_from([1, 16, 31, 32, 33, 100])


def matrices(seed: int, rows: int, width: int, out: int) -> tuple[Tensor, Tensor]:
    """x [rows, width] with rows of very different sizes, weight [out, width]."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=random)
    x *= 10.0 ** torch.randint(-6, 7, (rows, 1), generator=random)
    return x, torch.randn(out, width, generator=random)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return int8.linear(x, pack(weight))


def held_rows(x: Tensor, limit: float = 32767) -> tuple[Tensor, Tensor]:
    """Quantise and undo the order of the tiles: the integers [M, K] and the scales [M]."""
    count, width = x.shape
    rows, scales = empty_rows(count, width), np.empty(count, np.float32)
    quantize(x.numpy(), limit, rows, scales)
    pairs = rows.transpose(0, 2, 1).reshape(-1, width // 2)[:count]
    integers = np.ascontiguousarray(pairs).view(np.int16)
    return torch.from_numpy(integers), torch.from_numpy(scales)


def weight_as_held(weight: Tensor) -> Tensor:
    held, scale = quantize_weight(weight)
    return held.double() * scale.double()[:, None]


@given(st.integers(0, 999), st.integers(1, 40), WIDTHS, st.sampled_from([100.0, 32767.0]))
@settings(deadline=None)
def test_a_row_is_held_to_half_a_step_of_its_own_size(
    seed: int, rows: int, width: int, limit: float
) -> None:
    x, _ = matrices(seed, rows, width, 8)
    held, scale = held_rows(x, limit)
    back = scale.double()[:, None] * held.double()
    top = x.abs().amax(1, keepdim=True).double()
    bound = top * (0.5 / limit + 2e-7) + 1e-12  # and the roundings of float32
    assert held.shape == (rows, width) and bool((held.abs().amax(1) == limit).all())
    assert bool(((back - x.double()).abs() <= bound).all())


@given(st.integers(0, 999), WIDTHS)
def test_a_weight_row_is_held_to_half_a_step_of_its_own_size(seed: int, width: int) -> None:
    weight, _ = matrices(seed, 16, width, 8)
    step = weight.abs().amax(1, keepdim=True).double() / 127
    error = (weight_as_held(weight) - weight.double()).abs()
    assert bool((error <= step / 2 * 1.001 + 1e-12).all())


@given(st.integers(0, 999), st.integers(1, 2 * TILE + 3), WIDTHS, OUTS)
@settings(deadline=None)
def test_the_product_with_the_held_weights_is_right_to_fifteen_bits(
    seed: int, rows: int, width: int, out: int
) -> None:
    x, weight = matrices(seed, rows, width, out)
    exact = x.double() @ weight_as_held(weight).t()
    top = x.abs().amax(1, keepdim=True).double()
    sums = weight_as_held(weight).abs().sum(1)
    # Half a step for each activation, and the float32 roundings of the result.
    bound = top / 32767 / 2 * sums * 1.001 + 4e-7 * top * sums
    assert bool(((linear(x, weight).double() - exact).abs() <= bound).all())


def test_a_product_can_be_added_to_what_is_there() -> None:
    x, weight = matrices(1, 9, 64, 40)
    held, before = pack(weight), torch.randn(9, 40)
    rows, scales = empty_rows(9, 64), np.empty(9, np.float32)
    quantize(x.numpy(), held.limit, rows, scales)
    out = before.clone()
    int8.product(rows, scales, held.blocks, held.scale, out.numpy(), True)
    torch.testing.assert_close(out, before + linear(x, weight))


@given(st.integers(0, 999), st.integers(2, 33), WIDTHS, OUTS)
@settings(deadline=None)
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    seed: int, rows: int, width: int, out: int
) -> None:
    x, weight = matrices(seed, rows, width, out)
    together = linear(x, weight)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(linear(x[order], weight), together[order])
    for i in (0, rows // 2, rows - 1):
        assert torch.equal(linear(x[i : i + 1], weight)[0], together[i])


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    x, weight = matrices(3, 11, 64, 200)
    expected = linear(x, weight)
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        assert torch.equal(linear(x, weight), expected)
    finally:
        numba.set_num_threads(before)


def test_rows_of_zeros_and_single_spikes_are_exact() -> None:
    x = torch.zeros(3, 16)
    x[1, 5], x[2, 0] = -3.0, 1e30
    out = linear(x, torch.eye(16)[:8] * 127)
    assert torch.equal(out[0], torch.zeros(8))
    torch.testing.assert_close(out[1], x[1, :8] * 127)
    torch.testing.assert_close(out[2], x[2, :8] * 127)


@pytest.mark.parametrize("width", [2, 600, 65_536])
def test_the_largest_sums_do_not_overflow(width: int) -> None:
    x, weight = torch.ones(1, width), torch.ones(8, width)
    torch.testing.assert_close(linear(x, weight), torch.full((1, 8), float(width)))
    torch.testing.assert_close(linear(x, -weight), torch.full((1, 8), -float(width)))
