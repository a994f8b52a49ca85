"""What the fused kernels store in formats that are not plain is what the formats' plain statement
stores: on a GPU natively, else in Triton's interpreter."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels import fused, packed_pages, plain
from mmserve.kernels.kv_formats import FORMATS, PLAIN, KVFormat, Pages
from mmserve.kernels.reference import NOWHERE, read_pages, rope_table, vision_slot, write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BYTES = [kind for kind in FORMATS.values() if kind.bits == 8]
GROUPS = [kind for kind in FORMATS.values() if kind.whole_pages]
SLOTS = [0, 5, 17, NOWHERE, vision_slot(0), vision_slot(7), vision_slot(33), NOWHERE, 16]


def name(kind: KVFormat) -> str:
    return kind.name


def pool(kind: KVFormat, dim: int, page: int = 16) -> Pages:
    """Three pages of two heads, in which nothing is stored."""
    if kind.plain:
        return Pages(*torch.zeros(2, 2, 3, page, dim, device=DEVICE))
    size = (2, 2, 3, kind.tile_bytes(page, dim))
    k, v = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    return Pages(k, v, kind, page, dim)


def read(pages: Pages) -> Tensor:
    """All that stands there, K and V."""
    return torch.stack(read_pages(pages, torch.arange(3, device=DEVICE)[None])).double()


def assert_alike(actual: Pages, expected: Pages) -> None:
    """But for levels that rounding moves by one where the last bits of what is stored differ."""
    a, b = read(actual), read(expected)
    assert float(b.norm()) > 0
    assert float((a - b).norm() / b.norm()) < 1e-2
    assert float((~a.isclose(b, rtol=1e-4, atol=1e-6)).double().mean()) < 1e-2


@pytest.mark.parametrize("kinds", [(a, b) for a in (PLAIN, *BYTES) for b in (PLAIN, BYTES[-1])])
@pytest.mark.parametrize(("dim", "rotary"), [(64, None), (80, 32), (128, None)])
def test_rotated_tokens(kinds: tuple[KVFormat, KVFormat], dim: int, rotary: int | None) -> None:
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(len(SLOTS), 8 * dim, generator=generator).to(DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    positions = torch.arange(9, device=DEVICE) * 5
    turns = fused.Turns.by_table(rope_table(50, dim, 10_000.0).to(DEVICE), positions)
    gains = torch.randn(2, dim, generator=generator).to(DEVICE)
    norm = fused.HeadNorm(gains[0], gains[1], 1e-6)
    found = []
    for module in (fused, plain):
        pools = [pool(kind, dim) for kind in kinds]
        q = torch.zeros(len(SLOTS), 4, dim, device=DEVICE)
        module.rotate_store(qkv, turns, slots, q, *pools, norm, rotary)
        found.append(pools)
    for actual, expected in zip(*found, strict=True):
        assert_alike(actual, expected)


@pytest.mark.parametrize("kind", BYTES, ids=name)
def test_tokens_stored_as_they_are_have_the_same_bytes(kind: KVFormat) -> None:
    k, v = torch.randn(2, len(SLOTS), 2, 80, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    k[1], v[2] = 0.0, 1e-30
    k[4] *= 1000.0

    def stored(module: ModuleType) -> list[Pages]:
        pools = [pool(kind, 80), pool(kind, 80)]
        module.store(k, v, torch.tensor(SLOTS, device=DEVICE), *pools)
        return pools

    for actual, expected in zip(stored(fused), stored(plain), strict=True):
        assert torch.equal(actual.k, expected.k) and torch.equal(actual.v, expected.v)


@pytest.mark.parametrize("kind", GROUPS, ids=name)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_pages_are_stored_whole(kind: KVFormat, dim: int) -> None:
    """A full page, one of few tokens and one of a single token; text between is left alone."""
    slots = [vision_slot(s) for s in (*range(64, 128), 0, 1, 2)] + [5, NOWHERE, vision_slot(128)]
    generator = torch.Generator().manual_seed(dim)
    k, v = torch.randn(2, len(slots), 2, dim, generator=generator).to(DEVICE)
    actual, expected = pool(kind, dim, 64), pool(kind, dim, 64)
    packed_pages.store_pages(k, v, torch.tensor(slots, device=DEVICE), actual)
    seen = torch.tensor(slots, device=DEVICE) < NOWHERE
    write_kv(expected, vision_slot(torch.tensor(slots, device=DEVICE)[seen]), k[seen], v[seen])
    assert_alike(actual, expected)


@pytest.mark.parametrize("kind", [FORMATS["int4"], FORMATS["int2_outliers"]], ids=name)
def test_pages_of_rotated_keys_and_bytes_of_text(kind: KVFormat) -> None:
    dim, slots = 64, [vision_slot(s) for s in range(64, 84)] + [3, NOWHERE, 40]
    count = len(slots)
    qkv = torch.randn(count, 8 * dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    positions = torch.arange(count, device=DEVICE)
    turns = fused.Turns.by_table(rope_table(50, dim, 10_000.0).to(DEVICE), positions)
    found = []
    for module in (plain, fused):
        pools = pool(BYTES[-1], dim), pool(kind, dim, 64)
        q = torch.zeros(count, 4, dim, device=DEVICE)
        at = torch.tensor(slots, device=DEVICE)
        module.rotate_store(qkv.clone(), turns, at, q, *pools, None, None)
        found.append(pools)
    for expected, actual in zip(*found, strict=True):
        assert_alike(actual, expected)
