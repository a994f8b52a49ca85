"""A GPU step is laid out as the plan says, for tokens that decode and for chunks of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.engine.cuda_layout import CUDALayout, Layout, slices
from mmserve.engine.plan import Planner, StepInput
from mmserve.kernels import work
from mmserve.kernels.reference import QueryGroup, rope_table, vision_slot
from mmserve.model.adapter import Sight
from mmserve.model.rope import Block
from mmserve.regimes import ONE, Regimes
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

PAGE = 4
TABLE = rope_table(256, 4, 10_000.0)
CROSSED = (LayerGroup((0,), images=False), LayerGroup((1,), text=False))
GROUPS = [
    (LayerGroup((0,)),),
    (LayerGroup((0,), window=7),),
    (LayerGroup((0,)), LayerGroup((1,), window=5)),
    CROSSED,
]


class Ids:
    """Page ids that nobody else has."""

    def __init__(self) -> None:
        self.given = 0

    def take(self, tokens: int) -> list[int]:
        count = -(-tokens // PAGE)
        self.given += count
        return list(range(self.given - count, self.given))


@st.composite
def sequences(
    draw: st.DrawFn,
    ids: Ids,
    groups: tuple[LayerGroup, ...],
    axes: int,
    regimes: Regimes = ONE,
) -> Sequence:
    """Its images by themselves, in their context, or their heads in their context."""
    segments: list[Segment] = []
    for n in range(draw(st.integers(0, 4))):
        if count := draw(st.integers(0, 5)):
            segments.append(TextSegment(tuple(range(10 * n, 10 * n + count))))
        tokens = draw(st.integers(1, 9))
        local = None if axes < 2 else np.array([[0] * tokens, range(tokens), [1] * tokens])
        fields: dict[str, Any] = {"positions": local, "span": None if axes < 2 else 2}
        fields["token_ids"] = tuple(range(100, 100 + tokens))
        segments.append(ImageSegment(ImageInput(bytes([n]) * 32, b"", tokens, **fields)))
    segments.append(TextSegment(tuple(range(60, 60 + draw(st.integers(1, 9))))))
    in_context = groups is not CROSSED and draw(st.booleans())
    head = draw(st.sampled_from([None, PAGE])) if in_context else None
    request = Request("x", tuple(segments), SamplingParams())
    seq = Sequence(request, in_context=in_context, head=head, regimes=regimes)
    seq.tables = [ids.take(seq.num_tokens + 9) if group.text else [] for group in groups]
    for placed in seq.images:
        placed.pages = [ids.take(placed.num_stored) for _ in groups]
    return seq


@st.composite
def chunks(draw: st.DrawFn, seq: Sequence, groups: tuple[LayerGroup, ...]) -> Chunk:
    """Of one token as often as of several; images before it as the scheduler would have them."""
    end = draw(st.integers(1, seq.num_tokens))
    start = draw(st.sampled_from([end - 1, draw(st.integers(0, end - 1))]))
    contexts = tuple(
        ContextImage(placed, tuple(draw(st.booleans()) for _ in groups))
        for placed in seq.images
        if placed.in_context and start <= placed.text_index < end and draw(st.booleans())
    )
    if end == seq.num_tokens and not contexts and draw(st.booleans()):
        parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 9)))]
        draft = Draft(tuple(range(200, 200 + len(parents))), tuple(parents))
        return Chunk(seq, end - 1, 1, True, draft=draft)
    return Chunk(seq, start, end - start, True, contexts)


def assert_same(layout: Layout, step: StepInput, planner: Planner) -> None:
    axes = max(planner.axes, 1)
    rows = torch.from_numpy(layout.rows).long()
    assert torch.equal(rows[0], step.token_ids)
    assert torch.equal(rows[1 : 1 + axes], step.positions.view(axes, -1))
    if len(rows) > 1 + axes + len(step.plans):
        regimes = step.token_ids * 0 if step.regimes is None else step.regimes
        assert torch.equal(rows[1 + axes], regimes)
    assert layout.last == step.last
    assert layout.images == step.images
    for number, plan in enumerate(step.plans):
        assert torch.equal(rows[number - len(step.plans)], plan.slots)
        readers = iter(layout.readers[number])
        for group in plan.groups:
            for b in range(group.num_seqs):
                assert_reads(next(readers), group, b, planner.table)
        assert next(readers, None) is None


def assert_reads(reader: work.Reader, group: QueryGroup, b: int, table: torch.Tensor) -> None:
    assert reader.first_row == group.start + b * group.num_queries
    reads = torch.stack((group.lo[b], group.hi[b], group.visual_lo[b], group.visual_hi[b]))
    assert reader.matrix.tolist() == reads.tolist()
    assert (reader.tree is None) is (group.tree is None)
    if group.tree is not None:
        assert reader.tree.tolist() == group.tree[b].tolist()
        for index in range(int(group.hi.max()), int(reader.ends.max())):
            page = index // PAGE
            assert reader.pages[page - reader.first_page] == group.pages[b, page]
    for lo, hi, visual_lo, visual_hi in reader.matrix.T.tolist():
        for index in range(lo, hi):
            page = index // PAGE
            assert reader.pages[page - reader.first_page] == group.pages[b, page]
        found = [seen(reader, v, table) for v in range(visual_lo, visual_hi)]
        assert found == [planned(group, b, v) for v in range(visual_lo, visual_hi)]


Seen = tuple[int, list[float], list[float]]


def seen(reader: work.Reader, visual: int, table: torch.Tensor) -> Seen:
    """A visual token's slot, and the angle that queries are turned by before it."""
    (image,) = [i for i in reader.images if i.first <= visual < i.first + i.num_tokens]
    local = visual - image.first
    cos, sin = table[image.base or 0]
    slot = int(image.pages[local // PAGE]) * PAGE + local % PAGE
    return slot, cos.tolist(), (-sin + 0.0).tolist()


def planned(group: QueryGroup, b: int, visual: int) -> Seen:
    (n,) = [
        n
        for n, (row, first, length) in enumerate(
            zip(group.image_row, group.image_first, group.image_len, strict=True)
        )
        if row == b and first <= visual < first + length
    ]
    local = visual - int(group.image_first[n])
    slot = int(group.image_pages[n, local // PAGE]) * PAGE + local % PAGE
    return slot, group.cos[n].tolist(), (group.sin[n] + 0.0).tolist()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_step_is_laid_out_as_planned(data: st.DataObject) -> None:
    groups, axes = data.draw(st.sampled_from(GROUPS)), data.draw(st.sampled_from([0, 1, 3]))
    sight = data.draw(
        st.sampled_from([Sight(), Sight(whole_images=True), Sight(whole_prompt=True)])
    )
    regimes = data.draw(st.sampled_from([ONE, Regimes(9), Regimes(9, whole=False)]))
    blocks = (Block(), Block(120, 70)) if regimes is not ONE and not axes else (Block(),)
    planner = Planner(groups, TABLE, PAGE, sight=sight, axes=axes, blocks=blocks)
    layout, ids = CUDALayout(planner, scaled=regimes is not ONE and axes > 0), Ids()
    count = data.draw(st.integers(1, 4))
    seqs = [data.draw(sequences(ids, groups, axes, regimes)) for _ in range(count)]
    some = sorted((data.draw(chunks(seq, groups)) for seq in seqs), key=lambda c: c.num_rows > 1)
    made = layout.step(some)
    assert_same(made, planner.step(some), planner)
    assert not made.apart or all(chunk.num_rows == 1 for chunk in some)


def test_only_where_each_row_is_another_sequences_does_none_read_what_another_fills() -> None:
    seqs = [
        Sequence(Request(name, (TextSegment(tuple(range(9))),), SamplingParams())) for name in "xy"
    ]
    for seq in seqs:
        seq.tables = [[0, 1, 2]]
    layout = CUDALayout(Planner(GROUPS[0], TABLE, PAGE))
    one, other = (Chunk(seq, 8, 1, True) for seq in seqs)
    several = Chunk(seqs[1], 6, 3, True)
    guessed = Chunk(seqs[1], 8, 1, True, draft=Draft((3,), (-1,)))
    assert layout.step([one, other]).apart
    assert not layout.step([one, several]).apart
    assert not layout.step([one, guessed]).apart


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_kept_of_a_sequence_keeps_up_with_it(data: st.DataObject) -> None:
    """Tokens are made, the table grows, and once all is held anew elsewhere."""
    groups, ids = data.draw(st.sampled_from(GROUPS)), Ids()
    planner = Planner(groups, TABLE, PAGE, axes=1)
    layout, seq = CUDALayout(planner), data.draw(sequences(ids, groups, 1))
    moved_at = data.draw(st.integers(0, 5))
    for step in range(6):
        seq.append(step)
        if step == moved_at:
            seq.tables = [[page + 1000 for page in table] for table in seq.tables]
            for placed in seq.images:
                placed.pages = [[page + 1000 for page in held] for held in placed.pages or []]
        chunk = [Chunk(seq, seq.num_tokens - 1, 1, True)]
        assert_same(layout.step(chunk), planner.step(chunk), planner)


def test_images_that_come_to_be_held_are_seen_by_the_next_token() -> None:
    image = ImageSegment(ImageInput(bytes(32), b"", 3))
    segments = (TextSegment((1, 2)), image, TextSegment((3,)))
    seq = Sequence(Request("x", segments, SamplingParams()), in_context=True)
    seq.tables = [[5]]
    layout = CUDALayout(Planner(GROUPS[0], TABLE, PAGE))
    assert layout.step([Chunk(seq, 1, 1, False)]).readers[0][0].images == ()
    seq.images[0].pages = [[7]]
    (reader,) = layout.step([Chunk(seq, 2, 1, False)]).readers[0]
    assert [part.pages.tolist() for part in reader.images] == [[7]]


def test_an_image_alone_reads_itself_and_nothing_else() -> None:
    for groups, sight in ((GROUPS[2], Sight()), (GROUPS[0], Sight(whole_images=True))):
        planner = Planner(groups, TABLE, PAGE, sight=sight, axes=1)
        pages = [[3, 5] for _ in groups]
        layout = CUDALayout(planner).image(b"", pages, 7)
        assert layout.rows[1].tolist() == list(range(7))
        for number, plan in enumerate(planner.image(pages, 7)):
            assert layout.rows[2 + number].tolist() == plan.slots.tolist()
            assert_reads(layout.readers[number][0], plan.groups[0], 0, TABLE)
    assert vision_slot(layout.rows[2]).tolist() == [12, 13, 14, 15, 20, 21, 22]


def test_an_image_alone_may_have_positions_of_its_own() -> None:
    local = [[0, 0, 0], [0, 1, 1], [4, 4, 5]]
    layout = CUDALayout(Planner(GROUPS[0], TABLE, PAGE, axes=3))
    assert layout.image(b"", [[1]], 3, positions=local).rows[1:4].tolist() == local


def test_pages_that_a_window_has_passed_are_not_sent() -> None:
    seq = Sequence(Request("x", (TextSegment(tuple(range(40))),), SamplingParams()))
    seq.tables = [list(range(10))]
    layout = CUDALayout(Planner(GROUPS[1], TABLE, PAGE))
    for chunk, first, pages in (
        (Chunk(seq, 39, 1, True), 8, [8, 9]),
        (Chunk(seq, 30, 4, True), 6, [6, 7, 8]),
    ):
        (reader,) = layout.step([chunk]).readers[0]
        assert (reader.first_page, reader.pages.tolist()) == (first, pages)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 7))
def test_slices_are_full_but_for_the_last_and_only_a_chunks_end_samples(
    counts: list[int], size: int
) -> None:
    seq = Sequence(Request("x", (TextSegment(tuple(range(9))),), SamplingParams()))
    made = slices([Chunk(seq, 0, count, True) for count in counts], size)
    rows = [sum(chunk.count for chunk in part) for part in made]
    assert sum(rows) == sum(counts) and rows[:-1] == [size] * (len(rows) - 1)
    ends = [chunk.start + chunk.count for part in made for chunk in part if chunk.samples]
    assert ends == counts
