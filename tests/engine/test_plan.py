"""The flat layout of a step: which rows, slots, positions and images each chunk gets."""

from __future__ import annotations

import torch

from mmserve.engine.plan import build_image, build_step
from mmserve.kernels.reference import rope_table
from mmserve.request import (
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    Sequence,
    TextSegment,
)
from mmserve.scheduler.batch import Chunk

TABLE = rope_table(256, 4, 10_000.0)


def image(number: int, tokens: int) -> ImageSegment:
    return ImageSegment(ImageInput(bytes([number]) * 32, b"", tokens))


def sequence(pages: list[int], vision: list[list[int]], *segments: Segment) -> Sequence:
    seq = Sequence(Request("x", segments, SamplingParams()))
    seq.pages = pages
    for placed, held in zip(seq.images, vision, strict=True):
        placed.pages = held
    return seq


def text(*ids: int) -> TextSegment:
    return TextSegment(ids)


def test_positions_count_images_and_slots_do_not() -> None:
    seq = sequence([7, 3], [[5, 9], [2]], text(1, 2), image(1, 6), text(3), image(2, 3), text(4, 5))
    step = build_step([Chunk(seq, 0, 5, True)], TABLE, 4)
    assert step.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert step.positions.tolist() == [0, 1, 8, 12, 13]
    assert step.plan.slots.tolist() == [28, 29, 30, 31, 12]
    (group,) = step.plan.groups
    assert group.hi.tolist() == [[1, 2, 3, 4, 5]] and group.pages.tolist() == [[7, 3]]
    assert group.image_pages.tolist() == [[5, 9], [2, 0]] and group.image_len.tolist() == [6, 3]
    assert group.image_seen.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    # Images are read rotated by minus their base.
    assert torch.equal(group.cos, TABLE[[2, 9], 0]) and torch.equal(group.sin, -TABLE[[2, 9], 1])
    assert step.last.tolist() == [4]


def test_single_tokens_go_first_as_one_group_whatever_their_order() -> None:
    long = sequence([0, 1], [], text(*range(6)))
    a = sequence([2], [[4]], text(10), image(1, 2), text(11))
    b = sequence([3, 5], [], text(*range(20, 25)))
    chunks = [Chunk(a, 1, 1, True), Chunk(long, 2, 3, False), Chunk(b, 4, 1, True)]
    step = build_step(chunks, TABLE, 4)
    assert [c.seq for c in step.order] == [a, b, long]
    assert step.token_ids.tolist() == [11, 24, 2, 3, 4] and step.last.tolist() == [0, 1, 4]
    decode, prefill = step.plan.groups
    assert (decode.start, decode.num_seqs, decode.num_queries) == (0, 2, 1)
    assert (prefill.start, prefill.num_seqs, prefill.num_queries) == (2, 1, 3)
    assert decode.pages.tolist() == [[2, 0], [3, 5]] and decode.hi.tolist() == [[2], [5]]
    assert decode.image_row.tolist() == [0] and decode.image_slot.tolist() == [0]
    assert prefill.pages.tolist() == [[0, 1]] and prefill.max_images == 0


def test_an_image_behind_the_chunk_is_not_in_the_plan() -> None:
    seq = sequence([0, 1], [[1], [2]], text(1, 2, 3), image(1, 3), text(4), image(2, 3), text(5))
    before, at, behind = (
        build_step([Chunk(seq, start, 1, False)], TABLE, 4).plan.groups[0] for start in (2, 3, 4)
    )
    lengths = [len(group.image_len) for group in (before, at, behind)]
    assert lengths == [0, 1, 2]


def test_an_image_is_written_at_its_local_positions_and_reads_all_of_itself() -> None:
    plan = build_image([6, 2], 6, TABLE, 4)
    assert plan.slots.tolist() == [24, 25, 26, 27, 8, 9]
    assert torch.equal(plan.cos, TABLE[:6, 0]) and torch.equal(plan.sin, TABLE[:6, 1])
    (group,) = plan.groups
    assert group.hi.tolist() == [[6] * 6] and not len(group.image_row)
