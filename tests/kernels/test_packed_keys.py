"""Attention over pools of every format equals the dense statement over the values that the formats
give back: on a GPU natively, else in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels.kv_formats import FORMATS, PLAIN, KVFormat
from tests.kernels.scene import Row, Scene, Shape
from tests.kernels.test_attention import attend, readers

KINDS = [kind for kind in FORMATS.values() if not kind.plain]
TOLERANCE = 2e-3  # of the whole answer; formats' elements and queries are computed with in float16

# What nobody reads is loud; on a device an exponential that is too large says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")


def name(kind: KVFormat) -> str:
    return kind.name


def error(scene: Scene, dtype: torch.dtype = torch.float32) -> float:
    out = attend(scene, readers(scene), dtype=dtype).double()
    return float((out - scene.expected).norm() / scene.expected.norm())


def scene_of(shape: Shape) -> Scene:
    """Single queries and a chunk over text and images, none of whole blocks."""
    single = [Row(150, ((3, 77), (9, 3))), Row(1), Row(70, reads=((33, 68, 0, 0),))]
    return Scene(shape, [(1, single), (9, [Row(75, ((5, 130),))])])


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_both_pools_in_one_format(kind: KVFormat, dim: int) -> None:
    assert error(scene_of(Shape(kv_heads=1, group=4, dim=dim, kinds=(kind, kind)))) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_the_vision_pool_alone_may_have_a_format(kind: KVFormat) -> None:
    shape = Shape(kv_heads=2, group=3, dim=64, kinds=(PLAIN, kind), softcap=30.0, learned=True)
    assert error(scene_of(shape)) < TOLERANCE


pairs = st.tuples(*[st.sampled_from(list(FORMATS.values()))] * 2)


@given(pairs, st.booleans(), st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_any_two_formats(kinds: tuple[KVFormat, KVFormat], in_context: bool, seed: int) -> None:
    shape = Shape(kv_heads=1, group=2, dim=16, kinds=kinds, in_context=in_context, origin=99)
    assert error(replace(scene_of(shape), seed=seed)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_drafts_and_sinks_are_read_in_any_format(kind: KVFormat) -> None:
    shape = Shape(kv_heads=1, group=2, dim=64, kinds=(kind, PLAIN))
    draft = Row.draft(66, (-1, 0, 0, 1), ((4, 20),))
    sinks = Row(140, reads=((130, 140, 0, 0),) * 5, sink_tokens=3)
    assert error(Scene(shape, [(5, [draft, sinks])])) < TOLERANCE
