"""Heads as they are trained: over whole texts at once, on grounds that they laid themselves.

Owns the unrolled passes and the losses. EAGLE-3's "training-time test": beyond the first guess a
head is given its own guessed states instead of the model's, just as it will be when it drafts.
Index i stands for the model's state of token i throughout; step s guesses token i + 2 + s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mmserve.spec.eagle import EagleHead, turns
from mmserve.spec.medusa import MedusaHeads
from mmserve.train_drafter.corpus import Batch

FADE = 0.8  # each further step's weight in the loss


class Vocabulary(NamedTuple):
    """What can be guessed: `rows` [V', hidden] of the model's output matrix; `ids` [V'] int64, the
    model's numbers; `number` [V] int64: its own by the model's, -1 for what it cannot guess."""

    rows: Tensor
    ids: Tensor
    number: Tensor


class Trained(Protocol):
    """A head while it is trained."""

    def states(self, batch: Batch, steps: int) -> list[Tensor]:
        """Of each step, [B, L, hidden]: what the output matrix scores."""


class TrainedEagle:
    """`embed` [...] int64 -> [..., hidden]: the model's."""

    def __init__(self, head: EagleHead, embed: Callable[[Tensor], Tensor], window: int) -> None:
        self.head, self._embed, self._window = head, embed, window

    def states(self, batch: Batch, steps: int) -> list[Tensor]:
        head, c = self.head, self.head.config
        length = batch.tokens.shape[1]
        places = torch.arange(length, device=batch.tokens.device)
        hidden = head.joined(batch.features.to(head.fc.weight.dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[Tensor] = []
        for step in range(steps):
            embeds = self._embed(batch.tokens.roll(-1 - step, 1)).to(hidden.dtype)
            residual, qkv = head.attending(hidden, embeds)
            qk, v = torch.split(qkv, [c.num_heads + c.num_kv_heads, c.num_kv_heads], -2)
            turned = turns(places + step, c, qk.dtype)(qk)
            q, k = torch.split(turned, [c.num_heads, c.num_kv_heads], -2)
            keys.append(k)
            values.append(v)
            hidden = head.closed(residual, _attended(q, keys, values, self._window))
            found.append(head.norm(hidden) if c.third else hidden)
        return found


class TrainedMedusa:
    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads

    def states(self, batch: Batch, steps: int) -> list[Tensor]:
        made = self.heads(batch.finals.to(next(self.heads.parameters()).dtype))
        return list(made[..., :steps, :].unbind(-2))


def _attended(q: Tensor, keys: list[Tensor], values: list[Tensor], window: int) -> Tensor:
    """q [B, L, H, D] of the last step; keys, values [B, L, Hkv, D] of each -> [B, L, H, D].

    A query sees the first step's keys up to its own index, `window` of them, and of each further
    step the one of its own index: its own line of guesses.
    """
    batch, length, heads, dim = q.shape
    grouped = q.reshape(batch, length, keys[0].shape[2], -1, dim)  # [B, L, Hkv, G, D]
    places = torch.arange(length, device=q.device)
    back = places[:, None] - places
    seen = (back >= 0) & (back < window)
    known = torch.einsum("blhgd,bmhd->bhglm", grouped, keys[0]) * dim**-0.5
    known = known.masked_fill(~seen, float("-inf"))
    own = [torch.einsum("blhgd,blhd->bhgl", grouped, k)[..., None] * dim**-0.5 for k in keys[1:]]
    share = torch.cat((known, *own), -1).softmax(-1, dtype=torch.float32).to(q.dtype)
    out = torch.einsum("bhglm,bmhd->blhgd", share[..., :length], values[0])
    for i, v in enumerate(values[1:]):
        out = out + share[..., length + i].permute(0, 3, 1, 2)[..., None] * v[:, :, :, None]
    return out.reshape(batch, length, heads, dim)


def loss(trained: Trained, batch: Batch, vocabulary: Vocabulary, steps: int) -> Tensor:
    """Cross entropy between the model's next tokens, as likely as it finds them, and the head's."""
    total = batch.finals.new_zeros((), dtype=torch.float32)
    weights = 0.0
    rows = vocabulary.rows
    for step, state in enumerate(trained.states(batch, steps)):
        ahead = batch.answers.roll(-2 - step, 1) & (vocabulary.number[batch.tokens] >= 0).roll(
            -2 - step, 1
        )
        ahead[:, -2 - step :] = False
        picked = ahead.nonzero(as_tuple=True)
        if not len(picked[0]):
            continue
        with torch.no_grad():
            wanted = batch.finals[picked[0], picked[1] + 1 + step].to(rows.dtype) @ rows.T
            wanted = wanted.float().softmax(-1)
        scores = functional.linear(state[picked].to(rows.dtype), rows).float()
        total = total + FADE**step * functional.cross_entropy(scores, wanted)
        weights += FADE**step
    return total / max(weights, 1e-6)


@torch.no_grad()
def right(trained: Trained, batch: Batch, vocabulary: Vocabulary, steps: int) -> Tensor:
    """[B, L] int64: how many guesses in a row, made at each index, were what the model wrote."""
    still = torch.ones_like(batch.answers)
    count = torch.zeros_like(batch.tokens)
    for step, state in enumerate(trained.states(batch, steps)):
        best = (state.to(vocabulary.rows.dtype) @ vocabulary.rows.T).argmax(-1)
        same = vocabulary.ids[best] == batch.tokens.roll(-2 - step, 1)
        same[:, -2 - step :] = False
        still = still & same & batch.answers.roll(-2 - step, 1)
        count += still
    return count


def accepted_length(counts: Tensor, answers: Tensor) -> tuple[int, int]:
    """Tokens of answers and the steps that they took, the model's own token of each step included.

    counts [B, L] as `right` makes them, answers [B, L] bool.
    """
    tokens = steps = 0
    for row, answer in zip(counts.tolist(), answers.tolist(), strict=True):
        said = [i for i, a in enumerate(answer) if a]
        if not said:
            continue
        at = said[0]  # known by the prompt's own step
        while at < said[-1]:
            got = min(row[at - 1] + 1, said[-1] - at)
            at, steps, tokens = at + got, steps + 1, tokens + got
    return tokens, steps
