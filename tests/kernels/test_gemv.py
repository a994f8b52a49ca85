"""One row's product with its fused neighbours equals the plain composition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels.fused import Gate
from mmserve.kernels.gemv import gemv

GATES: dict[Gate, Any] = {
    "silu": functional.silu,
    "gelu": partial(functional.gelu, approximate="tanh"),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def randn(*size: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(size))
    return (torch.randn(size, generator=random) * 0.3).to(DEVICE, dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if out.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "width"), [(1, 16), (2, 1), (33, 80), (40, 2048), (7, 3000)])
def test_the_product_with_norm_bias_and_residual(
    num_out: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = randn(1, width, dtype=dtype), randn(num_out, width, dtype=dtype)
    gain, bias, before = (randn(n, dtype=dtype) for n in (width, num_out, num_out))
    wide, gained = x.double(), gain.double()
    plain = functional.linear(wide, weight.double())
    normed = functional.linear(functional.rms_norm(wide, (width,), gained, 1e-5), weight.double())

    out = torch.full((1, num_out), torch.nan, dtype=dtype, device=DEVICE)
    gemv(x, weight, out)
    assert_close(out, plain)
    gemv(x, weight, out, norm=(gain, 1e-5), bias=bias)
    assert_close(out, normed + bias.double())
    out = before[None].clone()
    gemv(x, weight, out, add=True)
    assert_close(out, plain + before.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("num_out", "width"), [(1, 16), (3, 1), (20, 80)])
def test_the_gated_product_with_norm(
    num_out: int, width: int, gate: Gate, dtype: torch.dtype
) -> None:
    x, weight = randn(1, width, dtype=dtype), randn(2 * num_out, width, dtype=dtype)
    gain = randn(width, dtype=torch.float32)
    normed = functional.rms_norm(x.double(), (width,), gain.double(), 1e-5)
    opens, up = functional.linear(normed, weight.double()).chunk(2, -1)
    out = torch.full((1, num_out), torch.nan, dtype=dtype, device=DEVICE)
    gemv(x, weight, out, norm=(gain, 1e-5), gated=True, gate=gate)
    assert_close(out, GATES[gate](opens) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("plain", "behind", "width"), [(1, 1, 16), (5, 20, 80), (3, 4, 4100)])
def test_outputs_behind_the_plain_ones_go_through_the_gate(
    plain: int, behind: int, width: int, dtype: torch.dtype
) -> None:
    """Of a row that is layer-normed first."""
    x = randn(1, width, dtype=dtype) + 3.0
    weight, gain = randn(plain + behind, width, dtype=dtype), randn(width, dtype=dtype)
    bias = randn(plain + behind, dtype=torch.float32)
    normed = functional.layer_norm(x.double(), (width,), gain.double(), None, 1e-5)
    expected = functional.linear(normed, weight.double(), bias.double())
    out = torch.full((1, plain), torch.nan, dtype=dtype, device=DEVICE)
    opened = torch.full((1, behind + 2), torch.nan, dtype=dtype, device=DEVICE)
    norm: dict[str, Any] = {"norm": (gain, 1e-5), "centred": weight.float() @ gain.float()}
    gemv(x, weight, out, bias=bias, opened=opened[:, 1:-1], gate="gelu", **norm)
    assert_close(out, expected[:, :plain])
    assert_close(opened[:, 1:-1], GATES["gelu"](expected[:, plain:]))
    assert bool(opened[:, [0, -1]].isnan().all())
