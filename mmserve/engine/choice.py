"""Adjusted logits to tokens on a GPU, through the kernels that neither sort nor wait.

Owns the kernels' scratch space and the upload of a step's parameters. Knows nothing of penalties,
generators or log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmserve.engine.transfer import send
from mmserve.kernels import sampling
from mmserve.kernels.threshold import MAX_VOCAB
from mmserve.request import SamplingParams

BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def fits(vocab_size: int) -> bool:
    """Whether the kernels take rows of so many tokens."""
    return vocab_size <= MAX_VOCAB


class Choice:
    """One token per row, in stream order. A row's token does not depend on the other rows."""

    def __init__(self) -> None:
        self._work: sampling.Workspace | None = None
        self._sizes = (0, 0)  # rows and vocabulary that the scratch space is for

    def best(self, logits: Tensor) -> Tensor:
        """The best token of each row, the lowest of equals. logits: [B, V] -> [B] int64."""
        out = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        sampling.argmax(logits, out, self._room(logits))
        return out

    def draw(
        self, logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]
    ) -> Tensor:
        """A random token for each row; the best where the temperature is as good as 0.

        logits: [B, V] float32; uniform: [B] in [0, 1), whose place in the row's distribution is
        the token. -> [B] int64.
        """
        values = [
            [p.temperature for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [min(u, BELOW_ONE) for u in uniform],
            [p.top_k for p in params],
        ]
        # One upload for all; a top_k that float32 would round lies beyond any vocabulary.
        sent = send(torch.tensor(values, dtype=torch.float32), logits.device)
        temperature, top_p, min_p, at, top_k = sent.unbind(0)
        top_k = top_k.clamp(max=logits.shape[1]).int()
        out = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        work = self._room(logits)
        sampling.sample(logits, temperature, top_k, top_p, min_p, at, out, work)
        return out

    def _room(self, logits: Tensor) -> sampling.Workspace:
        batch, vocab = logits.shape
        if self._work is None or batch > self._sizes[0] or vocab != self._sizes[1]:
            rows = max(1 << (batch - 1).bit_length(), 64)
            self._work, self._sizes = sampling.workspace(rows, vocab, logits.device), (rows, vocab)
        return self._work
