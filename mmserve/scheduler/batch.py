"""What one step computes: the hand-over from the scheduler to the runner.

Owns no policy and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mmserve.placed import PlacedImage
from mmserve.request import ImageInput
from mmserve.sequence import Sequence
from mmserve.spec.draft import AnyDraft


@dataclass(frozen=True)
class ImageJob:
    """An image to encode by itself and to write under `key` before any text of this step runs.

    `seq`: the first that waits for it; `pages`: vision pages by layer group; `regime`: that of its
    rotary angles.
    """

    seq: Sequence
    image: ImageInput
    key: bytes
    pages: list[list[int]]
    regime: int = 0


@dataclass(frozen=True)
class ContextImage:
    """An image to compute in its sequence, before the text token that it stands before.

    `writes`: by layer group, whether its KV is missing there.
    """

    placed: PlacedImage
    writes: tuple[bool, ...]


class PageCopy(NamedTuple):
    """Text page `source` of a layer group is to be copied to page `target`; `residual`: both are
    pages of its residual."""

    group: int
    source: int
    target: int
    residual: bool = False


@dataclass(frozen=True)
class Chunk:
    """Text tokens [start, start + count) of a sequence and some of its images; `samples`: the last
    token has a successor to be chosen. `copies` are made before anything is written. `draft`:
    guesses of what comes after it, computed with it; each has a successor chosen, too."""

    seq: Sequence
    start: int
    count: int
    samples: bool
    images: tuple[ContextImage, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    draft: AnyDraft | None = None

    @property
    def num_rows(self) -> int:
        """Text and visual tokens that are computed, guessed ones too."""
        if self.draft is not None:
            return self.count + len(self.draft)
        if not self.images:
            return self.count
        return self.count + sum(c.placed.image.num_tokens for c in self.images)

    @property
    def num_chosen(self) -> int:
        """Rows whose successor is chosen, the last ones of all."""
        if not self.samples:
            return 0
        return 1 if self.draft is None else 1 + len(self.draft)

    @property
    def decodes(self) -> bool:
        """Whether it is the last known token alone, but for a draft."""
        return self.draft is not None or self.num_rows == 1


@dataclass
class Batch:
    """One forward pass: images first, then all text chunks together.

    `held`: chunks that were to be in it, but wait for images. Nothing of them is done but copies of
    pages, so they are scheduled again.
    """

    chunks: list[Chunk] = field(default_factory=list)
    images: list[ImageJob] = field(default_factory=list)
    held: list[Chunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Text and visual tokens of the chunks."""
        return sum(c.num_rows for c in self.chunks)

    @property
    def only_decodes(self) -> bool:
        """Whether all chunks are single rows, or were without their drafts."""
        return all(chunk.decodes for chunk in self.chunks)

    @property
    def has_drafts(self) -> bool:
        return any(chunk.draft is not None for chunk in self.chunks)

    @property
    def copies(self) -> list[PageCopy]:
        """To be made before anything is written; the pages are their owners' already."""
        return [copy for chunk in (*self.chunks, *self.held) for copy in chunk.copies]

    @property
    def computed(self) -> set[bytes]:
        """Keys of the images that are computed in their contexts."""
        return {context.placed.key for chunk in self.chunks for context in chunk.images}

    def __bool__(self) -> bool:
        return bool(self.chunks or self.images)

    def without(self, late: Callable[[ImageInput], bool]) -> Batch:
        """What of it needs no image that is `late`."""
        keys = {job.key for job in self.images if late(job.image)}
        parts: tuple[list[Chunk], list[Chunk]] = ([], [])
        for chunk in self.chunks:
            seq, shown = chunk.seq, chunk.images
            waits = not seq.images_ready and any(placed.key in keys for placed in seq.images)
            parts[waits or any(late(context.placed.image) for context in shown)].append(chunk)
        images = [job for job in self.images if job.key not in keys]
        return Batch(parts[0], images, parts[1])
