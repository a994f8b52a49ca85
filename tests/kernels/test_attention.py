"""The Triton attention equals the dense statement over random scenes: on a GPU natively, else in
Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.kernels import attention, work
from mmserve.kernels.launch import Launch
from mmserve.kernels.reference import rope_table
from tests.kernels.scene import THETA, Row, Scene, Shape, scenes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def readers(scene: Scene) -> list[work.Reader]:
    """The scene's plan in the terms of the work tables."""
    out = []
    for group, (count, rows) in zip(scene.plan.groups, scene.groups, strict=True):
        image = 0
        for b, row in enumerate(rows):
            images, before = [], 0
            for at, num_tokens in row.images:
                if at >= row.length:
                    continue
                pages = group.image_pages[image].numpy().astype(np.int32)
                pages = pages[: -(-num_tokens // scene.shape.page)]
                key = (id(group), image)
                images.append(work.ImagePart(key, pages, num_tokens, at + before, at))
                before += num_tokens
                image += 1
            hi = group.hi[b].tolist()
            pages = group.pages[b].numpy().astype(np.int32)[: -(-row.length // scene.shape.page)]
            first = group.start + b * count
            out.append(work.Reader(first, count, hi[0], pages, tuple(images), row.whole))
    return out


def attend(
    scene: Scene,
    some: list[work.Reader],
    *,
    share: bool = True,
    dtype: torch.dtype = torch.float32,
    programs: int = 7,
    long: bool = False,
) -> torch.Tensor:
    shape = scene.shape
    q = scene.q.to(DEVICE, dtype)
    builder = work.WorkBuilder(shape.group)
    tables = builder.build(some, len(q), share=share, long=long)
    heads = shape.kv_heads * shape.group
    scratch = attention.Scratch(tables.num_slots + 1, heads, shape.dim, q.device)
    scratch.parts.fill_(torch.nan)
    scratch.lses.fill_(torch.nan)
    out = torch.full_like(q, torch.nan)
    own, vision = ([p.to(DEVICE, dtype) for p in pool] for pool in (scene.own, scene.vision))
    attention.paged_attention(
        q,
        torch.from_numpy(tables.array).to(DEVICE),
        (own[0], own[1]),
        (vision[0], vision[1]),
        rope_table(1 + scene.longest, shape.dim, THETA).to(DEVICE),
        scene.scale,
        scratch,
        out,
        Launch(
            programs * (tables.small > 0),
            programs * (tables.large > 0),
            16 * (tables.num_slots > 0),
            tables.tile_rows,
        ),
    )
    return out.cpu()


@given(scenes())
@settings(max_examples=25, deadline=None)
def test_attention_equals_the_dense_statement(scene: Scene) -> None:
    out = attend(scene, readers(scene))
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("group", [1, 3, 7, 16, 20])
@pytest.mark.parametrize("dim", [16, 64, 80, 96])
def test_heads_of_any_grouping_and_width(group: int, dim: int) -> None:
    rows = [Row(37, ((5, 20), (9, 3))), Row(1)]
    scene = Scene(Shape(kv_heads=1, group=group, dim=dim), [(1, rows)])
    out = attend(scene, readers(scene))
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [255, 256, 257, 700])
def test_a_split_context_is_joined(length: int) -> None:
    scene = Scene(Shape(kv_heads=1, group=2), [(1, [Row(length, ((3, 300),)), Row(5)])])
    out = attend(scene, readers(scene))
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [64, 65, 150])
def test_a_long_chunk_runs_unsplit(count: int) -> None:
    row = Row(count + 7, ((0, 4), (3, 33), (count // 2, 20)))
    scene = Scene(Shape(kv_heads=1, group=2), [(count, [row])])
    out = attend(scene, readers(scene))
    torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


def test_an_image_alone_reads_itself_whole() -> None:
    for count in (20, 90):
        scene = Scene(Shape(kv_heads=1, group=2), [(count, [Row(count, whole=True)])])
        out = attend(scene, readers(scene))
        torch.testing.assert_close(out.double(), scene.expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("image_tokens", [20, 300])
def test_an_image_of_several_sequences_is_read_once(image_tokens: int) -> None:
    """All see one image, each at its own place, beside one of its own."""
    rows = [Row(9 + n, ((n, image_tokens), (n + 2, 5))) for n in range(6)]
    scene = Scene(Shape(kv_heads=1, group=4), [(1, rows)])
    alone = readers(scene)
    # Sequence 0's bytes stand for everyone's.
    first = alone[0].images[0]
    shared = [
        work.Reader(
            r.first_row,
            r.count,
            r.hi,
            r.pages,
            (
                work.ImagePart(
                    "x", first.pages, image_tokens, r.images[0].base, r.images[0].threshold
                ),
                *r.images[1:],
            ),
        )
        for r in alone
    ]
    together, apart = (attend(scene, shared, share=share) for share in (True, False))
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    tables, plain = (
        work.WorkBuilder(4).build(shared, 6, share=share).array for share in (True, False)
    )
    copies = 5 * -(-image_tokens // 16)  # of the image's page ids
    assert len(plain) - len(tables) >= copies


def test_programs_may_be_fewer_or_more_than_tasks() -> None:
    scene = Scene(Shape(), [(1, [Row(40, ((2, 9),)), Row(3)])])
    few, many = (attend(scene, readers(scene), programs=n) for n in (1, 50))
    assert torch.equal(few, many)


@given(scenes(queries=st.just(1)), st.data())
@settings(max_examples=15, deadline=None)
def test_a_sequence_has_the_same_bits_alone(scene: Scene, data: st.DataObject) -> None:
    together = attend(scene, readers(scene))
    reader = data.draw(st.sampled_from(readers(scene)))
    alone = attend(scene, [reader])
    rows = slice(reader.first_row, reader.first_row + reader.count)
    assert torch.equal(alone[rows], together[rows])
