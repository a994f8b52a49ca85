"""The flat layout of a step: which rows, slots, positions and images each chunk gets."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.engine.plan import Planner, StepInput
from mmserve.kernels.reference import NOWHERE, QueryGroup, rope_table, vision_slot
from mmserve.model.adapter import WHOLE_IMAGES, Sight
from mmserve.request import (
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    TextSegment,
)
from mmserve.scheduler.batch import Chunk, ContextImage
from mmserve.sequence import Sequence
from mmserve.spec.draft import Draft

TABLE = rope_table(256, 4, 10_000.0)


ALL = LayerGroup((0,))


def image(number: int, tokens: int, **fields: Any) -> ImageSegment:
    return ImageSegment(ImageInput(bytes([number]) * 32, b"", tokens, **fields))


def sequence(
    pages: list[int], vision: list[list[int]], *segments: Segment, in_context: bool = False
) -> Sequence:
    """Its layer groups, however many, hold it in the same pages."""
    seq = Sequence(Request("x", segments, SamplingParams()), in_context=in_context)
    seq.tables = [pages] * 3
    for placed, held in zip(seq.images, vision, strict=True):
        placed.pages = [held] * 3
    return seq


def text(*ids: int) -> TextSegment:
    return TextSegment(ids)


def lay_out(*chunks: Chunk, **options: Any) -> StepInput:
    groups = options.pop("groups", [ALL])
    turned = not chunks[0].seq.in_context
    return Planner(groups, TABLE if turned else TABLE[:1], 4, axes=1 - turned, **options).step(
        list(chunks)
    )


def with_images(seq: Sequence, start: int, count: int, *numbers: int) -> Chunk:
    """A chunk that computes some of its images, writing them in all groups."""
    contexts = (ContextImage(seq.images[n], (True, True, True)) for n in numbers)
    return Chunk(seq, start, count, False, tuple(contexts))


def read(group: QueryGroup, row: int = 0) -> list[tuple[int, int, int, int]]:
    """Text and visual intervals by query."""
    parts = (group.lo, group.hi, group.visual_lo, group.visual_hi)
    return list(zip(*(part[row].tolist() for part in parts), strict=True))


def test_positions_count_images_and_slots_do_not() -> None:
    seq = sequence([7, 3], [[5, 9], [2]], text(1, 2), image(1, 6), text(3), image(2, 3), text(4, 5))
    step = lay_out(Chunk(seq, 0, 5, True))
    assert step.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert step.positions.tolist() == [0, 1, 8, 12, 13]
    (plan,) = step.plans
    assert plan.slots.tolist() == [28, 29, 30, 31, 12]
    (group,) = plan.groups
    assert group.pages.tolist() == [[7, 3]]
    assert read(group) == [(0, 1, 0, 0), (0, 2, 0, 0), (0, 3, 0, 6), (0, 4, 0, 9), (0, 5, 0, 9)]
    assert group.image_pages.tolist() == [[5, 9], [2, 0]] and group.image_len.tolist() == [6, 3]
    assert group.image_first.tolist() == [0, 6]
    # Images are read rotated by minus their base.
    assert torch.equal(group.cos, TABLE[[2, 9], 0]) and torch.equal(group.sin, -TABLE[[2, 9], 1])
    assert step.last == [4]


def test_a_draft_tree_stands_behind_the_text_and_counts_by_depth() -> None:
    seq = sequence([7, 3, 5], [[9]], text(1, 2), image(1, 3), text(3))
    seq.append(40)
    #      50 - 51 - 53
    # 40 <    \- 54
    #      52
    draft = Draft((50, 51, 52, 53, 54), (-1, 0, -1, 1, 0))
    groups = [ALL, LayerGroup((1,), window=2)]
    step = lay_out(Chunk(seq, 3, 1, True, draft=draft), groups=groups)
    assert step.token_ids.tolist() == [40, 50, 51, 52, 53, 54]
    assert step.positions.tolist() == [6, 7, 8, 7, 9, 8]
    full, windowed = step.plans
    assert full.slots.tolist() == windowed.slots.tolist() == [31, 12, 13, 14, 15, 20]
    ((group,), (narrow,)) = full.groups, windowed.groups
    assert group.pages.tolist() == narrow.pages.tolist() == [[7, 3, 5]]
    assert read(group) == [(0, 4, 0, 3)] * 6
    assert group.tree is not None and narrow.tree is not None
    assert group.tree.tolist() == [[0b0, 0b1, 0b11, 0b100, 0b1011, 0b10001]]
    # Two tokens each: the last known ones, and of a path the end.
    assert [(lo, hi) for lo, hi, _, _ in read(narrow)] == [(2, 4), (3, 4), (4, 4)] + [
        (3, 4),
        (4, 4),
        (4, 4),
    ]
    assert narrow.tree.tolist() == [[0b0, 0b1, 0b11, 0b100, 0b1010, 0b10001]]


def test_single_tokens_go_first_as_one_group_whatever_their_order() -> None:
    long = sequence([0, 1], [], text(*range(6)))
    a = sequence([2], [[4]], text(10), image(1, 2), text(11))
    b = sequence([3, 5], [], text(*range(20, 25)))
    step = lay_out(Chunk(a, 1, 1, True), Chunk(long, 2, 3, False), Chunk(b, 4, 1, True))
    assert [c.seq for c in step.order] == [a, b, long]
    assert step.token_ids.tolist() == [11, 24, 2, 3, 4] and step.last == [0, 1, 4]
    decode, prefill = step.plans[0].groups
    assert (decode.start, decode.num_seqs, decode.num_queries) == (0, 2, 1)
    assert (prefill.start, prefill.num_seqs, prefill.num_queries) == (2, 1, 3)
    assert decode.pages.tolist() == [[2, 0], [3, 5]] and decode.hi.tolist() == [[2], [5]]
    assert decode.image_row.tolist() == [0] and decode.image_slot.tolist() == [0]
    assert prefill.pages.tolist() == [[0, 1]] and prefill.max_images == 0


def test_an_image_behind_the_chunk_is_not_in_the_plan() -> None:
    seq = sequence([0, 1], [[1], [2]], text(1, 2, 3), image(1, 3), text(4), image(2, 3), text(5))
    before, at, behind = (
        lay_out(Chunk(seq, start, 1, False)).plans[0].groups[0] for start in (2, 3, 4)
    )
    lengths = [len(group.image_len) for group in (before, at, behind)]
    assert lengths == [0, 1, 2]


def test_an_image_is_written_at_its_local_positions_and_reads_all_of_itself() -> None:
    (plan,) = Planner([ALL], TABLE, 4, sight=WHOLE_IMAGES).image([[6, 2]], 6)
    assert vision_slot(plan.slots).tolist() == [24, 25, 26, 27, 8, 9]
    assert torch.equal(plan.cos, TABLE[:6, 0]) and torch.equal(plan.sin, TABLE[:6, 1])
    (group,) = plan.groups
    assert read(group) == [(0, 0, 0, 6)] * 6 and group.pages.numel() == 0
    assert torch.equal(group.cos, TABLE[[0], 0]) and group.image_pages.tolist() == [[6, 2]]


def test_an_image_that_sees_itself_in_order_sees_no_more_than_a_window() -> None:
    groups = [ALL, LayerGroup((1,), window=2)]
    full, windowed = Planner(groups, TABLE, 4).image([[6], [2]], 4)
    assert read(full.groups[0]) == [(0, 0, 0, n) for n in (1, 2, 3, 4)]
    assert read(windowed.groups[0]) == [(0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 3), (0, 0, 2, 4)]


def test_an_image_in_context_stands_before_its_text_token_and_sees_what_is_before_it() -> None:
    seq = sequence(
        [7, 3],
        [[5, 9], [2]],
        *(text(1, 2), image(1, 5, token_ids=(9, 9, 8, 9, 9)), text(3), image(2, 2), text(4)),
        in_context=True,
    )
    step = lay_out(with_images(seq, 1, 3, 0, 1))
    assert step.token_ids.tolist() == [2, 9, 9, 8, 9, 9, 3, 0, 0, 4]
    assert step.positions.tolist() == list(range(1, 11))
    slots = step.plans[0].slots
    assert slots[[0, 6, 9]].tolist() == [29, 30, 31]
    assert vision_slot(slots[1:6]).tolist() == [20, 21, 22, 23, 36]
    assert vision_slot(slots[7:9]).tolist() == [8, 9]
    assert read(step.plans[0].groups[0]) == [
        *((0, 2, 0, 0), (0, 2, 0, 1), (0, 2, 0, 2), (0, 2, 0, 3), (0, 2, 0, 4), (0, 2, 0, 5)),
        *((0, 3, 0, 5), (0, 3, 0, 6), (0, 3, 0, 7), (0, 4, 0, 7)),
    ]
    assert [(i.first, i.placed) for i in step.images] == [(1, seq.images[0]), (7, seq.images[1])]
    assert torch.equal(step.plans[0].groups[0].sin, torch.zeros(2, 2))  # no further rotation


def test_an_image_alone_is_computed_behind_text_that_is_there_and_before_text_that_is_not() -> None:
    seq = sequence([7, 3], [[5]], text(1, 2), image(1, 3), text(3, 4), in_context=True)
    early = lay_out(with_images(seq, 0, 2, 0))
    assert early.token_ids.tolist() == [1, 2, 0, 0, 0]
    late = lay_out(with_images(seq, 3, 1, 0))
    assert late.token_ids.tolist() == [0, 0, 0, 4]
    assert read(late.plans[0].groups[0])[0] == (0, 2, 0, 1)
    alone = lay_out(with_images(seq, 3, 0, 0))
    assert alone.token_ids.tolist() == [0, 0, 0] and alone.last == [2]


def test_an_image_that_is_there_in_a_group_is_not_written_again() -> None:
    seq = sequence([7], [[5]], text(1), image(1, 2), text(2), in_context=True)
    chunk = Chunk(seq, 0, 2, True, (ContextImage(seq.images[0], (False, True)),))
    first, second = lay_out(chunk, groups=[ALL, LayerGroup((1,), window=2)]).plans
    assert first.slots.tolist() == [28, NOWHERE, NOWHERE, 29]
    assert vision_slot(second.slots[1:3]).tolist() == [20, 21]


@given(st.data())
def test_a_window_is_the_last_tokens_of_either_kind(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=4))
    window = data.draw(st.integers(1, 30))
    parts = [(text(*range(n)), image(i, m)) for i, (n, m) in enumerate(lengths)]
    seq = sequence(
        list(range(9)),
        [[n, n + 10] for n in range(len(lengths))],
        *(segment for pair in parts for segment in pair),
        text(1, 2, 3),
        in_context=True,
    )
    chunk = with_images(seq, 0, seq.num_tokens, *range(len(lengths)))
    groups = [LayerGroup((0,), window=window)]
    step = lay_out(chunk, groups=groups)
    kinds = ["text" if slot >= 0 else "visual" for slot in step.plans[0].slots.tolist()]
    for row, interval in enumerate(read(step.plans[0].groups[0])):
        seen = kinds[max(row + 1 - window, 0) : row + 1]
        assert interval[1] - interval[0] == seen.count("text")
        assert interval[3] - interval[2] == seen.count("visual")
        assert interval[1] == kinds[: row + 1].count("text")
        own = kinds[: row + 1].count("text") - (kinds[row] == "text")
        visual = kinds[: row + 1].count("visual") - (kinds[row] == "visual")
        assert seq.window_start(own, visual, window) == (interval[0], interval[2])


def test_whole_images_and_whole_prompts() -> None:
    seq = sequence(
        [7, 3], [[5], [6]], text(1), image(1, 2), image(2, 3), text(2, 3), in_context=True
    )
    seq.append(4)
    chunk = with_images(seq, 0, 4, 0, 1)
    group = lay_out(chunk, sight=Sight(whole_images=True)).plans[0].groups[0]
    seen = [(0, 1, 0, 0), *[(0, 1, 0, 2)] * 2, *[(0, 1, 0, 5)] * 3]
    assert read(group) == [*seen, (0, 2, 0, 5), (0, 3, 0, 5), (0, 4, 0, 5)]
    windowed = [LayerGroup((0,), window=2)]
    group = lay_out(chunk, sight=Sight(whole_images=True), groups=windowed).plans[0].groups[0]
    assert read(group)[:3] == [(0, 1, 0, 0), (0, 1, 0, 2), (1, 1, 0, 2)]
    assert read(group)[3:6] == [(1, 1, 1, 5), (1, 1, 2, 5), (1, 1, 2, 5)]
    for groups, last in (([ALL], (0, 4, 0, 5)), (windowed, (2, 4, 5, 5))):
        group = lay_out(chunk, sight=Sight(whole_prompt=True), groups=groups).plans[0].groups[0]
        assert read(group) == [(0, 3, 0, 5)] * 8 + [last]


def test_a_head_sees_the_whole_of_its_image_and_the_tail_is_read_from_its_own_pages() -> None:
    request = Request("x", (text(1), image(1, 11), text(2)), SamplingParams())
    seq = Sequence(request, in_context=True, head=4)
    head, tail = seq.images
    seq.tables, head.pages, tail.pages = [[7]], [[5]], [[8, 9, 3]]
    assert (head.in_context, tail.in_context, tail.key) == (True, False, bytes([1]) * 32)
    planner = Planner([ALL], TABLE, 4, sight=WHOLE_IMAGES)
    step = planner.step([with_images(seq, 0, 2, 0)])
    (group,) = step.plans[0].groups
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 12]
    assert read(group) == [(0, 1, 0, 0), *[(0, 1, 0, 11)] * 4, (0, 2, 0, 11)]
    assert group.image_pages.tolist() == [[5, 0], [9, 3]]
    assert group.image_first.tolist() == [0, 4] and group.image_len.tolist() == [4, 7]
    # The head is stored as the sequence counts, the tail as if the image stood first.
    assert torch.equal(group.sin, -TABLE[[0, 1], 1])


def test_cross_attention_sees_the_images_whose_placeholders_stand_last_together() -> None:
    images = [image(n, 2, span=0) for n in range(3)]
    segments = (text(1), images[0], text(9, 2), images[1], text(9), images[2], text(9, 3))
    seq = sequence([7, 8], [[1], [2], [3]], *segments)
    own, cross = LayerGroup((0,), images=False), LayerGroup((1,), text=False)
    step = lay_out(Chunk(seq, 0, 6, True), groups=[own, cross])
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert read(step.plans[0].groups[0]) == [(0, n, 0, 0) for n in range(1, 7)]
    first, both = [(0, 0, 0, 2)] * 2, [(0, 0, 2, 6)] * 2
    assert read(step.plans[1].groups[0]) == [(0, 0, 0, 0), *first, (0, 0, 2, 4), *both]
    assert step.plans[1].slots.tolist() == [NOWHERE] * 6


def test_positions_of_several_axes_follow_the_image() -> None:
    local = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]
    seq = sequence(
        [7], [[1]], text(1, 2), image(1, 4, positions=local, span=2), text(3), in_context=True
    )
    step = Planner([ALL], TABLE[:1], 4, axes=3).step([with_images(seq, 0, 3, 0)])
    assert step.positions.tolist() == [
        *([0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4])
    ]
