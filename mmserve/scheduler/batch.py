"""What one step computes: the hand-over from the scheduler to the runner.

Owns no policy and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmserve.request import ImageInput, Sequence


@dataclass(frozen=True)
class ImageJob:
    """An image to encode and write to these vision pages before any text of this step runs."""

    image: ImageInput
    pages: list[int]


@dataclass(frozen=True)
class Chunk:
    """Text tokens [start, start + count) of a sequence; `samples`: the last one has a successor
    to be chosen."""

    seq: Sequence
    start: int
    count: int
    samples: bool


@dataclass
class Batch:
    """One forward pass: images first, then all text chunks together."""

    chunks: list[Chunk] = field(default_factory=list)
    images: list[ImageJob] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(c.count for c in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.images)
