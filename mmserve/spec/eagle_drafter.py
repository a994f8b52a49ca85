"""EAGLE as a drafter: a head's guesses, each the next one's ground, for many sequences at once.

Owns what is kept of each sequence between two steps. Knows nothing of layouts, files or training.
A sequence's first tokens may never have been computed here (their KV was found): the head does
without them. Images need nothing: what was seen is in the hidden states of the text behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmserve.spec.draft import MOST_TOKENS, AnyDraft, Draft, Unread
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.eagle import EagleHead, turns
from mmserve.spec.eagle_tree import Growth, Size, planted
from mmserve.spec.head_kv import NOBODY, HeadKV
from mmserve.spec.target_parts import TargetParts

WINDOW = 256  # tokens that the head sees
BRANCHES = 8  # of a tree at each level, at most: half as many as it has tokens
LEVELS = (2, 5, 8, 16)  # how deep captured drafts are
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # sequences; more are not captured
REHEARSED = 4  # of these are captured from the start


class _Inputs:
    """What a captured launch reads: features [T, F] and ints [5, T]."""

    def __init__(self, count: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.features = torch.zeros(count, width, device=device, dtype=dtype)
        self.ints = torch.zeros(5, count, device=device, dtype=torch.long)
        self._staged = torch.zeros(5, count, dtype=torch.long, pin_memory=device.type == "cuda")
        self._view: Any = self._staged.numpy()
        self._sent: torch.cuda.Event | None = None

    def send(self, tokens: Sequence[_Token]) -> None:
        """Their numbers; nobody waits for what is under way, unless it is the last such copy."""
        if self._sent is not None:
            self._sent.synchronize()
        self._view[:] = list(zip(*(token[1:] for token in tokens), strict=True))
        self.ints.copy_(self._staged, non_blocking=True)
        if self.ints.is_cuda:
            self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(self.ints.device))


class _Token(NamedTuple):
    """A known token for the head: row `row` of `features`, its ring and position, the first one
    that is known of its sequence, and the token behind it."""

    features: Tensor
    row: int
    ring: int
    position: int
    first: int
    behind: int


class _Grown:
    """What `Growth.grow` gives, on its way to the host."""

    def __init__(self, grown: Tensor) -> None:
        self.count = grown.shape[2]
        self._host, self._copied = grown, None
        if grown.is_cuda:
            self._host = torch.empty(grown.shape, dtype=grown.dtype, pin_memory=True)
            self._host.copy_(grown, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(grown.device))

    @cached_property
    def _known(self) -> list[list[list[int]]]:
        if self._copied is not None:
            self._copied.synchronize()
        found: list[list[list[int]]] = self._host.tolist()
        return found

    def draft(self, number: int) -> Draft:
        tokens, parents = self._known[number]
        return Draft(tuple(tokens), tuple(parents))


class _Piece(NamedTuple):
    """Tokens in a row: rows `rows` of `features`."""

    features: Tensor
    rows: Sequence[int]


@dataclass
class _Tail:
    """What the head has of one sequence. Features are known of the tokens [first, end); those of
    the last len(`fresh`) are not in the ring yet."""

    ring: int
    first: int
    end: int
    fresh: list[_Piece] = field(default_factory=list)
    last: _Piece | None = None  # of token end - 1, when it is in the ring already

    @property
    def num_fresh(self) -> int:
        return sum(len(piece.rows) for piece in self.fresh)

    def waiting(self, context: Context) -> list[_Token]:
        """What the head has to read before it guesses: at least the last known token."""
        pieces = self.fresh or ([self.last] if self.last else [])
        rows = [(piece.features, row) for piece in pieces for row in piece.rows]
        first = self.end - len(rows)
        return [
            _Token(features, row, self.ring, at, self.first, context.token_ids[at + 1])
            for at, (features, row) in enumerate(rows, first)
        ]


class EagleDrafter:
    """Chains of best guesses, or trees of at most `most` tokens."""

    name = "eagle"

    def __init__(
        self,
        head: EagleHead,
        parts: TargetParts,
        *,
        most: int = 0,
        window: int = WINDOW,
    ) -> None:
        assert 0 <= most <= MOST_TOKENS, "no draft of that size"
        c = head.config
        self._head, self._parts, self._most = head, parts, most
        room = BUCKETS[-1] if parts.captures.enabled else 0
        self._kv = HeadKV(window, c.num_kv_heads, c.head_dim, parts.device, parts.dtype, room)
        self._growth = Growth(head, self._embed, self._kv, parts.likeliest)
        self._tails: dict[str, _Tail] = {}
        self._inputs: dict[tuple[Hashable, int], _Inputs] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self._head.config.taps

    @torch.inference_mode()
    def rehearse(self, length: int) -> None:
        """Capture what drafts of up to `length` for few sequences take, before anybody waits."""
        if not self._parts.captures.enabled:
            return
        c = self._head.config
        features = torch.zeros(1, len(c.taps) * c.hidden_size, dtype=self._parts.dtype)
        nobody = _nobody(features.to(self._parts.device))
        for count in BUCKETS:
            self._launch("known", [nobody] * count, 1, self._absorb)
        reach = next((level for level in LEVELS if level >= length), length)
        for level in (level for level in LEVELS if level <= reach):
            for count in BUCKETS[:REHEARSED]:
                self._grow([nobody] * count * (level + 1), level + 1, level)

    # -- what is known ----------------------------------------------------------------------------

    def landed(self, context: Context, landed: Landed) -> None:
        features, rows = landed.features, landed.known
        if features is None or not rows:
            return
        end, window = landed.first + len(rows), self._kv.size
        tail = self._tails.get(context.id)
        if tail is None:
            if self._kv.is_full:
                self._parts.captures.clear()
            tail = self._tails[context.id] = _Tail(self._kv.take(), landed.first, landed.first)
        kept = rows[-window:]
        if landed.first != tail.end or len(kept) < len(rows):
            tail.fresh, tail.first = [], end - len(kept)  # nothing from before is of use
        tail.fresh.append(_Piece(features, kept))
        tail.end, tail.last = end, None
        while tail.num_fresh - len(tail.fresh[0].rows) >= window:
            del tail.fresh[0]
            tail.first = end - tail.num_fresh

    def end(self, context: Context) -> None:
        tail = self._tails.pop(context.id, None)
        if tail is not None:
            self._kv.give(tail.ring)

    # -- guesses ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> list[AnyDraft | None]:
        asked = [(i, self._tails.get(want.context.id), want) for i, want in enumerate(wanted)]
        able = [
            (i, tail, want)
            for i, tail, want in asked
            if tail is not None and want.length > 0 and tail.end == len(want.context.token_ids) - 1
        ]
        drafts: list[AnyDraft | None] = [None] * len(wanted)
        if not able:
            return drafts
        length = max(want.length for _, _, want in able)
        if self._parts.captures.enabled:  # few lengths, so that few launches are captured
            length = next((level for level in LEVELS if level >= length), length)
        grown = _Grown(self._grown([(tail, want.context) for _, tail, want in able], length))
        for number, (i, _, want) in enumerate(able):
            if self._has_place(len(able)):
                place = number * MOST_TOKENS
                read = partial(grown.draft, number)
                drafts[i] = Unread(grown.count, length, place, read)
            else:
                drafts[i] = grown.draft(number).shortened(want.length)
        return drafts

    def _has_place(self, count: int) -> bool:
        """Whether the drafts of so many sequences stand where a step may find them."""
        place = self._parts.grown
        return place is not None and count * MOST_TOKENS <= place.shape[1]

    def _grown(self, tails: Sequence[tuple[_Tail, Context]], length: int) -> Tensor:
        """[B, 2, N] as `Growth.grow` says."""
        most = length + 1
        waiting = [tail.waiting(context)[-self._kv.size :] for tail, context in tails]
        if early := [token for tokens in waiting for token in tokens[:-most]]:
            self._launch("known", early, 1, self._absorb)
        if not self._parts.captures.enabled:
            most = min(most, max(map(len, waiting)))
        late: list[_Token] = []
        for (tail, _), tokens in zip(tails, waiting, strict=True):
            features, row, *_ = tokens[-1]
            late += [_nobody(features)] * (most - len(tokens)) + tokens[-most:]
            tail.fresh, tail.last = [], _Piece(features, (row,))
        return self._grow(late, most, length)

    def _grow(self, tokens: Sequence[_Token], most: int, length: int) -> Tensor:
        """The same behind the last of each `most` of the tokens."""
        width = min(BRANCHES, max(self._most // 2, 1))
        shape = Size(length, width, self._most or length)

        def grow(features: Tensor, at: Tensor) -> Tensor:
            grown = self._growth.grow(features, at, shape, most)
            count, place = len(grown), self._parts.grown
            if place is not None and self._has_place(count):
                each = place[:, : count * MOST_TOKENS].view(4, count, MOST_TOKENS)
                each[..., : grown.shape[2]] = planted(grown, length)
            return grown

        return self._launch(shape, tokens, most, grow)

    def _launch(
        self,
        key: Hashable,
        tokens: Sequence[_Token],
        each: int,
        compute: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """What `compute` makes of features [T, F] and ints [4, T]: rings, positions, first ones,
        tokens behind; a row for `each` of them. Captured where rows are few, with more of them
        behind, which are nobody's."""
        count, parts = len(tokens) // each, self._parts
        size = next((b for b in BUCKETS if b >= count), count)
        captured = parts.captures.enabled and size in BUCKETS
        if captured:
            tokens = [*tokens, *[_nobody(tokens[0].features)] * ((size - count) * each)]
        width = tokens[0].features.shape[1]
        if not captured:
            ints = torch.tensor([token[1:] for token in tokens]).T.to(parts.device).contiguous()
            features = torch.empty(len(tokens), width, device=parts.device, dtype=parts.dtype)
            return compute(_gathered(tokens, ints[0], features), ints[1:])
        if (key, size) not in self._inputs:
            self._inputs[key, size] = _Inputs(len(tokens), width, parts.device, parts.dtype)
        at = self._inputs[key, size]
        at.send(tokens)
        _gathered(tokens, at.ints[0], at.features)
        return parts.captures.run((key, size), lambda: compute(at.features, at.ints[1:]))[:count]

    def _absorb(self, features: Tensor, ints: Tensor) -> Tensor:
        """features [T, F], ints [4, T], as `_launch` says; what is written."""
        rings, positions, _, tokens = ints
        head, heads = self._head, self._head.config.num_heads
        _, qkv = head.attending(head.joined(features), self._embed(tokens))
        turn = turns(positions, head.config, qkv.dtype)
        keys, values = qkv[:, heads:].chunk(2, 1)
        kv = torch.cat((turn(keys), values), 1)
        self._kv.write(rings, positions, kv)
        return kv

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._parts.embed(tokens).to(self._parts.dtype)


def _nobody(features: Tensor) -> _Token:
    """What nobody hears of, with features of some."""
    return _Token(features, 0, NOBODY, 0, 0, 0)


def _gathered(tokens: Sequence[_Token], rows: Tensor, out: Tensor) -> Tensor:
    """Features of tokens into out [T, F]; `rows` [T] are their rows."""
    end = 0
    for _, same in groupby(tokens, lambda token: id(token.features)):
        some = list(same)
        start, end = end, end + len(some)
        features = some[0].features
        if features.dtype == out.dtype:
            torch.index_select(features, 0, rows[start:end], out=out[start:end])
        else:
            out[start:end] = features.index_select(0, rows[start:end])
    return out
