"""The 15-bit product: close to the real one by a bound, and blind to batch mates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.kernels.int8 import linear, quantize_rows, quantize_weight, supported

pytestmark = pytest.mark.skipif(not supported(), reason="this CPU has no byte dot products")

# torch's integer product wants multiples of 8.
WIDTHS = st.sampled_from([8, 16, 24, 64, 200])


def matrices(seed: int, rows: int, width: int, out: int) -> tuple[Tensor, Tensor]:
    """x [rows, width] with rows of very different sizes, weight [out, width]."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=random)
    x *= 10.0 ** torch.randint(-6, 7, (rows, 1), generator=random)
    return x, torch.randn(out, width, generator=random)


def weight_as_held(weight: Tensor) -> Tensor:
    held, scale = quantize_weight(weight)
    return held.t().double() * scale.double()[:, None]


@given(st.integers(0, 999), st.integers(1, 40), WIDTHS)
def test_a_row_is_held_to_half_a_step_of_its_own_size(seed: int, rows: int, width: int) -> None:
    x, _ = matrices(seed, rows, width, 8)
    held, scale = quantize_rows(x)
    high, low = held.double().chunk(2)
    back = scale.double() * (high + low / 254)
    top = x.abs().amax(1, keepdim=True).double()
    bound = top * (1 / 127 / 508 + 2e-7) + 1e-12  # and the roundings of float32
    assert held.dtype == torch.int8 and held.shape == (2 * rows, width)
    assert bool(((back - x.double()).abs() <= bound).all())


@given(st.integers(0, 999), WIDTHS)
def test_a_weight_row_is_held_to_half_a_step_of_its_own_size(seed: int, width: int) -> None:
    weight, _ = matrices(seed, 16, width, 8)
    step = weight.abs().amax(1, keepdim=True).double() / 127
    error = (weight_as_held(weight) - weight.double()).abs()
    assert bool((error <= step / 2 * 1.001 + 1e-12).all())


@given(st.integers(0, 999), st.integers(1, 20), WIDTHS, WIDTHS)
@settings(deadline=None)
def test_the_product_with_the_held_weights_is_right_to_fifteen_bits(
    seed: int, rows: int, width: int, out: int
) -> None:
    x, weight = matrices(seed, rows, width, out)
    exact = x.double() @ weight_as_held(weight).t()
    top = x.abs().amax(1, keepdim=True).double()
    sums = weight_as_held(weight).abs().sum(1)
    # Half a step for each activation, and the float32 roundings of the result.
    bound = top / 127 / 508 * sums * 1.001 + 4e-7 * top * sums
    got = linear(x, *quantize_weight(weight)).double()
    assert bool(((got - exact).abs() <= bound).all())


def test_the_low_half_matters() -> None:
    """Plain 8-bit activations would miss the bound of fifteen bits by far."""
    x, weight = matrices(1, 4, 200, 64)
    exact = x.double() @ weight_as_held(weight).t()
    held, scale = quantize_rows(x)
    coarse = scale.double() * (held[:4].double() @ weight_as_held(weight).t())
    fine = linear(x, *quantize_weight(weight)).double()
    assert float(((fine - exact) / (coarse - exact)).abs().median()) < 1 / 50


@given(st.integers(0, 999), st.integers(2, 33), WIDTHS, WIDTHS)
@settings(deadline=None)
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    seed: int, rows: int, width: int, out: int
) -> None:
    x, weight = matrices(seed, rows, width, out)
    held = quantize_weight(weight)
    together = linear(x, *held)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(linear(x[order], *held), together[order])
    for i in (0, rows // 2, rows - 1):
        assert torch.equal(linear(x[i : i + 1], *held)[0], together[i])


def test_rows_of_zeros_and_single_spikes_are_exact() -> None:
    x = torch.zeros(3, 16)
    x[1, 5], x[2, 0] = -3.0, 1e30
    weight = torch.eye(16)[:8] * 127
    out = linear(x, *quantize_weight(weight))
    assert torch.equal(out[0], torch.zeros(8))
    torch.testing.assert_close(out[1], x[1, :8] * 127)
    torch.testing.assert_close(out[2], x[2, :8] * 127)


def test_the_largest_sums_do_not_overflow() -> None:
    x, weight = torch.ones(1, 65_536), torch.ones(8, 65_536)
    torch.testing.assert_close(linear(x, *quantize_weight(weight)), torch.full((1, 8), 65_536.0))
