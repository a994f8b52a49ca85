"""Text whose pages are stored when they are full, on a GPU or else in Triton's interpreter: pages
are stored and read as the plain statement stores and reads them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels import attention, packed_pages, reference, work
from mmserve.kernels.kv_formats import FORMATS, KVFormat, Pages, encode_pages
from mmserve.kernels.launch import Launch
from mmserve.kernels.reference import AttentionPlan, QueryGroup, open_page
from mmserve.kernels.work_builder import WorkBuilder
from tests.kernels.test_packed_store import DEVICE, GROUPS, assert_alike, name
from tests.kernels.test_packed_store import pool as pool_of

PAGE, NUM_PAGES, HEADS, KV_HEADS, DIM = 16, 9, 4, 2, 32
FAR = 1 << 20


def pools(kind: KVFormat, dim: int) -> Pages:
    """Text and its residual, with three pages of anything."""
    random = torch.randn(2, KV_HEADS, 3, 64, dim, generator=torch.Generator().manual_seed(dim))
    k, v = random.to(DEVICE)
    return pool_of(kind, dim, 64)._replace(residual=Pages(k, v))


@pytest.mark.parametrize("kind", GROUPS, ids=name)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_full_pages_are_stored_and_no_others(kind: KVFormat, dim: int) -> None:
    empty = torch.full((packed_pages.ROWS,), -1, device=DEVICE)  # and more than one look's rows
    slots = torch.tensor([5, 63, 191, -7, 64], device=DEVICE)
    filled = torch.tensor([-1, 2, 0, -1, -1], device=DEVICE)
    slots, filled = (torch.cat((empty, some, empty)) for some in (slots, filled))
    actual, expected = pools(kind, dim), pools(kind, dim)
    packed_pages.fill_pages(actual, slots.int(), filled.int())
    reference.fill_pages(expected, slots, filled)
    assert_alike(actual, expected)
    assert not bool(actual.k[:, 1].any()), "a page that nobody filled was written"


def text(kind: KVFormat, seed: int) -> Pages:
    """A full pool, and a residual of unlike values."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(2, 2, KV_HEADS, NUM_PAGES, PAGE, DIM, generator=generator)
    held = torch.full((KV_HEADS, NUM_PAGES), PAGE)
    k, v = (
        encode_pages(raw[0, n], held, kind, part).to(DEVICE)
        for n, part in enumerate(reference.PARTS)
    )
    raw_k, raw_v = raw[1].to(DEVICE)
    return Pages(k, v, kind, PAGE, DIM, Pages(raw_k, raw_v))


def group(start: int, page: int, first: int, count: int, window: int, seed: int) -> QueryGroup:
    """Queries from text token `first` on, all of one page, the number `page` of their text."""
    order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(seed))
    pages = order[: page + 1].clone()
    pages[page] = open_page(pages[page])
    hi = torch.arange(first + 1, first + count + 1)[None]
    none = torch.zeros(0, dtype=torch.long)
    return QueryGroup(
        start=start,
        num_seqs=1,
        num_queries=count,
        pages=pages[None],
        lo=(hi - window).clamp_min(0),
        hi=hi,
        visual_lo=hi * 0,
        visual_hi=hi * 0,
        image_pages=none.view(0, 0),
        image_len=none,
        image_first=none,
        image_row=none,
        image_slot=none,
        cos=torch.zeros(0, DIM // 2),
        sin=torch.zeros(0, DIM // 2),
        max_images=0,
    )


def reader(of: QueryGroup) -> work.Reader:
    page = of.pages.shape[1] - 1
    pages = of.pages[0].clone()
    pages[page] = open_page(pages[page])
    every = torch.stack((of.lo, of.hi, of.visual_lo, of.visual_hi), 1)[0]
    reads: Any = tuple(every[:, 0].tolist() if of.num_queries == 1 else every.numpy())
    own = pages.numpy().astype(np.int32)
    return work.Reader(of.start, of.num_queries, reads, own, border=page * PAGE)


def attend(
    q: Tensor,
    groups: list[QueryGroup],
    pages: Pages,
    splits: work.Splits,
    full: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    builder = WorkBuilder(HEADS // KV_HEADS, splits)
    tables = builder.build([reader(of) for of in groups], len(q))
    scratch = attention.Scratch(tables.num_slots + 1, HEADS, DIM, q.device)
    scratch.parts.fill_(torch.nan)
    out = torch.full_like(q, torch.nan)
    launch = Launch(3 * (tables.small > 0), 3 * (tables.large > 0), 16, tables.tile_rows)
    launch = launch._replace(newest=3 * (tables.newest > 0))
    packed = torch.from_numpy(work.join([tables])).to(DEVICE)
    rope = torch.zeros(1, 2, DIM // 2, device=DEVICE)
    vision = Pages(pages.k[:, :1], pages.v[:, :1], pages.kind, PAGE, DIM)
    tensors = (q, packed, pages, vision, rope, 0.2, scratch, out, launch)
    attention.paged_attention(*tensors, full=full)
    return out


@given(
    st.lists(
        st.tuples(st.integers(0, NUM_PAGES - 1), st.integers(0, PAGE - 1), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([3, 40, FAR]),
    st.sampled_from(["int4", "int2_outliers"]),
    st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_queries_read_their_own_page_as_computed_and_those_before_as_stored(
    rows: list[tuple[int, int, bool]], window: int, kind: str, fixed: bool
) -> None:
    groups: list[QueryGroup] = []
    for seed, (page, inside, chunk) in enumerate(rows):
        start = sum(of.num_queries for of in groups)
        count = PAGE - inside if chunk else 1
        groups.append(group(start, page, page * PAGE + inside, count, window, seed))
    total = sum(of.num_queries for of in groups)
    q = torch.randn(total, HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    pages = text(FORMATS[kind], len(rows))
    none = torch.zeros(0)
    plan = AttentionPlan(none, none, none, tuple(groups))
    assert pages.residual is not None
    residual = Pages(pages.residual.k.cpu(), pages.residual.v.cpu())
    on_host = pages._replace(k=pages.k.cpu(), v=pages.v.cpu(), residual=residual)
    expected = reference.paged_attention(q.cpu(), plan, on_host, on_host, 0.2)
    splits = work.Splits((), (32,)) if fixed else work.SPLITS
    actual = attend(q, groups, pages, splits).cpu()
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)


def test_a_page_that_is_full_may_be_stored_while_its_last_row_reads_it() -> None:
    """By then nothing of it is read where it is stored."""
    before, beside = text(FORMATS["int4"], 1), text(FORMATS["int4"], 1)
    groups = [group(n, n + 1, (n + 2) * PAGE - 1, 1, FAR, seed=n) for n in range(3)]
    q = torch.randn(len(groups), HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    pages = torch.tensor([open_page(int(of.pages[0, -1])) for of in groups], device=DEVICE)
    free = sorted(set(range(NUM_PAGES)) - {int(p) for of in groups for p in of.pages[0, :-1]})
    full = (pages * PAGE + PAGE - 1, torch.tensor([free[0], -1, free[-1]], device=DEVICE))
    packed_pages.fill_pages(before, *full)
    expected = attend(q, groups, before, work.SPLITS)
    assert torch.equal(attend(q, groups, beside, work.SPLITS, full), expected)
    assert torch.equal(beside.k, before.k) and torch.equal(beside.v, before.v)
