"""Each compiled kernel equals its plain statement, and a row's bits do not know its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mmserve.kernels import cpu, int8, reference
from mmserve.kernels.kv_formats import Pages
from tests.kernels.scene import Row, Scene, Shape, drafted, pad, scenes

EPS, LIMIT = 1e-5, 32767.0
ROWS, WIDTHS, SEEDS = st.integers(1, 19), st.sampled_from([2, 16, 34, 80]), st.integers(0, 999)


def randn(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def quantized(fill: Callable[[Any, Any], None], count: int, width: int) -> tuple[Tensor, Tensor]:
    """Run a kernel that quantises into (rows, scales) -> integers [M, K] and scales [M]."""
    rows, scales = int8.empty_rows(count, width), torch.zeros(count)
    fill(rows, scales.numpy())
    pairs = np.ascontiguousarray(rows.transpose(0, 2, 1).reshape(-1, width // 2)[:count])
    return torch.from_numpy(pairs.view(np.int16)), scales


def assert_held(rows: Tensor, scales: Tensor, exact: Tensor) -> None:
    """`rows` hold `exact` [M, N] to half a step of `LIMIT`."""
    top = exact.abs().amax(1, keepdim=True)
    bound = top * (0.5 / LIMIT + 1e-5) + 1e-12
    assert bool(((rows.double() * scales.double()[:, None] - exact).abs() <= bound).all())


@given(SEEDS, ROWS, WIDTHS)
@settings(deadline=None)
def test_norm_quantize_is_the_rms_norm_quantised(seed: int, count: int, width: int) -> None:
    x, weight = randn(seed, count, width) * 3, randn(seed + 1, width)
    rows, scales = quantized(
        lambda r, s: cpu.norm_quantize(x.numpy(), weight.numpy(), EPS, LIMIT, r, s), count, width
    )
    assert_held(rows, scales, functional.rms_norm(x.double(), (width,), weight.double(), EPS))


@given(SEEDS, ROWS, WIDTHS)
@settings(deadline=None)
def test_gate_quantize_is_the_gated_product_quantised(seed: int, count: int, width: int) -> None:
    both = randn(seed, count, 2 * width) * 4
    rows, scales = quantized(
        lambda r, s: cpu.gate_quantize(both.numpy(), LIMIT, r, s), count, width
    )
    gate, up = both.double().chunk(2, 1)
    assert_held(rows, scales, functional.silu(gate) * up)


def test_gate_quantize_survives_gates_far_from_zero() -> None:
    both = torch.tensor([[1e6, -1e6, 1.0, 1.0]])
    rows, scales = quantized(lambda r, s: cpu.gate_quantize(both.numpy(), LIMIT, r, s), 1, 2)
    torch.testing.assert_close(rows * scales[:, None], torch.tensor([[1e6, 0.0]]))


@given(SEEDS, ROWS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 16]))
@settings(deadline=None)
def test_rotate_store_rotates_queries_and_keys_and_stores_keys_and_values(
    seed: int, count: int, kv_heads: int, group: int, dim: int
) -> None:
    heads, total = kv_heads * group, kv_heads * (group + 2)
    qkv = randn(seed, count, total, dim)
    positions = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed))
    cos, sin = (x.contiguous() for x in reference.rope_table(50, dim, 1e4)[positions].unbind(1))
    # Some to the text pool, some to the vision pool, some nowhere.
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:count]
    slots[count // 3 : count // 2] = reference.NOWHERE
    slots[count // 2 :] = reference.vision_slot(slots[count // 2 :])
    q = torch.zeros(count, heads, dim)
    text, vision = torch.full((2, 2, kv_heads, 32, dim), 7.0)
    wanted = text.clone(), vision.clone()
    arrays: Any = [x.numpy() for x in (qkv.flatten(1), cos, sin, slots, q)]
    pools: Any = tuple(text.numpy()), tuple(vision.numpy())
    cpu.rotate_store(*arrays, *pools)

    turned = reference.rotate(qkv, cos[:, None], sin[:, None])
    wanted_q, k_new = turned[:, :heads], turned[:, heads : heads + kv_heads]
    v_new = qkv[:, heads + kv_heads :]
    plan = reference.AttentionPlan(slots, cos, sin, ())
    own, seen = (Pages(*pools.view(2, kv_heads, 4, 8, dim)) for pools in wanted)
    reference.write_step(plan, own, seen, k_new, v_new)
    torch.testing.assert_close(q, wanted_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((text, vision), wanted, rtol=1e-5, atol=1e-5)


def row_by_row(scene: Scene) -> Tensor:
    """All groups of a scene by the compiled kernel -> [T, H, D]."""
    pools = [tuple(p.flatten(1, 2).numpy() for p in x[:2]) for x in (scene.text, scene.vision)]
    out = torch.full_like(scene.q, 99)
    for group in scene.plan.groups:
        span = slice(group.start, group.start + group.num_seqs * group.num_queries)
        arrays: Any = (*pools, scene.shape.page, *group.arrays, scene.scale, out[span].numpy())
        cpu.row_attention(scene.q[span].numpy(), *arrays)
    return out


@given(scenes() | drafted())
@settings(max_examples=90, deadline=None)
def test_row_attention_equals_the_reference_and_the_dense_statement(scene: Scene) -> None:
    out = row_by_row(scene)
    plain = reference.paged_attention(scene.q, scene.plan, scene.text, scene.vision, scene.scale)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-4, atol=2e-5)


@given(scenes(queries=st.just(1)), st.data())
@settings(max_examples=40, deadline=None)
def test_row_attention_gives_a_sequence_the_same_bits_alone(
    scene: Scene, data: st.DataObject
) -> None:
    out = row_by_row(scene)
    group = data.draw(st.sampled_from(scene.plan.groups))
    b = data.draw(st.integers(0, group.num_seqs - 1))
    mine = group.image_row == b
    count = -(-int(group.hi[b]) // scene.shape.page)
    longest = max((-(-int(n) // scene.shape.page) for n in group.image_len[mine]), default=0)
    alone = reference.QueryGroup(
        start=group.start + b,
        num_seqs=1,
        num_queries=1,
        pages=group.pages[b : b + 1, :count],
        lo=group.lo[b : b + 1],
        hi=group.hi[b : b + 1],
        visual_lo=group.visual_lo[b : b + 1],
        visual_hi=group.visual_hi[b : b + 1],
        image_pages=group.image_pages[mine][:, :longest],
        image_len=group.image_len[mine],
        image_first=group.image_first[mine],
        image_row=group.image_row[mine] * 0,
        image_slot=torch.arange(int(mine.sum())),
        cos=group.cos[mine],
        sin=group.sin[mine],
        max_images=int(mine.sum()),
    )
    scene.plan = reference.AttentionPlan(scene.plan.slots, scene.plan.cos, scene.plan.sin, (alone,))
    assert torch.equal(row_by_row(scene)[group.start + b], out[group.start + b])


@given(st.integers(1, 40), st.lists(st.integers(1, 3), min_size=1, max_size=20), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_path_through_a_tree_has_the_bits_of_the_same_tokens_in_a_row(
    known: int, steps: list[int], seed: int
) -> None:
    """Wherever they lie among the tree's: every third number or so is on the path."""
    path = list(accumulate(steps))
    parents = [-1] * (path[-1] + 1)
    for before, number in pairwise(path):
        parents[number] = before
    images = ((known - 1, 17),)
    scene = Scene(Shape(page=4), [(len(parents) + 1, [Row.draft(known, parents, images)])], seed)
    in_tree = row_by_row(scene)[[number + 1 for number in path]]

    (group,) = scene.plan.groups
    pages, where = group.pages[0], torch.arange(len(path)) + known
    sources, slots = ((pages[t // 4] * 4 + t % 4) for t in (torch.tensor(path) + known, where))
    for pool in scene.text[:2]:
        flat = pool.flatten(1, 2)
        flat[:, slots] = flat[:, sources].clone()
    scene.q[1 : len(path) + 1] = scene.q[[number + 1 for number in path]]
    hi = group.hi.clone()
    hi[0, 1 : len(path) + 1] = where + 1
    chain = replace(group, hi=hi, tree=None)
    scene.plan = replace(scene.plan, groups=(chain,))
    assert torch.equal(row_by_row(scene)[1 : len(path) + 1], in_tree)


def test_row_attention_reads_large_scores_without_overflow() -> None:
    scene = Scene(Shape(kv_heads=1, group=2, dim=6, page=4), [(1, [Row(9, ((3, 5),)), Row(1)])])
    scene.q *= 1000
    plain = reference.paged_attention(scene.q, scene.plan, scene.text, scene.vision, scene.scale)
    torch.testing.assert_close(row_by_row(scene), plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("count", [2, 5, 17])
def test_the_other_kernels_give_a_row_the_same_bits_alone(count: int) -> None:
    width = 48
    both, weight = randn(count, count, 2 * width) * 5, randn(1, width)

    def run(picked: Tensor) -> list[Tensor]:
        """Every row-wise kernel over these rows; per row, all that came out."""
        some, n = both[picked], len(picked)
        half = some[:, :width].contiguous()
        results = [
            quantized(
                lambda r, s: cpu.norm_quantize(half.numpy(), weight.numpy(), EPS, LIMIT, r, s),
                n,
                width,
            ),
            quantized(lambda r, s: cpu.gate_quantize(some.numpy(), LIMIT, r, s), n, width),
        ]
        return list(torch.cat([torch.cat((r.float(), s[:, None]), 1) for r, s in results], 1))

    together = run(torch.arange(count))
    for i in range(count):
        assert torch.equal(run(torch.tensor([i]))[0], together[i])


def test_padding_of_page_tables_is_never_read() -> None:
    rows = [Row(33, ((2, 17), (5, 1))), Row(1), Row(16, ((0, 16),))]
    scene = Scene(Shape(), [(1, rows)])
    before = row_by_row(scene)
    group = scene.plan.groups[0]
    used = [-(-int(n) // 16) for n in group.hi[:, 0]]
    held = [-(-int(n) // 16) for n in group.image_len]
    spoilt = 10**6  # far outside every pool
    pages = pad([r[:n].tolist() + [spoilt] * 2 for r, n in zip(group.pages, used, strict=True)])
    assert pages.max() == spoilt
    for table, counts in ((group.pages, used), (group.image_pages, held)):
        for row, count in zip(table, counts, strict=True):
            row[count:] = spoilt
    assert torch.equal(row_by_row(scene), before)
