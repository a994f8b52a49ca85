"""EAGLE as a drafter: a head's guesses, each the next one's ground, for many sequences at once.

Owns what is kept of each sequence between two steps. Knows nothing of layouts, files or training.
A sequence's first tokens may never have been computed here (their KV was found): the head does
without them. Images need nothing: what was seen is in the hidden states of the text behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mmserve.spec.draft import MOST_TOKENS, Draft
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.eagle import EagleHead, turns
from mmserve.spec.eagle_tree import Growth, Size
from mmserve.spec.head_kv import HeadKV
from mmserve.spec.target_parts import TargetParts

WINDOW = 256  # tokens that the head sees
BRANCHES = 8  # of a tree at each level, at most: half as many as it has tokens
LEVELS = (2, 5, 8, 16)  # how deep captured drafts are
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # sequences; more are not captured


class _Inputs(NamedTuple):
    """What a captured launch reads: [B, F] and [n, B]."""

    features: Tensor
    ints: Tensor


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
    """Chains of best guesses, or trees of at most `most` tokens. A token of which the head thinks
    that it will be reached in less than `worth` of the cases is left out."""

    name = "eagle"

    def __init__(
        self,
        head: EagleHead,
        parts: TargetParts,
        *,
        most: int = 0,
        worth: float = 0.0,
        window: int = WINDOW,
    ) -> None:
        assert 0 <= most <= MOST_TOKENS, "no draft of that size"
        c = head.config
        self._head, self._parts, self._most = head, parts, most
        self._least = math.log(worth) if worth > 0 else -math.inf
        self._kv = HeadKV(window, c.num_kv_heads, c.head_dim, parts.device, parts.dtype)
        self._growth = Growth(head, self._embed, self._kv)
        self._tails: dict[str, _Tail] = {}
        self._inputs: dict[tuple[Hashable, int], _Inputs] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self._head.config.taps

    # -- what is known ----------------------------------------------------------------------------

    def landed(self, context: Context, landed: Landed) -> None:
        features = landed.features
        if features is None or not len(features):
            return
        end, window = landed.first + len(features), self._kv.size
        tail = self._tails.get(context.id)
        if tail is None:
            if self._kv.is_full:
                self._parts.captures.clear()
            tail = self._tails[context.id] = _Tail(self._kv.take(), landed.first, landed.first)
        kept = features[-window:]
        if landed.first != tail.end or len(kept) < len(features):
            tail.fresh, tail.first = [], end - len(kept)  # nothing from before is of use
        tail.fresh.append(kept.to(self._parts.dtype))
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
        if self._parts.captures.enabled:  # few lengths, so that few launches are captured
            length = next((level for level in LEVELS if level >= length), length)
        grown = self._grown([(tail, want.context) for _, tail, want in able], length).tolist()
        for (i, _, want), rows in zip(able, grown, strict=True):
            drafts[i] = self._draft(rows, want.length)
        return drafts

    def _draft(self, rows: Sequence[Sequence[float]], length: int) -> Draft | None:
        """Of what `Growth.grow` has found for one sequence."""
        places: dict[int, int] = {-1: -1}
        tokens: list[int] = []
        parents: list[int] = []
        for number, parent, token, chance in zip(*rows, strict=True):
            if chance >= self._least and int(parent) in places:
                places[int(number)] = len(tokens)
                tokens.append(int(token))
                parents.append(places[int(parent)])
        return Draft(tuple(tokens), tuple(parents)).shortened(length) if tokens else None

    def _grown(self, tails: Sequence[tuple[_Tail, Context]], length: int) -> Tensor:
        """[B, 4, N] as `Growth.grow` says."""
        known = self._catch_up(tails)
        ints = [
            [tail.ring for tail, _ in tails],
            [tail.end - 1 for tail, _ in tails],
            [tail.first for tail, _ in tails],
            [context.token_ids[tail.end] for tail, context in tails],
        ]
        width = min(BRANCHES, max(self._most // 2, 1))
        shape = Size(length, width, self._most or length)
        return self._launch(shape, known, ints, lambda rows, at: self._growth.grow(rows, at, shape))

    def _launch(
        self,
        key: Hashable,
        features: Tensor,
        ints: list[list[int]],
        compute: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """What `compute` makes of features [B, F] and ints [n, B]; captured where rows are few,
        with more of them behind, which are nobody's."""
        count, parts = len(features), self._parts
        size = next((b for b in BUCKETS if b >= count), None)
        if size is None or not parts.captures.enabled:
            return compute(features, torch.tensor(ints).to(parts.device))
        if (key, size) not in self._inputs:
            self._inputs[key, size] = _Inputs(
                features.new_zeros(size, features.shape[1]),
                torch.zeros(len(ints), size, device=parts.device, dtype=torch.long),
            )
        at = self._inputs[key, size]
        at.features[:count] = features
        at.ints.copy_(torch.tensor([row + [0] * (size - count) for row in ints]))
        return parts.captures.run((key, size), lambda: compute(at.features, at.ints))[:count]

    def _catch_up(self, tails: Sequence[tuple[_Tail, Context]]) -> Tensor:
        """Keys and values of all that is known but the last of each; of that, features [B, F]."""
        rings: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        pieces: list[Tensor] = []
        last: list[Tensor] = []
        for tail, context in tails:
            if tail.fresh:
                features = torch.cat(tail.fresh)[-self._kv.size :]
                tail.fresh, tail.last = [], features[-1:]
                first = tail.end - len(features)
                if len(features) > 1:
                    pieces.append(features[:-1])
                rings += [tail.ring] * (len(features) - 1)
                positions += range(first, tail.end - 1)
                tokens += context.token_ids[first + 1 : tail.end]
            assert tail.last is not None
            last.append(tail.last)
        if tokens:
            self._launch("known", torch.cat(pieces), [rings, positions, tokens], self._absorb)
        return torch.cat(last)

    def _absorb(self, features: Tensor, ints: Tensor) -> Tensor:
        """features [T, F], ints [3, T]: rings, positions, tokens behind; what is written."""
        rings, positions, tokens = ints
        head, heads = self._head, self._head.config.num_heads
        _, qkv = head.attending(head.joined(features), self._embed(tokens))
        turn = turns(positions, head.config, qkv.dtype)
        keys, values = qkv[:, heads:].chunk(2, 1)
        kv = torch.cat((turn(keys), values), 1)
        self._kv.write(rings, positions, kv)
        return kv

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._parts.embed(tokens).to(self._parts.dtype)
