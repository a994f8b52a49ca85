"""The Triton attention equals the dense statement over random scenes: on a GPU natively, else in
Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels import attention, work
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.launch import Launch
from mmserve.kernels.work_builder import WorkBuilder
from tests.kernels.scene import Row, Scene, Shape, angles, drafted, scenes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAR = 1_000_003
HALVES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()  # interpreted, it is wrong

# What nobody reads is loud; on a device an exponential that is too large says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")


def readers(scene: Scene) -> list[work.Reader]:
    """The scene's plan in the terms of the work tables."""
    out = []
    for group, bases in zip(scene.plan.groups, scene.bases, strict=True):
        owners = group.image_row.tolist()
        images = [
            work.ImagePart(
                int(group.image_pages[n][0]),  # nothing else begins with that page
                ids(group.image_pages[n]),
                int(group.image_len[n]),
                int(group.image_first[n]),
                base,
            )
            for n, base in enumerate(bases)
        ]
        reads = torch.stack((group.lo, group.hi, group.visual_lo, group.visual_hi), 1).numpy()
        for b in range(group.num_seqs):
            assert group.sink_tokens is not None
            mine = tuple(i for i, owner in zip(images, owners, strict=True) if owner == b)
            out.append(
                work.Reader(
                    group.start + b * group.num_queries,
                    group.num_queries,
                    tuple(reads[b, :, 0].tolist() if group.num_queries == 1 else reads[b]),
                    ids(group.pages[b]),
                    mine,
                    int(group.sink_tokens[b]),
                    tree=None if group.tree is None else group.tree[b].numpy(),
                )
            )
    return out


def ids(pages: torch.Tensor) -> work.Int32s:
    return pages.numpy().astype(np.int32)


def table(scene: Scene) -> torch.Tensor:
    """What queries are turned back by; where they are not, nothing that could be used."""
    bases = sorted({base for each in scene.bases for base in each if base is not None})
    rope = torch.empty(max(bases, default=0) + 1, 2, scene.shape.dim // 2)
    rope[: 1 if len(rope) > FAR else None] = torch.nan
    rope[bases, 0], rope[bases, 1] = angles(bases, scene.shape.dim)
    return rope.to(DEVICE)


def on_device(pages: Pages, dtype: torch.dtype) -> Pages:
    stored = dtype if pages.kind.plain else torch.uint8
    return pages._replace(k=pages.k.to(DEVICE, stored), v=pages.v.to(DEVICE, stored))


def attend(
    scene: Scene,
    some: list[work.Reader],
    *,
    share: bool = True,
    dtype: torch.dtype = torch.float32,
    programs: int = 7,
    long: bool = False,
    splits: work.Splits = work.SPLITS,
    at_once: int = 16,
    abreast: int = 1,
    tile_rows: int = 0,
) -> torch.Tensor:
    """[T, H, D], of which rows that nobody asks about are not numbers."""
    shape = scene.shape
    q = scene.q.to(DEVICE, dtype)
    builder = WorkBuilder(shape.group, splits, abreast=abreast)
    tables = builder.build(some, len(q), share=share, long=long)
    scratch = attention.Scratch(tables.num_slots + 1, shape.heads, shape.dim, q.device)
    scratch.parts.fill_(torch.nan)
    scratch.lses.fill_(torch.nan)
    out = torch.full_like(q, torch.nan)
    text, vision = (on_device(pool, dtype) for pool in (scene.text, scene.vision))
    attention.paged_attention(
        q,
        torch.from_numpy(work.join([tables])).to(DEVICE),
        text,
        vision,
        table(scene),
        scene.scale,
        scratch,
        out,
        Launch(
            programs * (tables.small > 0),
            programs * (tables.large > 0),
            at_once * (tables.num_slots > 0),
            max(tables.tile_rows, tile_rows),
            trees=tables.trees,
        ),
        softcap=shape.softcap,
        sinks=None if scene.sinks is None else scene.sinks.to(DEVICE),
    )
    return out.cpu()


def assert_right(scene: Scene, *, long: bool = False) -> None:
    out = attend(scene, readers(scene), long=long)
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


@given(scenes(extras=True), st.booleans())
@settings(max_examples=30, deadline=None)
def test_attention_equals_the_dense_statement(scene: Scene, long: bool) -> None:
    assert_right(scene, long=long)


@pytest.mark.parametrize("group", [1, 3, 7, 16, 20])
@pytest.mark.parametrize("dim", [16, 64, 80, 96])
def test_heads_of_any_grouping_and_width(group: int, dim: int) -> None:
    rows = [Row(37, ((5, 20), (9, 3))), Row(1)]
    assert_right(Scene(Shape(kv_heads=1, group=group, dim=dim), [(1, rows)]))


@pytest.mark.parametrize("lo", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_a_window_may_begin_anywhere(lo: int) -> None:
    """Of one query, and of queries whose windows begin one behind the other."""
    single = [Row(n, reads=((min(lo, n), n, 0, 0),)) for n in (1, 31, 32, 33, 66, 97)]
    sliding = Row(80, reads=tuple((min(lo + i, 80), min(65 + i, 80), 0, 0) for i in range(20)))
    assert_right(Scene(Shape(kv_heads=1, group=2, dim=6), [(1, single), (20, [sliding])]))


def test_pages_before_a_window_need_not_be_there() -> None:
    single = Row(90, reads=((70, 90, 0, 0),))
    sliding = Row(90, reads=tuple((70 + i, 80 + i, 0, 0) for i in range(9)))
    scene = Scene(Shape(kv_heads=1, group=2, dim=6), [(1, [single]), (9, [sliding])])
    cut = [r._replace(pages=r.pages[4:], first_page=4) for r in readers(scene)]
    torch.testing.assert_close(attend(scene, cut).double(), scene.expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [255, 256, 257, 700])
def test_a_split_context_is_joined(length: int) -> None:
    rows = [Row(length, ((3, 300),)), Row(5), Row(length, reads=((100, length, 0, 0),))]
    for learned in (False, True):
        assert_right(Scene(Shape(kv_heads=1, group=2, learned=learned), [(1, rows)]))


@pytest.mark.parametrize(("count", "in_context"), [(64, False), (65, True), (150, False)])
def test_a_long_chunk_runs_unsplit(count: int, in_context: bool) -> None:
    row = Row(count + 7, ((0, 4), (3, 33), (count // 2, 20)))
    scene = Scene(Shape(kv_heads=1, group=2, in_context=in_context), [(count, [row])])
    assert_right(scene, long=True)


def test_a_long_chunk_slides_through_text_and_images() -> None:
    """Rows of one chunk whose windows of 20 begin in text, in either image, and behind both."""
    images = ((4, 15), (25, 9))
    order = [("text", i) for i in range(4)] + [("visual", v) for v in range(15)]
    order += [("text", i) for i in range(4, 25)] + [("visual", v) for v in range(15, 24)]
    order += [("text", i) for i in range(25, 50)]
    reads = []
    for text in range(50):
        end = order.index(("text", text)) + 1
        seen = order[max(end - 20, 0) : end]
        spans = [[i for kind, i in seen if kind == which] for which in ("text", "visual")]
        flat = [(span[0], span[-1] + 1) if span else (0, 0) for span in spans]
        reads.append((*flat[0], *flat[1]))
    row = Row(50, images, reads=tuple(reads))
    for group, sink_tokens, long in ((2, 0, False), (8, 5, False), (8, 5, True)):
        scene = Scene(Shape(1, group, 6), [(50, [replace(row, sink_tokens=sink_tokens)])])
        assert_right(scene, long=long)


def test_an_image_alone_reads_itself_whole() -> None:
    for count in (20, 90):
        none = ((0, 0, 0, count),) * count
        scene = Scene(
            Shape(kv_heads=1, group=2, in_context=True),
            [(count, [Row(count, ((0, count),), reads=none)])],
        )
        assert_right(scene)


def test_an_image_in_its_context_reads_text_before_it_and_itself_so_far() -> None:
    reads = tuple((0, 3, 0, n) for n in range(1, 41))
    shape = Shape(kv_heads=1, group=2, in_context=True)
    assert_right(Scene(shape, [(40, [Row(43, ((3, 40),), reads=reads)])]))


def test_a_whole_prompt_sees_itself() -> None:
    row = Row(33, ((0, 17), (9, 16)), reads=((0, 33, 0, 33),) * 33)
    assert_right(Scene(Shape(kv_heads=1, group=2, in_context=True), [(33, [row])]))


def test_cross_attention_reads_images_alone_and_before_the_first_nothing() -> None:
    reads = ((0, 0, 0, 0), (0, 0, 0, 5), (0, 0, 5, 21))
    chunk = Row(9, ((1, 5), (7, 16)), reads=reads)
    single = [replace(chunk, reads=(read,)) for read in reads]
    for learned in (False, True):
        shape = Shape(in_context=True, learned=learned)
        assert_right(Scene(shape, [(1, single), (3, [chunk])]))
        assert_right(Scene(shape, [(1, single[:1])]))


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_images_stand_first_and_last_at_page_borders(length: int) -> None:
    row = Row(length, ((0, 17), (length - 1, 1), (length - 1, 16)))
    assert_right(Scene(Shape(), [(1, [row, Row(length)]), (min(length, 3), [row])]))


def test_forty_images_in_one_sequence() -> None:
    images = tuple((n // 3, 1 + 7 * n % 17) for n in range(40))
    rows = [Row(20, images), Row(16)]
    assert_right(Scene(Shape(kv_heads=1, group=2, dim=6, page=4), [(1, rows), (5, rows[:1])]))


@pytest.mark.parametrize("in_context", [False, True])
def test_positions_beyond_a_million(in_context: bool) -> None:
    row = Row(20, ((0, 5), (3, 17)))
    shape = Shape(kv_heads=1, group=2, in_context=in_context, origin=FAR)
    assert_right(Scene(shape, [(1, [row]), (9, [row])]))


@pytest.mark.parametrize("image_tokens", [20, 300])
@pytest.mark.parametrize("in_context", [False, True])
def test_an_image_of_several_sequences_is_read_once(image_tokens: int, in_context: bool) -> None:
    """All see one image, each at its own place, beside one of its own."""
    rows = [Row(9 + n, ((n, image_tokens), (n + 2, 5))) for n in range(6)]
    scene = Scene(Shape(kv_heads=1, group=4, in_context=in_context), [(1, rows)])
    alone = readers(scene)
    # Sequence 0's bytes stand for everyone's.
    first = alone[0].images[0]
    shared = [
        r._replace(
            images=(replace(r.images[0], key="x", pages=first.pages), *r.images[1:]),
        )
        for r in alone
    ]
    together, apart = (attend(scene, shared, share=share) for share in (True, False))
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    tables, plain = (WorkBuilder(4).build(shared, 6, share=share) for share in (True, False))
    items = -(-image_tokens // work.IMAGE_SPLIT)
    assert (tables.large, plain.large) == (items, 0)
    assert plain.small - tables.small == 6 * items


@st.composite
def crowds(draw: st.DrawFn) -> Scene:
    """Many single queries, each over some of the same few images: in any order, each at its own
    place, one perhaps twice, and perhaps only from somewhere on."""
    tokens = draw(st.lists(st.sampled_from([1, 16, 33, 64, 130]), min_size=1, max_size=4))
    usual = draw(st.permutations(range(len(tokens))))
    rows = []
    for _ in range(draw(st.integers(2, 40))):
        few = st.lists(st.integers(0, len(tokens) - 1), max_size=5)
        names = draw(st.just(usual) | few)
        places = sorted(draw(st.integers(0, 8)) for _ in names)
        images = tuple(zip(places, (tokens[name] for name in names), strict=True))
        end = sum(count for _, count in images)
        window = draw(st.just(0) | st.integers(0, end))
        rows.append(Row(9, images, reads=((0, 9, window, end),), names=tuple(names)))
    shape = Shape(kv_heads=1, group=draw(st.sampled_from([1, 3, 7])))
    return Scene(shape, [(1, rows)], draw(st.integers(0, 99)))


FIXED = work.Splits((), (256,))


@given(crowds(), st.integers(1, 40), st.sampled_from([work.SPLITS, FIXED]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_images_of_many_sequences_are_read_right(
    scene: Scene, abreast: int, splits: work.Splits, long: bool
) -> None:
    out = attend(scene, readers(scene), abreast=abreast, splits=splits, long=long)
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


def test_fifty_sequences_see_the_same_images_and_one_chunk_beside_them() -> None:
    """Tiles are as large as the images' readers need; the chunk's are, too."""
    images = ((2, 200), (5, 90))
    rows = [Row(9 + n, ((n % 3, 200), *images[1:]), names=(0, 1)) for n in range(50)]
    scene = Scene(Shape(kv_heads=1, group=7), [(1, rows), (5, [Row(30, images)])])
    tables = WorkBuilder(7).build(readers(scene), len(scene.q))
    assert tables.tile_rows == 64
    torch.testing.assert_close(
        attend(scene, readers(scene), abreast=8).double(), scene.expected, rtol=1e-3, atol=1e-4
    )


def test_sets_of_one_step_may_be_cut_for_shorter_tiles_than_they_run_in() -> None:
    few, many = ([Row(9, ((3, 40),), names=(0,))] * count for count in (2, 64))
    scene = Scene(Shape(kv_heads=1, group=7), [(1, few)])
    sets = []
    for rows in (few, many):
        some = readers(Scene(scene.shape, [(1, rows)]))
        sets.append(WorkBuilder(7).build(some, len(rows)))
    launch = Launch.of(sets, 1, 1)
    assert [tables.tile_rows for tables in sets] == [32, launch.tile_rows]
    out = attend(scene, readers(scene), tile_rows=launch.tile_rows)
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


def test_a_shared_image_has_the_bits_of_one_read_alone_where_all_is_cut_alike() -> None:
    rows = [Row(9, ((n % 5, 300), (7, 40)), names=(n % 2, 2)) for n in range(9)]
    scene = Scene(Shape(kv_heads=1, group=7), [(1, rows)])
    together, apart = (
        attend(scene, readers(scene), share=share, splits=FIXED, at_once=1, abreast=9)
        for share in (True, False)
    )
    assert torch.equal(together, apart)


def test_who_reads_a_shared_image_in_part_reads_it_alone() -> None:
    rows = [Row(9, ((2, 300),), reads=((0, 9, lo, hi),)) for lo, hi in ((0, 300), (7, 300), (0, 9))]
    scene = Scene(Shape(kv_heads=1, group=4), [(1, rows)])
    first = readers(scene)[0].images
    assert_shared = [r._replace(images=first) for r in readers(scene)]
    together, apart = (attend(scene, assert_shared, share=share) for share in (True, False))
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_what_single_queries_read_of_images_is_kept_until_it_changes() -> None:
    pages = np.arange(9, dtype=np.int32)
    images = (work.ImagePart("x", pages, 30, 0, 0),)
    builder = WorkBuilder(2)

    def built(hi: int, visual_lo: int) -> list[int]:
        reader = work.Reader(0, 1, (0, hi, visual_lo, 30), pages, images)
        again: list[int] = WorkBuilder(2).build([reader], 1).body.tolist()
        assert builder.build([reader], 1).body.tolist() == again
        return again

    assert built(5, 0) != built(6, 0) != built(6, 1) != built(7, 1)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    row = Row(70, ((5, 20), (9, 3)), reads=tuple((i, 60 + i, i, 23) for i in range(10)))
    shape = Shape(kv_heads=1, group=4, dim=64, softcap=30.0, learned=True)
    scene = Scene(shape, [(1, [Row(300, ((3, 40),))]), (10, [row])])
    out = attend(scene, readers(scene), dtype=dtype).double()
    error = (out - scene.expected).norm() / scene.expected.norm()
    assert float(error) < 1e-2


WIDE = [
    *(Shape(8, 1, 64), Shape(2, 7, 80), Shape(4, 4, 96), Shape(1, 8, 112)),
    *(Shape(8, 4, 128), Shape(1, 40, 160), Shape(2, 5, 192), Shape(2, 2, 256)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wide heads and long contexts")
@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize("in_context", [False, True])
def test_wide_heads(shape: Shape, in_context: bool) -> None:
    images = ((0, 576), (40, 64), (900, 33))
    sliding = tuple((max(i - 200, 0), 901 + i, min(i, 600), 673) for i in range(99))
    groups = [
        (1, [Row(n, images) for n in (1, 15, 16, 17, 999)] + [Row(5000)]),
        (99, [Row(1000, images), Row(1000, images, reads=sliding)]),
    ]
    softcap = 20.0 if in_context else None
    scene = Scene(replace(shape, in_context=in_context, softcap=softcap, learned=True), groups)
    bounds = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
    if shape.dim <= 96:  # each wider kernel would take a minute to compile
        bounds[torch.float32] = 1e-3
    for dtype, bound in bounds.items():
        for long in (False, True):
            out = attend(scene, readers(scene), dtype=dtype, long=long, programs=132).double()
            assert float((out - scene.expected).norm() / scene.expected.norm()) < bound


def test_programs_may_be_fewer_or_more_than_tasks() -> None:
    scene = Scene(Shape(), [(1, [Row(40, ((2, 9),)), Row(3)])])
    few, many = (attend(scene, readers(scene), programs=n) for n in (1, 50))
    assert torch.equal(few, many)


def test_sets_of_tables_stand_side_by_side() -> None:
    """Layers that read all, and layers with a window: one array, one set for each."""
    whole = Row(70, ((3, 9),))
    windowed = replace(whole, reads=((50, 70, 9, 9),))
    scenes_of = [Scene(Shape(), [(1, [row])]) for row in (whole, windowed)]
    builders = [WorkBuilder(3) for _ in scenes_of]
    rows = np.full((3, 1), 7, np.int32)
    sets: list[work.WorkTables] = []
    at = 2 * work.HEADER + rows.size
    for builder, scene in zip(builders, scenes_of, strict=True):
        sets.append(builder.build(readers(scene), 1, at=at))
        at += len(sets[-1].body)
    array = work.join(sets, rows)
    assert array[2 * work.HEADER :][:3].tolist() == [7, 7, 7]
    launch = Launch.of(sets, 2, 3)
    for number, scene in enumerate(scenes_of):
        scratch = attention.Scratch(launch.merge * 8, 6, 16, torch.device(DEVICE))
        out = torch.full_like(scene.q, torch.nan).to(DEVICE)
        text, vision = (
            Pages(pool.k.to(DEVICE), pool.v.to(DEVICE)) for pool in (scene.text, scene.vision)
        )
        attention.paged_attention(
            scene.q.to(DEVICE),
            torch.from_numpy(array).to(DEVICE),
            text,
            vision,
            table(scene),
            scene.scale,
            scratch,
            out,
            launch,
            group=number,
        )
        torch.testing.assert_close(out.cpu().double(), scene.expected, rtol=1e-3, atol=1e-4)


@given(scenes(queries=st.just(1), extras=True), st.data())
@settings(max_examples=15, deadline=None)
def test_a_sequence_has_the_same_bits_alone(scene: Scene, data: st.DataObject) -> None:
    together = attend(scene, readers(scene))
    reader = data.draw(st.sampled_from(readers(scene)))
    alone = attend(scene, [reader])
    rows = slice(reader.first_row, reader.first_row + reader.num_queries)
    assert torch.equal(alone[rows], together[rows])


def test_a_query_has_the_same_bits_in_any_chunk_where_all_is_cut_alike() -> None:
    """Single, among its neighbours, or with half of them: windows, images and first tokens."""
    reads = tuple((100 + 9 * i, 500 + i, i % 4, 280 + 5 * i) for i in range(8))
    row = Row(510, ((9, 300), (30, 20)), reads=reads, sink_tokens=6)
    scene = Scene(Shape(kv_heads=1, group=2), [(8, [row])])
    (chunk,) = readers(scene)
    parts = chunk.matrix

    def some(first: int, end: int) -> torch.Tensor:
        mine = parts[:, first:end]
        reader = chunk._replace(
            first_row=first,
            num_queries=end - first,
            reads=tuple(mine[:, 0].tolist() if end - first == 1 else mine),
        )
        return attend(scene, [reader], splits=FIXED, at_once=1)[first:end]

    whole = some(0, 8)
    torch.testing.assert_close(whole.double(), scene.expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(torch.cat([some(0, 3), some(3, 8)]), whole)
    assert torch.equal(torch.cat([some(i, i + 1) for i in range(8)]), whole)


@given(drafted(extras=True), st.sampled_from([work.SPLITS, FIXED]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_draft_trees_equal_the_dense_statement(
    scene: Scene, splits: work.Splits, long: bool
) -> None:
    out = attend(scene, readers(scene), splits=splits, long=long)
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


@given(drafted(extras=True), st.booleans())
@settings(max_examples=15, deadline=None)
def test_drafts_whose_rows_read_alike_may_be_told_so(scene: Scene, long: bool) -> None:
    told = [alike(reader) for reader in readers(scene)]
    event(f"{sum(isinstance(r.reads[1], int) for r in told)} of them")
    out = attend(scene, told, long=long)
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


def alike(reader: work.Reader) -> work.Reader:
    """With one number for what all its rows have."""
    if reader.tree is None or any(row.min() < row.max() for row in reader.matrix):
        return reader
    lo, hi, visual_lo, visual_hi = reader.matrix[:, 0].tolist()
    return reader._replace(reads=(lo, hi, visual_lo, visual_hi))


def test_a_draft_of_sixty_four_tokens_uses_every_bit() -> None:
    """As a chain, and as two that alternate: of one's tokens none is read by the other."""
    for parents in (range(-1, 63), [max(i - 2, -1) for i in range(64)]):
        row = Row.draft(250, parents, ((3, 17), (249, 5)))
        assert_right(Scene(Shape(kv_heads=1, group=3), [(65, [row])]))


def test_drafted_tokens_in_a_row_have_the_bits_of_decoding_them_where_all_is_cut_alike() -> None:
    """Whoever else is in the tree, and where the row crosses from one item into the next."""
    row = Row.draft(253, [-1, 0, 1, 2, -1, 4, 0], ((9, 40),))
    scene = Scene(Shape(kv_heads=1, group=7), [(8, [row])])
    in_tree = attend(scene, readers(scene), splits=FIXED, at_once=1)
    (reader,) = readers(scene)
    singles = [
        reader._replace(first_row=n, num_queries=1, reads=(0, 253 + n, 0, 40), tree=None)
        for n in range(5)
    ]
    alone = attend(scene, singles, splits=FIXED, at_once=1)
    assert torch.equal(in_tree[:5], alone[:5])
