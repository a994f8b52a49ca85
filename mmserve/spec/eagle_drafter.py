"""EAGLE as a drafter: a head's guesses, each the next one's ground, for many sequences at once.

Owns what is kept of each sequence between two steps. Knows nothing of layouts, files or training.
A sequence's first tokens may never have been computed here (their KV was found): the head does
without them. Images need nothing: what was seen is in the hidden states of the text behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mmserve.spec.drafter import Context, Draft, Landed, Wanted
from mmserve.spec.eagle import EagleHead, rotated
from mmserve.spec.head_kv import HeadKV
from mmserve.spec.target_parts import TargetParts

WINDOW = 256  # tokens that the head sees


@dataclass
class _Tail:
    """What the head has of one sequence. Features are known of the tokens [first, end); those of
    the last len(`fresh`) are not in the ring yet."""

    ring: int
    first: int
    end: int
    fresh: list[Tensor] = field(default_factory=list)  # each [n, F]
    last: Tensor | None = None  # [1, F], of token end - 1, when it is in the ring already

    @property
    def num_fresh(self) -> int:
        return sum(map(len, self.fresh))


class EagleDrafter:
    """Chains of best guesses."""

    name = "eagle"

    def __init__(self, head: EagleHead, parts: TargetParts, window: int = WINDOW) -> None:
        c = head.config
        self._head, self._parts = head, parts
        self._kv = HeadKV(window, c.num_kv_heads, c.head_dim, parts.device, parts.dtype)
        self._tails: dict[str, _Tail] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self._head.config.taps

    # -- what is known ----------------------------------------------------------------------------

    def landed(self, context: Context, landed: Landed) -> None:
        features = landed.features
        if features is None or not len(features):
            return
        end, window = landed.first + len(features), self._kv.window
        tail = self._tails.get(context.id)
        if tail is None:
            tail = self._tails[context.id] = _Tail(self._kv.take(), landed.first, landed.first)
        kept = features[-window:]
        if landed.first != tail.end or len(kept) < len(features):
            tail.fresh, tail.first = [], end - len(kept)  # nothing from before is of use
        tail.fresh.append(
            kept.to(self._parts.dtype, copy=True)
        )  # a step's output is soon another's
        tail.end, tail.last = end, None
        while tail.num_fresh - len(tail.fresh[0]) >= window:
            del tail.fresh[0]
            tail.first = end - tail.num_fresh

    def end(self, context: Context) -> None:
        tail = self._tails.pop(context.id, None)
        if tail is not None:
            self._kv.give(tail.ring)

    # -- guesses ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        asked = [(i, self._tails.get(want.context.id), want) for i, want in enumerate(wanted)]
        able = [
            (i, tail, want)
            for i, tail, want in asked
            if tail is not None and want.length > 0 and tail.end == len(want.context.token_ids) - 1
        ]
        drafts: list[Draft | None] = [None] * len(wanted)
        if not able:
            return drafts
        length = max(want.length for _, _, want in able)
        tokens = self._chains([(tail, want.context) for _, tail, want in able], length).tolist()
        for (i, _, want), row in zip(able, tokens, strict=True):
            drafts[i] = Draft.chain(row[: want.length])
        return drafts

    def _chains(self, tails: Sequence[tuple[_Tail, Context]], length: int) -> Tensor:
        """[B, length] int64: the best guess behind each sequence's last token, and so on."""
        hidden = self._catch_up(tails)
        ints = [
            [tail.ring for tail, _ in tails],
            [tail.end - 1 for tail, _ in tails],
            [tail.first for tail, _ in tails],
            [context.token_ids[tail.end] for tail, context in tails],
        ]
        rings, positions, first, tokens = torch.tensor(ints).to(self._parts.device)
        chosen = []
        for step in range(length):
            hidden = self._advance(hidden, tokens, rings, positions + step, first)
            tokens = self._head.named(self._head.scores(hidden).argmax(-1))
            chosen.append(tokens)
        return torch.stack(chosen, 1)

    def _catch_up(self, tails: Sequence[tuple[_Tail, Context]]) -> Tensor:
        """Keys and values of all that is known but the last of each; of that, [B, hidden]."""
        rings: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        pieces: list[Tensor] = []
        last: list[Tensor] = []
        for tail, context in tails:
            if tail.fresh:
                features = torch.cat(tail.fresh)[-self._kv.window :]
                tail.fresh, tail.last = [], features[-1:]
                first = tail.end - len(features)
                pieces.append(features[:-1])
                rings += [tail.ring] * (len(features) - 1)
                positions += range(first, tail.end - 1)
                tokens += context.token_ids[first + 1 : tail.end]
            assert tail.last is not None
            last.append(tail.last)
        if tokens:
            rows = torch.tensor([rings, positions, tokens]).to(self._parts.device)
            self._absorb(self._head.joined(torch.cat(pieces)), *rows)
        return self._head.joined(torch.cat(last))

    def _absorb(self, hidden: Tensor, rings: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """hidden [T, hidden], the rest [T]."""
        _, _, k, v = self._head.attending(hidden, self._embed(tokens))
        self._kv.write(rings, positions, rotated(k, positions, self._head.config.rope_theta), v)

    def _advance(
        self, hidden: Tensor, tokens: Tensor, rings: Tensor, positions: Tensor, first: Tensor
    ) -> Tensor:
        """One token further: hidden [B, hidden] of positions [B], the tokens [B] that follow them
        -> what stands for the model's hidden states of those tokens."""
        theta = self._head.config.rope_theta
        residual, q, k, v = self._head.attending(hidden, self._embed(tokens))
        self._kv.write(rings, positions, rotated(k, positions, theta), v)
        keys, values = self._kv.read(rings)
        seen = self._kv.seen(positions, first)[:, None, None]
        attended = functional.scaled_dot_product_attention(
            rotated(q, positions, theta)[:, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=seen,
            enable_gqa=True,
        )
        return self._head.closed(residual, attended[:, :, 0])

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._parts.embed(tokens).to(self._parts.dtype)
