"""What a head is trained on: tokens of chats beside what the model made of each.

Owns the flat tensors and how batches are cut from them. Knows nothing of heads or losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """`tokens` [B, L] int64, `answers` [B, L] bool, `features` [B, L, F], `finals` [B, L, hidden];
    behind a chat's end: zeros, which are no answer."""

    tokens: Tensor
    answers: Tensor
    features: Tensor
    finals: Tensor


class Corpus(NamedTuple):
    """Of N text tokens of all chats, one chat behind another; `starts` [chats + 1] int64, on the
    CPU. `answers` [N] bool: whether the model wrote a token as its answer; `features` [N, F]: the
    tapped layers' outputs; `finals` [N, hidden]: behind the final norm."""

    tokens: Tensor
    answers: Tensor
    features: Tensor
    finals: Tensor
    starts: Tensor

    @property
    def num_chats(self) -> int:
        return len(self.starts) - 1

    def batch(self, chats: Tensor) -> Batch:
        """chats [B] int64: which."""
        first, lengths = self.starts[chats], self.starts[chats + 1] - self.starts[chats]
        places = torch.arange(int(lengths.max()))
        inside = places < lengths[:, None]
        index = torch.where(inside, first[:, None] + places, 0).to(self.tokens.device)
        inside = inside.to(self.tokens.device)
        return Batch(
            self.tokens[index] * inside,
            self.answers[index] & inside,
            self.features[index] * inside[..., None],
            self.finals[index] * inside[..., None],
        )

    def batches(self, most_tokens: int, seed: int) -> Iterator[Tensor]:
        """Every chat once, in random order, those of like lengths together; a batch is of
        `most_tokens` with its padding, or of one chat."""
        generator = torch.Generator().manual_seed(seed)
        lengths = self.starts.diff()
        order = torch.randperm(self.num_chats, generator=generator)
        found: list[Tensor] = []
        for some in torch.split(order, 512):
            by_length = some[lengths[some].argsort(stable=True)].tolist()
            held: list[int] = []
            for chat in by_length:
                if held and (len(held) + 1) * int(lengths[chat]) > most_tokens:
                    found.append(torch.tensor(held))
                    held = []
                held.append(chat)
            found.append(torch.tensor(held))
        for i in torch.randperm(len(found), generator=generator).tolist():
            yield found[i]
