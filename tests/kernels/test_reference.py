"""Segment attention: equal to a plain dense statement, wherever pages, images and borders fall."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.kernels.kv_formats import FORMATS, KVFormat, Pages
from mmserve.kernels.reference import (
    attend,
    group_attention,
    merge,
    move_kv,
    paged_attention,
    read_pages,
    read_slots,
    rope_table,
    rotate,
    write_kv,
)
from tests.kernels.scene import Row, Scene, Shape, drafted, scenes, turn


def attention(scene: Scene) -> torch.Tensor:
    return paged_attention(
        scene.q,
        scene.plan,
        scene.text,
        scene.vision,
        scene.scale,
        softcap=scene.shape.softcap,
        sinks=scene.sinks,
    )


def assert_right(scene: Scene) -> None:
    torch.testing.assert_close(attention(scene).double(), scene.expected, rtol=1e-4, atol=2e-5)


@given(scenes(extras=True) | drafted(extras=True))
@settings(max_examples=60, deadline=None)
def test_paged_attention_equals_dense_attention_query_by_query(scene: Scene) -> None:
    assert_right(scene)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 33])
def test_an_image_is_seen_from_its_place_on_at_every_page_border(length: int, at: int) -> None:
    row = Row(length, ((min(at, length), 17), (length, 16)))
    assert_right(Scene(Shape(), [(min(length, 7), [row, Row(length)])]))


def test_several_images_in_one_place_are_read_one_behind_the_other() -> None:
    assert_right(Scene(Shape(), [(3, [Row(9, ((4, 5), (4, 17), (4, 1), (8, 16)))])]))


def test_an_image_reads_the_whole_of_itself() -> None:
    assert_right(Scene(Shape(), [(20, [Row(20, whole=True)])]))


def test_a_sequence_without_images_is_undisturbed_by_a_neighbour_with_many() -> None:
    rows = [Row(1), Row(40, ((0, 3), (7, 33))), Row(17)]
    assert_right(Scene(Shape(kv_heads=1, group=4), [(1, rows)]))


def test_an_image_in_its_context_reads_text_before_it_and_itself_so_far() -> None:
    reads = tuple((0, 3, 0, n) for n in range(1, 6))
    assert_right(Scene(Shape(), [(5, [Row(9, ((3, 5),), reads=reads)])]))


def test_a_window_begins_inside_text_or_inside_an_image() -> None:
    reads = ((2, 7, 5, 5), (3, 8, 4, 21), (0, 9, 20, 21), (8, 9, 21, 21))
    assert_right(Scene(Shape(), [(4, [Row(9, ((1, 5), (7, 16)), reads=reads)])]))


def test_cross_attention_reads_images_alone() -> None:
    reads = ((0, 0, 0, 0), (0, 0, 0, 5), (0, 0, 5, 21))
    assert_right(Scene(Shape(), [(3, [Row(9, ((1, 5), (7, 16)), reads=reads)])]))


def test_the_first_tokens_are_read_beside_a_window_and_never_twice() -> None:
    reads = ((2, 7, 5, 5), (6, 8, 0, 5), (7, 9, 0, 0))
    for count in (1, 4, 7):
        row = Row(9, ((1, 5),), reads=reads, sink_tokens=count)
        assert_right(Scene(Shape(), [(3, [row, Row(9, reads=((0, 9, 0, 0),) * 3)])]))


def test_a_mask_of_all_that_is_before_is_causal() -> None:
    parents = range(-1, 63)  # so many tokens that the last one's own bit is the sign's
    for images in ((), ((3, 17), (14, 16))):
        tree = Scene(Shape(), [(65, [Row.draft(15, parents, images)])])
        chain = Scene(Shape(), [(65, [Row(79, images)])])
        assert tree.plan.groups[0].tree is not None and tree.plan.groups[0].tree[0, -1] == -1
        assert torch.equal(attention(tree), attention(chain))


def test_capped_scores_follow_their_formula() -> None:
    q, k, v = torch.randn(3, 1, 1, 5, 4, generator=torch.Generator().manual_seed(1)) * 3
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    out, _ = attend(q.transpose(1, 2), k, v, mask, 1.0, 0.7)
    scores = 0.7 * torch.tanh(q[0, 0] @ k[0, 0].T / 0.7)
    torch.testing.assert_close(out[0, :, 0], torch.softmax(scores, -1) @ v[0, 0])


def test_a_learned_sink_takes_its_share_and_gives_nothing() -> None:
    scene = Scene(Shape(kv_heads=1, group=2, dim=4), [(2, [Row(9, ((3, 5),))])])
    pools = scene.plan, scene.text, scene.vision, scene.scale
    plain, nobody = (
        paged_attention(scene.q, *pools, sinks=sinks) for sinks in (None, torch.full((2,), -1e9))
    )
    assert torch.equal(plain, nobody)
    # Zero queries give every key the same score 0: n keys, and a sink as heavy as n of them.
    keys = torch.tensor([8 + 5, 9 + 5.0])
    sunk = paged_attention(scene.q * 0, *pools, sinks=keys[:1].log().expand(2))
    even = paged_attention(scene.q * 0, *pools)
    torch.testing.assert_close(sunk, even * (keys / (keys + keys[0]))[:, None, None])


def test_the_base_may_be_far_away() -> None:
    # 5,000 positions lie before the second image; its stored keys are local all the same.
    for origin in (0, 1_000_003):
        shape = Shape(kv_heads=1, group=1, dim=8, origin=origin)
        assert_right(Scene(shape, [(1, [Row(3, ((0, 5000), (1, 4)))])]))


@given(
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 63),
    st.sampled_from([2, 6, 64]),
)
@settings(deadline=None)
def test_turning_the_query_back_equals_moving_the_image(
    base: int, ahead: int, local: int, dim: int
) -> None:
    """R(p - b) q . R(l) k = R(p) q . R(b + l) k."""
    random = torch.Generator().manual_seed(base)
    q, k = torch.randn(2, dim, generator=random)
    table = rope_table(base + ahead + local + 1, dim, 10_000.0)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, *table[position])

    cos, sin = table[base]
    turned = rotate(at(q, base + ahead), cos, -sin) @ at(k, local)
    moved = turn(q.double(), torch.tensor(base + ahead)) @ turn(
        k.double(), torch.tensor(base + local)
    )
    assert float(turned) == pytest.approx(float(moved), abs=1e-5 * dim)


def test_the_rotary_table_is_exact_far_out() -> None:
    row = rope_table(1_000_001, 4, 100_000.0)[1_000_000]
    for i in range(2):
        angle = 1_000_000 * 100_000.0 ** (-i / 2)
        assert float(row[0, i]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(row[1, i]) == pytest.approx(math.sin(angle), abs=1e-6)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99))
def test_parts_merged_by_their_log_sums_equal_one_softmax_over_all(
    sizes: list[int], seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 3, 4, 8, generator=random) * 3
    k, v = torch.randn(2, 2, 2, sum(sizes), 8, generator=random)
    mask = torch.ones(2, 3, sum(sizes), dtype=torch.bool)
    whole, total = attend(q, k, v, mask, 1.0)
    ends = list(itertools.accumulate(sizes))
    parts = [
        attend(q, k[:, :, end - n : end], v[:, :, end - n : end], mask[..., :n], 1.0)
        for n, end in zip(sizes, ends, strict=True)
    ]
    outs, lses = torch.stack([o for o, _ in parts], 1), torch.stack([x for _, x in parts], 1)
    torch.testing.assert_close(merge(outs, lses), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lses.logsumexp(1), total, rtol=1e-4, atol=1e-5)


def test_a_part_that_is_not_read_changes_nothing_to_the_last_bit() -> None:
    random = torch.Generator().manual_seed(1)
    outs = torch.randn(1, 2, 1, 3, 4, generator=random)
    lses = torch.randn(1, 2, 1, 3, generator=random)
    outs[:, 1], lses[:, 1] = 0, float("-inf")
    assert torch.equal(merge(outs, lses), outs[:, 0])


def test_a_query_that_reads_nothing_gives_zero_and_no_mass() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8)
    mask = torch.zeros(1, 2, 5, dtype=torch.bool)
    mask[:, 1] = True
    out, lse = attend(q, k, k, mask, 1.0)
    assert torch.equal(out[:, 0], torch.zeros(1, 4, 8))
    assert torch.isneginf(lse[:, 0]).all() and torch.isfinite(lse[:, 1]).all()
    empty = out[:, None, :1].repeat(1, 3, 1, 1, 1), lse[:, None, :1].repeat(1, 3, 1, 1)
    assert torch.equal(merge(*empty), torch.zeros(1, 1, 4, 8))


def test_a_padded_row_beside_an_image_gives_zero() -> None:
    scene = Scene(Shape(), [(1, [Row(5, ((2, 3),)), Row(1)])])
    group = scene.plan.groups[0]
    group.hi[1] = 0
    out = group_attention(scene.q[:, None], group, scene.text, scene.vision, scene.scale)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    torch.testing.assert_close(out[0, 0].double(), scene.expected[0], rtol=1e-4, atol=2e-5)


@given(st.integers(1, 3), st.sampled_from([1, 4, 16]), st.integers(1, 40), st.integers(0, 99))
def test_what_is_written_at_slots_is_read_back_in_order(
    heads: int, page: int, count: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    num_pages = -(-count // page) + 3
    pool, values = torch.full((2, heads, num_pages, page, 2), 7.0)
    pages = torch.randperm(num_pages, generator=random)[: -(-count // page)]
    order = torch.arange(count)
    new = torch.randn(count, heads, 2, generator=random)
    slots = pages[order // page] * page + order % page
    write_kv(Pages(pool, values), slots, new, -new)
    keys, stored = read_pages(Pages(pool, values), pages[None])
    read = keys[0]
    assert torch.equal(read[:, :count], new.transpose(0, 1))
    assert torch.equal(stored[0, :, :count], -new.transpose(0, 1))
    assert bool((read[:, count:] == 7).all()), "a slot beside the new ones changed"
    assert int((pool != 7).any(-1).sum()) == heads * count


@given(st.sets(st.integers(0, 63), min_size=1, max_size=20), st.integers(0, 30))
def test_a_path_moves_together_in_every_layer_and_nothing_else_moves(
    path: set[int], first: int
) -> None:
    """Places that it moves to may be such as it moves from."""
    pools = torch.arange(2 * 2 * 3 * 7 * 16 * 2).view(2, 2, 3, 7, 16, 2).float()
    before, flat = pools.clone().flatten(3, 4), pools.flatten(3, 4)
    sources = torch.tensor(sorted(path)) + first
    places = torch.arange(len(path)) + first
    move_kv(pools, sources, places)
    assert torch.equal(flat[:, :, :, places], before[:, :, :, sources])
    assert torch.equal(flat[:, :, :, :first], before[:, :, :, :first])
    assert torch.equal(flat[:, :, :, first + len(path) :], before[:, :, :, first + len(path) :])


@pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
def test_tokens_are_read_by_their_slots_as_by_their_pages(kind: KVFormat) -> None:
    size = (2, 2, 5, 64, 16) if kind.plain else (2, 2, 5, kind.tile_bytes(64, 16))
    keys, values = torch.zeros(size, dtype=torch.float32 if kind.plain else torch.uint8)
    pages = Pages(keys, values, kind, 64, 16)
    k, v = torch.randn(2, 320, 2, 16, generator=torch.Generator().manual_seed(0))
    write_kv(pages, torch.arange(320), k, v)
    slots = torch.tensor([300, 7, 64, 7, 319])
    whole = read_pages(pages, torch.arange(5)[None])
    for found, all_of_them in zip(read_slots(pages, slots), whole, strict=True):
        assert torch.equal(found, all_of_them[0, :, slots])
