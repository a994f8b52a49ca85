"""Formats of pages: what they give back, what they take, and that a page's bytes are all there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmserve.kernels.kv_formats import (
    FORMATS,
    KVFormat,
    Pages,
    at_least,
    decode_pages,
    encode_tokens,
)
from mmserve.kernels.reference import move_tokens, read_pages, write_kv

BYTES = [kind for kind in FORMATS.values() if kind.bits == 8]
GROUPS = [kind for kind in FORMATS.values() if kind.whole_pages]


def empty(kind: KVFormat, heads: int, num_pages: int, size: int, dim: int) -> Pages:
    """Full of what nobody wrote."""
    tile = kind.tile_bytes(size, dim)
    tiles = torch.randint(0, 256, (2, heads, num_pages, tile), dtype=torch.uint8)
    return Pages(tiles[0], tiles[1], kind, size, dim)


@given(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False))
def test_a_scale_is_never_below_what_it_stands_for(x: float) -> None:
    near = at_least(torch.tensor(x)).item()
    assert near >= x
    assert abs(near - x) <= abs(x) / 128 or near < 1e-37


@pytest.mark.parametrize("kind", BYTES, ids=lambda kind: kind.name)
@given(count=st.integers(1, 40), seed=st.integers(0, 99), size=st.sampled_from([16, 64]))
def test_tokens_come_one_by_one_and_are_read_back_closely(
    kind: KVFormat, count: int, seed: int, size: int
) -> None:
    torch.manual_seed(seed)
    pages = empty(kind, 2, 5, size, 24)
    slots = torch.randperm(5 * size)[:count]
    k, v = torch.randn(2, count, 2, 24) * torch.logspace(-6, 6, count)[:, None, None]
    for one in range(count):
        write_kv(pages, slots[one : one + 1], k[one : one + 1], v[one : one + 1])
    together = empty(kind, 2, 5, size, 24)
    write_kv(together, slots, k, v)
    step = {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 16, torch.float8_e5m2: 1 / 8}[kind.dtype]
    for number, wanted in enumerate((k, v)):
        read = read_pages(pages, torch.arange(5)[None])[number][0][:, slots]
        same = read_pages(together, torch.arange(5)[None])[number][0][:, slots]
        assert torch.equal(read, same), "what is written beside a token changed it"
        error = (read - wanted.transpose(0, 1)).abs()
        assert bool((error <= step * wanted.abs().amax(-1).T[..., None]).all())


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.name)
@given(
    count=st.integers(1, 150), seed=st.integers(0, 99), dim=st.sampled_from([8, 64, 96, 128, 256])
)
def test_pages_are_stored_whole_and_read_back_as_closely_as_levels_over_their_range(
    kind: KVFormat, count: int, seed: int, dim: int
) -> None:
    torch.manual_seed(seed)
    pages = empty(kind, 2, 4, 64, dim)
    numbers = torch.randperm(4)[: -(-count // 64)]
    index = torch.arange(count)
    slots = numbers[index // 64] * 64 + index % 64
    k, v = torch.randn(2, count, 2, dim) * 3 + torch.randn(dim) * 10
    write_kv(pages, slots, k, v)
    for part, read, wanted in zip("kv", read_pages(pages, numbers[None]), (k, v), strict=True):
        found, given_ = read[0][:, :count], wanted.transpose(0, 1)
        error = (found - given_).square().mean()
        most = 2**kind.bits - 1
        rounding = 2e-5 * given_.square().mean()
        assert error <= 1.2 * plain_error(given_, part, kind, most) + rounding


def plain_error(x: Tensor, part: str, kind: KVFormat, most: int) -> Tensor:
    """Mean square of min-max levels, x [Hkv, N, D]."""
    errors = []
    for page in torch.split(x, 64, 1):
        groups = page.transpose(1, 2) if part == "k" else page
        if part == "v" and kind.value_groups(x.shape[-1]) == 2:
            groups = torch.cat(groups.chunk(2, -1), 1)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = ((high - low) / most).clamp_min(1e-30)
        errors.append((((groups - low) / step).round() * step + low - groups).square().sum())
    return sum(errors, torch.zeros(())) / x.numel()


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.name)
def test_a_page_does_not_depend_on_what_stood_in_it_or_beside_its_tokens(kind: KVFormat) -> None:
    k, v = torch.randn(2, 70, 2, 64)
    read = []
    for _ in range(2):
        pages = empty(kind, 2, 3, 64, 64)
        write_kv(pages, torch.arange(70) + 64, k, v)
        read.append(torch.stack((pages.k[:, 1:], pages.v[:, 1:])))
    assert torch.equal(read[0], read[1])


def test_one_far_value_does_not_take_the_levels_from_the_others() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 64) * 0.1
    x[5, 0, :] = 40.0
    errors = {}
    for name in ("int4", "int4_outliers"):
        pages = empty(FORMATS[name], 1, 1, 64, 64)
        write_kv(pages, torch.arange(64), x, x)
        keys = read_pages(pages, torch.tensor([[0]]))[0][0, 0]
        errors[name] = (keys - x[:, 0]).square().mean()
    assert bool((keys[5] == 40).all())
    assert errors["int4_outliers"] < errors["int4"] / 100


@pytest.mark.parametrize(
    ("name", "least"), [("int8", 1.9), ("fp8_e4m3", 1.9), ("int4", 3.5), ("int2", 6.0)]
)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_a_page_takes_so_much_less_than_in_16_bits_scales_included(
    name: str, least: float, dim: int
) -> None:
    kind = FORMATS[name]
    for size in (16, 64) if kind.bits == 8 else (64,):
        assert 2 * size * dim / kind.tile_bytes(size, dim) >= least


@pytest.mark.parametrize("kind", BYTES, ids=lambda kind: kind.name)
@given(st.permutations(range(20)), st.integers(1, 10))
def test_tokens_that_move_keep_their_bytes(kind: KVFormat, order: list[int], count: int) -> None:
    tiles = torch.randint(0, 100, (3, 2, 2, 4, kind.tile_bytes(16, 8)), dtype=torch.uint8)
    before = decode_pages(tiles, kind, "k", 16, 8).flatten(-3, -2)
    sources, places = torch.tensor(order[:count]) + 20, torch.tensor(order[:count]).sort()[0]
    move_tokens(tiles, kind, 16, 8, sources, places)
    after = decode_pages(tiles, kind, "k", 16, 8).flatten(-3, -2)
    wanted = before.clone()
    wanted[..., places, :] = before[..., sources, :]
    assert torch.equal(after.nan_to_num(), wanted.nan_to_num())


def test_zeros_and_ties_are_kept_as_they_are() -> None:
    for kind in BYTES:
        elements, scales = encode_tokens(torch.zeros(3, 8), kind)
        assert not elements.any() and not scales.any()
    for kind in GROUPS:
        pages = empty(kind, 1, 1, 64, 64)
        x = torch.full((64, 1, 64), 0.5)
        write_kv(pages, torch.arange(64), x, x)
        for read in read_pages(pages, torch.tensor([[0]])):
            assert bool((read == 0.5).all())
