"""The arithmetic behind the bounds, against a model counted by hand."""

from __future__ import annotations

import pytest
import torch

from mmserve.bench.ceilings import Ceilings, Probe, measure_ceilings, median_seconds
from mmserve.bench.shapes import build_shape
from mmserve.bench.sizes import Sizes
from tests.bench.tiny import SHAPE

CPU = torch.device("cpu")
# q, k, v, o; gate, up, down; two norms; two layers. The head, and the last norm is not counted.
LAYERS = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96 + 2 * 64)


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    return Sizes.of(build_shape(SHAPE, CPU, torch.float32))


def test_weights_are_all_matrices_but_the_embedding(sizes: Sizes) -> None:
    assert sizes.layer_weights == LAYERS
    assert sizes.weight_bytes == 4 * (LAYERS + 300 * 64)
    assert sizes.attention_width == 2 * 4 * 16


def test_a_prefill_costs_two_operations_a_weight_and_causal_attention(sizes: Sizes) -> None:
    assert sizes.prefill_flops(10) == 2 * LAYERS * 10 + 2 * 128 * 100


def test_an_image_costs_at_least_its_tower_s_products(sizes: Sizes) -> None:
    patches, layer = 16, 4 * 32 * 32 + 2 * 32 * 48
    assert 2 * patches * 2 * layer < sizes.image_flops < 10 * 2 * patches * 2 * layer


def test_bounds_follow_from_the_ceilings(sizes: Sizes) -> None:
    ceilings = Ceilings(bytes_per_s=1e6, flops_per_s=1e9)
    assert sizes.step_seconds(5e5, ceilings) == (sizes.weight_bytes + 5e5) / 1e6
    one = sizes.first_token_seconds(1, ceilings) - sizes.first_token_seconds(0, ceilings)
    assert one == pytest.approx((sizes.image_flops + 2 * LAYERS * 4) / 1e9)


def test_ceilings_are_positive_rates_of_the_named_sizes() -> None:
    ceilings = measure_ceilings(CPU, torch.float32, Probe(1 << 20, 64, 3))
    assert ceilings.bytes_per_s > 1e6 and ceilings.flops_per_s > 1e6


def test_a_median_counts_every_call_but_the_first_ones() -> None:
    calls: list[int] = []
    assert median_seconds(lambda: calls.append(1), CPU, repeats=5, warm_up=2) >= 0
    assert len(calls) == 7
