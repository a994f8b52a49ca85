"""A single row's kernel does what turning, storing and attention do one after another."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels import attention, fused, work
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.launch import Launch
from mmserve.kernels.reference import NOWHERE, rope_table, vision_slot
from mmserve.kernels.row_attention import attend_row
from mmserve.kernels.work_builder import WorkBuilder
from tests.kernels.scene import Row, Scene, Shape, shapes
from tests.kernels.test_attention import DEVICE, HALVES, readers, table

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")


class Asked(NamedTuple):
    """How the row of a scene is asked. `rotary`: dimensions that are turned, None: all."""

    norm: bool = False
    rotary: int | None = None
    by_place: bool = True
    few: bool = True
    stored: bool = True
    dtype: torch.dtype = torch.float32
    programs: int = 3
    splits: work.Splits = work.SPLITS


def own_slot(scene: Scene) -> int:
    """Where the row's own token is: the last that it reads."""
    (reader,) = readers(scene)
    _, hi, _, visual_hi = reader.reads
    size = scene.shape.page
    if hi > reader.reads[0]:
        return int(reader.pages[(hi - 1) // size] * size + (hi - 1) % size)
    assert visual_hi > reader.reads[2], "it reads nothing"
    image = next(i for i in reader.images if visual_hi <= i.first + i.num_tokens)
    at = visual_hi - 1 - image.first
    return int(vision_slot(int(image.pages[at // size]) * size + at % size))


def both_ways(scene: Scene, asked: Asked) -> list[tuple[Tensor, ...]]:
    """(out, text K and V, vision K and V) of the one kernel, and of the three."""
    shape, dtype = scene.shape, asked.dtype
    random = torch.Generator().manual_seed(scene.seed + 1)
    qkv = torch.randn(1, (shape.heads + 2 * shape.kv_heads) * shape.dim, generator=random)
    slot = torch.tensor([own_slot(scene) if asked.stored else NOWHERE], dtype=torch.int32)
    cos, sin = rope_table(9, shape.dim, 100.0).unbind(1)
    places = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    turned = fused.Turns(cos.to(DEVICE), sin.to(DEVICE), places)
    if not asked.by_place:
        turned = fused.Turns(cos[7:8].to(DEVICE), sin[7:8].to(DEVICE))
    gains = torch.randn(2, shape.dim, generator=random).to(DEVICE)
    norm = fused.HeadNorm(gains[0], gains[1], 1e-6) if asked.norm else None
    tables = WorkBuilder(shape.group, asked.splits).build(readers(scene), 1)
    merge = 2 * (tables.num_slots > 0)
    launch = Launch(asked.programs, 0, merge, tables.tile_rows, few=asked.few)
    joined = torch.from_numpy(work.join([tables])).to(DEVICE)
    options: dict[str, Any] = {"softcap": shape.softcap}
    options["sinks"] = None if scene.sinks is None else scene.sinks.to(DEVICE)
    answers = []
    for alone in (True, False):
        text, vision = (
            [p.to(DEVICE, dtype, copy=True) for p in pool[:2]]
            for pool in (scene.text, scene.vision)
        )
        pools = Pages(text[0], text[1]), Pages(vision[0], vision[1])
        scratch = attention.Scratch(tables.num_slots + 1, shape.heads, shape.dim, text[0].device)
        scratch.parts.fill_(torch.nan)
        x, out = qkv.to(DEVICE, dtype), torch.full_like(scene.q, torch.nan).to(DEVICE, dtype)
        rest: list[Any] = [table(scene), scene.scale, scratch, out, launch]
        if alone:
            how: dict[str, Any] = {"norm": norm, "rotary": asked.rotary, **options}
            attend_row(x, turned, slot.to(DEVICE), joined, *pools, *rest, **how)
            assert not scratch.arrived.any()
        else:
            q = torch.empty_like(out)
            fused.rotate_store(x, turned, slot.to(DEVICE), q, *pools, norm, asked.rotary)
            attention.paged_attention(q, joined, *pools, *rest, **options)
        answers.append((out.cpu(), *(p.cpu() for p in (*text, *vision))))
    return answers


def assert_same(scene: Scene, asked: Asked) -> None:
    bound = 1e-5 if asked.dtype == torch.float32 else 1e-2
    (out, *pools), (expected, *others) = both_ways(scene, asked)
    torch.testing.assert_close(out, expected, rtol=bound, atol=bound)
    for pool, other in zip(pools, others, strict=True):
        torch.testing.assert_close(pool, other, rtol=1e-6, atol=1e-6)


@given(
    shape=shapes(extras=True),
    length=st.integers(1, 70),
    images=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), max_size=2),
    window=st.integers(1, 80),
    sinks=st.sampled_from([0, 3]),
    asked=st.builds(
        Asked, norm=st.booleans(), rotary=st.sampled_from([None, 2]), by_place=st.booleans(),
        few=st.booleans(), stored=st.booleans(), programs=st.integers(1, 9),
        dtype=st.just(torch.float32),
        splits=st.sampled_from([work.SPLITS, work.Splits((), (16,))]),
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_one_kernel_does_what_three_do(
    shape: Shape,
    length: int,
    images: list[tuple[int, int]],
    window: int,
    sinks: int,
    asked: Asked,
    seed: int,
) -> None:
    placed = tuple(sorted((min(at, length - 1), n) for at, n in images))
    seen = sum(n for _, n in placed)
    reads = ((max(length - window, 0), length, 0, seen),)
    row = Row(length, placed, reads=reads, sink_tokens=sinks)
    assert_same(Scene(shape, [(1, [row])], seed=seed), asked)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("dim", "rotary", "group"), [(64, None, 1), (80, 32, 1), (96, None, 4), (256, None, 2)]
)
def test_heads_of_public_widths(
    dim: int, rotary: int | None, group: int, dtype: torch.dtype
) -> None:
    scene = Scene(Shape(kv_heads=2, group=group, dim=dim), [(1, [Row(150)])])
    scene.text = Pages(scene.text.k / 100, scene.text.v / 100)
    assert_same(scene, Asked(norm=dim == 256, rotary=rotary, dtype=dtype))


def test_an_image_row_finds_itself_among_what_it_reads() -> None:
    """It reads nothing but its image, in which it is the last."""
    row = Row(1, ((0, 5),), reads=((1, 1, 0, 5),))
    assert_same(Scene(Shape(in_context=True), [(1, [row])]), Asked())
