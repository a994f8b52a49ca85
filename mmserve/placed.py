"""Where an image stands in a sequence.

Owns `PlacedImage` and `Gap`. Knows nothing of pages' contents. What text and visual indices are,
`mmserve.sequence` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.request import ImageInput


@dataclass
class PlacedImage:
    """An image at its place: before text token `text_index`, positions from `base`, its tokens
    `visual_index` and on among the sequence's visual tokens.

    `key` names its KV in the vision pool: the image's digest where its KV depends on nothing else,
    or with everything before it, if `in_context`. `skip`: tokens of what is stored under the key
    that stand before the image's own. `pages`: by layer group, while the sequence runs; empty where
    it does not hold the image.
    """

    image: ImageInput
    text_index: int
    base: int
    visual_index: int
    key: bytes
    in_context: bool = False
    skip: int = 0
    pages: list[list[int]] | None = None

    @property
    def num_stored(self) -> int:
        """Tokens under its key."""
        return self.skip + self.image.num_tokens

    @property
    def start(self) -> int:
        """Its first token's place among all tokens of the sequence."""
        return self.text_index + self.visual_index

    @property
    def end(self) -> int:
        return self.start + self.image.num_tokens


@dataclass(eq=False)
class Gap:
    """The place of a marked image: before text token `text_index`, as many positions as the image
    takes. It is segment number `segment`."""

    image: ImageInput
    segment: int
    text_index: int
