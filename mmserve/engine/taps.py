"""What a drafter sees of the target: outputs of some of its layers.

Owns the listening, and whose rows are whose. Knows nothing of steps' work or of drafters.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seqs
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmserve.scheduler.batch import Chunk
from mmserve.sequence import Sequence
from mmserve.spec.drafter import FINAL


class Part(NamedTuple):
    """Of a sequence's text, from token `first` on: rows [start, end) of a step's features."""

    first: int
    features: Tensor  # [T, F]
    start: int
    end: int

    @property
    def rows(self) -> Tensor:
        return self.features[self.start : self.end]


Heard = dict[Sequence, list[Part]]


class Taps:
    """`layers`: numbers of a stack's, or FINAL; what they give stands side by side in that order.
    `width`: of each. What is captured while it listens is of no use before or after."""

    def __init__(self, stack: Seqs[nn.Module], layers: Seqs[int], width: int) -> None:
        self._order, self._width = tuple(layers), width
        self._given: dict[int, Tensor] = {}
        inner = sorted({layer for layer in layers if layer != FINAL})
        self._hooks = [stack[layer].register_forward_hook(self._keep(layer)) for layer in inner]

    def _keep(self, layer: int) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            given: Tensor = out[0] if isinstance(out, tuple) else out
            # Layers write into what they are given, so the next one changes it.
            self._given[layer] = given.reshape(-1, self._width).clone()

        return hook

    def join(self, hidden: Tensor) -> Tensor:
        """[T, width] behind the final norm -> [T, more]: beside it, what was given on the way."""
        if not self._hooks:
            return hidden
        given = self._given | {FINAL: hidden}
        self._given = {}
        return torch.cat([hidden, *(given[layer] for layer in self._order)], -1)

    def hidden(self, joined: Tensor) -> Tensor:
        """[T, width] of what was joined."""
        return joined[:, : self._width]

    def features(self, joined: Tensor) -> Tensor:
        """[T, F] of what was joined."""
        return joined[:, self._width :] if self._hooks else joined

    def hear(self, heard: Heard, joined: Tensor, chunks: Iterable[tuple[Chunk, int]]) -> None:
        """Add what was given of chunks, each with its last row: of their text behind the last of
        their images, and of their drafts."""
        if not self._order:
            return
        # One copy for all: a captured step's output is soon another's.
        features = self.features(joined).clone()
        for chunk, last in chunks:
            first = max([chunk.start, *(c.placed.text_index for c in chunk.images)])
            rows = chunk.num_rows if not chunk.images else chunk.start + chunk.count - first
            if rows > 0:
                part = Part(first, features, last + 1 - rows, last + 1)
                heard.setdefault(chunk.seq, []).append(part)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
