"""What a trained head borrows of the model that it drafts for.

Owns `TargetParts` and what captures nothing. Knows nothing of how the model is built or run;
whoever serves it fills this in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]


def dense(weight: Tensor, bias: Tensor | None) -> Linear:
    """x [..., K] -> [..., N] in the weight's own dtype."""
    return lambda x: functional.linear(x, weight, bias)


class Likeliest(Protocol):
    def __call__(self, scores: Tensor, count: int, *, normed: bool) -> tuple[Tensor, Tensor]:
        """scores [N, V] -> the `count` highest of each row, float32 [N, count], best first, and
        their numbers, int64. `normed`: as logarithms of chances, by softmax over the row."""


def likeliest(scores: Tensor, count: int, *, normed: bool) -> tuple[Tensor, Tensor]:
    """As `Likeliest` says, on any device."""
    values = scores.float()
    highest, numbers = (values.log_softmax(-1) if normed else values).topk(count, -1)
    return highest, numbers


class Captures(Protocol):
    """Launches that a device may do again without being told each part, if it is `enabled`."""

    enabled: bool

    def run(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns; of a key that is known it may not be called, so all that it reads
        and writes stays at its place."""

    def clear(self) -> None:
        """Those places are about to move."""


class NoCaptures:
    """Does what it is told, each time."""

    enabled = False

    def run(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    def clear(self) -> None: ...


@dataclass(frozen=True, eq=False)
class TargetParts:
    """`embed` [...] int64 -> [..., hidden_size]; `logits` [N, hidden_size] -> [N, vocab_size], of
    states behind the final norm; `head_rows` [n] int64 -> [n, hidden_size]: rows of the output
    matrix, float; `linear` makes a product of a weight [N, K] as fast as the device can, and
    `likeliest` finds a row's best; `grown` int32 [4, n MOST_TOKENS]: where drafts of n sequences
    may stand that the host has not seen: tokens, depths and masks, the lower half first; None:
    nowhere."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    head_rows: Callable[[Tensor], Tensor]
    device: torch.device
    dtype: torch.dtype
    linear: Callable[[Tensor, Tensor | None], Linear] = dense
    likeliest: Likeliest = likeliest
    grown: Tensor | None = None
    captures: Captures = field(default_factory=NoCaptures)
