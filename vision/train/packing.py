"""Dialogues side by side in rows of one length, and their images beside them.

Owns where each finds room and how a row says what belongs together. Arrays only: what a mask or a
loss makes of them is not known here. Each piece of an image that is cut up takes the room of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmserve.vision.train.dialogue import Dialogue
from mmserve.vision.train.stage import Packing

NOTHING = -1  # a dialogue's number, where there is none
MOST_MISSES = 4  # dialogues in a row that find no room, before a shard is full


class Shard(NamedTuple):
    """Rows [R, T] and images. `tokens` int32, 0 in images; `latent` int32: which visual token of
    all of the shard's stands there, or -1; `image` int16: its number in the shard from 1, its first
    piece's where it has several, 0 for text; `dialogue` int16: which of the row's, -1 where none
    is; `positions` int32: in it; `answers` bool. `pixels` uint8 [N, 3, size, size], of each piece,
    black where there is none."""

    tokens: Tensor
    latent: Tensor
    image: Tensor
    dialogue: Tensor
    positions: Tensor
    answers: Tensor
    pixels: Tensor


class Packer:
    """Fills shards of one shape."""

    def __init__(self, shape: Packing, size: int, latents: int) -> None:
        """`size`: pixels a side; `latents`: of an image, at most."""
        self._shape, self._size, self._latents = shape, size, latents

    def pack(self, dialogues: Iterator[Dialogue]) -> tuple[Shard, list[list[str]]]:
        """A shard, and the skill of each dialogue by row. What finds no room is dropped; the
        iterator may end."""
        shard, misses = self._empty(), 0
        skills: list[list[str]] = [[] for _ in range(self._shape.rows)]
        filled = [0] * self._shape.rows
        images = 0
        for dialogue in dialogues:
            row = self._room(dialogue, filled, images)
            if row is None:
                misses += 1
                if misses == MOST_MISSES:
                    break
                continue
            misses = 0
            self._put(shard, dialogue, row, filled[row], images, len(skills[row]))
            skills[row].append(dialogue.skill)
            filled[row] += len(dialogue.tokens)
            images += len(dialogue.pixels)
        return shard, skills

    def _room(self, dialogue: Dialogue, filled: Sequence[int], images: int) -> int | None:
        """The fullest row that has it."""
        length = len(dialogue.tokens)
        if images + len(dialogue.pixels) > self._shape.images:
            return None
        fits = [r for r, used in enumerate(filled) if used + length <= self._shape.tokens]
        return max(fits, key=lambda r: filled[r], default=None)

    def _empty(self) -> Shard:
        rows, size = (self._shape.rows, self._shape.tokens), self._size
        return Shard(
            tokens=torch.zeros(rows, dtype=torch.int32),
            latent=torch.full(rows, -1, dtype=torch.int32),
            image=torch.zeros(rows, dtype=torch.int16),
            dialogue=torch.full(rows, NOTHING, dtype=torch.int16),
            positions=torch.zeros(rows, dtype=torch.int32),
            answers=torch.zeros(rows, dtype=torch.bool),
            pixels=torch.zeros(self._shape.images, 3, size, size, dtype=torch.uint8),
        )

    def _put(
        self, shard: Shard, dialogue: Dialogue, row: int, start: int, images: int, number: int
    ) -> None:
        """From `start` in a row, as its `number`th; its images behind the first `images`."""
        length = len(dialogue.tokens)
        there = slice(start, start + length)
        of = dialogue.image_of
        shard.tokens[row, there] = torch.from_numpy(dialogue.tokens)
        shard.image[row, there] = torch.from_numpy(np.where(of > 0, of + images, 0)).short()
        shard.latent[row, there] = torch.from_numpy(self._latent_of(of, images))
        shard.dialogue[row, there] = number
        shard.positions[row, there] = torch.arange(length, dtype=torch.int32)
        shard.answers[row, there] = torch.from_numpy(dialogue.answers)
        for i, pixels in enumerate(dialogue.pixels):
            shard.pixels[images + i] = torch.from_numpy(pixels)

    def _latent_of(self, image_of: np.ndarray, images: int) -> np.ndarray:
        """Each token's place among all latents of all images; -1 for text."""
        found = np.full(len(image_of), -1, np.int32)
        for number in range(1, int(image_of.max(initial=0)) + 1):
            there = np.flatnonzero(image_of == number)
            found[there] = (images + number - 1) * self._latents + np.arange(len(there))
        return found
