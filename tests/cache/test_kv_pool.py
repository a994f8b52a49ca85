"""The pools' tensors: budgets in bytes, and two views of the same memory."""

from __future__ import annotations

import numpy as np
import torch

from mmserve.cache.kv_pool import KVShape, TextKVPool, VisionKVPool

SHAPE = KVShape(3, 2, 8, 16, torch.float32, torch.device("cpu"))
PAGE = 3 * 2 * 2 * 8 * 16 * 4  # layers, K and V, heads, dim, tokens, bytes


def test_a_budget_buys_whole_pages_and_is_not_exceeded() -> None:
    assert SHAPE.page_bytes == PAGE
    for budget, pages in ((PAGE, 1), (2 * PAGE - 1, 1), (2 * PAGE, 2), (10 * PAGE + 5, 10)):
        text, vision = TextKVPool(SHAPE, budget), VisionKVPool(SHAPE, budget)
        assert text.pages.num_pages == vision.index.num_pages == pages
        assert text.tensor.nbytes == vision.tensor.nbytes == pages * PAGE <= budget


def test_layers_and_arrays_are_views_of_the_pool() -> None:
    pool = TextKVPool(SHAPE, 4 * PAGE)
    keys, values = pool.layer(2)[:2]
    assert keys.shape == values.shape == (2, 4, 16, 8)
    keys[1, 3, 5] = 7
    values[0, 1, 0] = 9
    flat_keys, flat_values = pool.arrays[2]
    assert flat_keys.shape == (2, 64, 8) and flat_keys.flags.c_contiguous
    assert np.all(flat_keys[1, 3 * 16 + 5] == 7) and np.all(flat_values[0, 16] == 9)
    flat_keys[0, 0] = 3
    assert bool((pool.tensor[2, 0, 0, 0, 0] == 3).all())
    assert float(pool.tensor[:2].abs().sum()) == 0
