"""How long the search for text that is still good may take, however many images are marked."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import pytest

from mmserve.request import ImageInput, ImageSegment, Request, SamplingParams, Segment, TextSegment
from mmserve.scheduler.marks import MOST_LOOKS, settle
from mmserve.sequence import Sequence as Seq

COUNT = 150


def conversation() -> Seq:
    """As many marked images, ten tokens behind each."""
    segments: list[Segment] = []
    for i in range(COUNT):
        digest = hashlib.sha256(b"%d" % i).digest()
        segments.append(ImageSegment(ImageInput(digest, b"", 4, None), marked=True))
        segments.append(TextSegment((i,) * 10))
    return Seq(Request("long", tuple(segments), SamplingParams()))


def stored(seq: Seq, others: bool) -> list[Hashable]:
    """Text that saw the first half of the images, and then ceased to see them one by one, the last
    first; `others`: it goes on behind that as text that saw all the rest."""
    gaps = [gap for gap in seq.gaps if gap.text_index < 5 * COUNT]
    for n, gap in enumerate(reversed(gaps)):
        seq.unsee([gap], 5 * COUNT + 4 * n)
    return seq.keys if others else seq.keys[: 9 * COUNT]


@pytest.mark.parametrize("cached", ["nothing", "a chain", "all of a chain"])
def test_the_search_looks_so_often_and_decides_everything(cached: str) -> None:
    known = [] if cached == "nothing" else stored(conversation(), cached == "all of a chain")
    looks = 0

    def reach(keys: Sequence[Hashable]) -> int:
        nonlocal looks
        looks += 1
        pairs = zip(keys[: len(keys) - 1], known, strict=False)
        return next(
            (i for i, (mine, its) in enumerate(pairs) if mine != its),
            min(len(known), len(keys) - 1),
        )

    seq = conversation()
    settle(seq, reach)
    assert not seq.open_gaps and len(seq.marks) == COUNT
    assert looks <= MOST_LOOKS + COUNT + 2
    assert len(seq.keys) == seq.num_tokens
    seen = [gap for gap in seq.gaps if gap.text_index >= reach(seq.keys)]
    assert not seen, "nothing stays that no cached text has seen"
