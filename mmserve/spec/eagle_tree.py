"""How an EAGLE head's guesses grow: level by level, the likeliest lines first.

Owns the growing of many sequences' trees at once, in shapes that depend on nothing but their number
and size, so that a device can capture it. Knows nothing of sequences. The guesses' own keys and
values stand behind a copy of what is known, and are forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mmserve.spec.eagle import EagleHead, Turn, turns
from mmserve.spec.head_kv import HeadKV
from mmserve.spec.target_parts import Likeliest, likeliest

# Each level's cost beyond its chance, so that no token is worth more than the one before it.
STEP = 1e-3


class Size(NamedTuple):
    """`length` levels, of each level's `branches` likeliest lines all children of that number, of
    all of these the `most` likeliest. A chain: one branch, `most` its length."""

    length: int
    branches: int
    most: int


class _Level(NamedTuple):
    """The lines that grow on, [B, W] each: tokens, the logarithms of their chances, numbers among
    all guesses, and the state before each [B, W, hidden]."""

    tokens: Tensor
    chances: Tensor
    numbers: Tensor
    states: Tensor


class _Found(NamedTuple):
    """All guesses of a level, [B, n] each; `parents`: numbers, -1 of the last known token."""

    tokens: Tensor
    parents: Tensor
    chances: Tensor


class Growth:
    """Of `head`'s guesses; `embed` [...] int64 -> [..., hidden]."""

    def __init__(
        self,
        head: EagleHead,
        embed: Callable[[Tensor], Tensor],
        kv: HeadKV,
        highest: Likeliest = likeliest,
    ) -> None:
        self._head, self._embed, self._kv, self._highest = head, embed, kv, highest

    def grow(self, features: Tensor, ints: Tensor, size: Size, fresh: int = 1) -> Tensor:
        """features [B fresh, F], ints [4, B fresh]: of each sequence's latest tokens whose features
        are known, rings, positions, the first position that is known, and the tokens behind. The
        last one of each is grown from, those before it are only stored. -> int64 [B, 2, N]: tokens,
        and who of them each follows (-1: the last known token), parents first."""
        head, kv, width = self._head, self._kv, size.branches
        residual, qkv = head.attending(head.joined(features), self._embed(ints[3]))
        queries = self._store(qkv, ints[0], ints[1])
        last = slice(fresh - 1, None, fresh)
        rings, positions, first, _ = ints[:, last]
        levels = torch.arange(size.length, device=ints.device)[:, None] + positions
        turn = turns(levels, head.config, features.dtype)
        hidden = kv.hidden(positions, first, features.dtype)[:, None]  # [B, 1, size]
        known = kv.read(rings)
        attended = self._attend(queries[last][:, None], known, hidden)[:, 0]
        state = head.closed(residual[last], attended)
        level, found = self._first(state, width)

        room = width * (size.length - 1)
        keys, values = (_longer(part, room, 2) for part in known)
        beyond = hidden.new_full((len(rings), width, room), float("-inf"))
        mask = torch.cat((hidden.expand(-1, width, -1), beyond), -1)
        own = torch.zeros(width, width, device=ints.device, dtype=hidden.dtype)
        own = own.fill_(float("-inf")).fill_diagonal_(0)
        for depth in range(1, size.length):
            at = slice(kv.size + (depth - 1) * width, kv.size + depth * width)
            residual, qkv = head.attending(level.states, self._embed(level.tokens))
            queries, k, v = self._turned(qkv, _at(turn, depth))
            keys[:, :, at], values[:, :, at] = k.transpose(1, 2), v.transpose(1, 2)
            mask[:, :, at] = own
            states = head.closed(residual, self._attend(queries, (keys, values), mask))
            level, lines = self._next(level, states, found, width)
            if lines is not None and depth + 1 < size.length:
                mask = mask.gather(1, lines[..., None].expand(-1, -1, mask.shape[-1]))
        return _best(found, size.most)

    # -- choosing ---------------------------------------------------------------------------------

    def _likeliest(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[..., hidden] -> logarithms of chances and tokens [..., count], best first."""
        scores = self._head.scores(states)
        found = self._highest(scores.flatten(0, -2), count, normed=True)
        chances, numbers = (part.view(*states.shape[:-1], count) for part in found)
        return chances, self._head.named(numbers)

    def _first(self, state: Tensor, width: int) -> tuple[_Level, list[_Found]]:
        """What follows the last known token, which is all that is found so far."""
        chances, tokens = self._likeliest(state, width)
        numbers = torch.arange(width, device=tokens.device).expand_as(tokens)
        states = state[:, None].expand(-1, width, -1)
        found = [_Found(tokens, torch.full_like(tokens, -1), chances)]
        return _Level(tokens, chances, numbers, states), found

    def _next(
        self, level: _Level, states: Tensor, found: list[_Found], width: int
    ) -> tuple[_Level, Tensor | None]:
        """All children of a level go to `found`; the likeliest grow on, [B, W] of their parents'
        places in the level beside them; None: each is its only parent's."""
        chances, tokens = self._likeliest(states, width)
        chances = (chances + level.chances[..., None]).flatten(1)  # [B, W * W]
        tokens = tokens.flatten(1)
        parents = level.numbers[..., None].expand(-1, -1, width).flatten(1)
        first = sum(part.tokens.shape[1] for part in found)
        found.append(_Found(tokens, parents, chances))
        if width == 1:
            return _Level(tokens, chances, level.numbers + 1, states), None
        kept, picked = self._highest(chances, width, normed=False)
        lines = picked // width
        behind = states.gather(1, lines[..., None].expand(-1, -1, states.shape[-1]))
        return _Level(tokens.gather(1, picked), kept, picked + first, behind), lines

    # -- attention --------------------------------------------------------------------------------

    def _turned(self, qkv: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """[B, W, heads, D] -> queries and keys, turned, and values."""
        c = self._head.config
        qk = turn(qkv[..., : c.num_heads + c.num_kv_heads, :])
        values = qkv[..., c.num_heads + c.num_kv_heads :, :]
        return qk[..., : c.num_heads, :], qk[..., c.num_heads :, :], values

    def _store(self, qkv: Tensor, rings: Tensor, positions: Tensor) -> Tensor:
        """Keys and values of known tokens go into the rings; queries [T, H, D]."""
        turn = turns(positions, self._head.config, qkv.dtype)
        queries, keys, values = self._turned(qkv, turn)
        self._kv.write(rings, positions, torch.cat((keys, values), 1))
        return queries

    def _attend(self, queries: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """queries [B, W, H, D]; keys, values [B, Hkv, M, D]; mask [B, W, M] -> [B, W, H, D]."""
        c, (batch, width) = self._head.config, queries.shape[:2]
        keys, values = kv
        grouped = queries.view(batch, width, c.num_kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4)
        flat = grouped.reshape(batch, c.num_kv_heads, -1, c.head_dim)  # [B, Hkv, G W, D]
        scores = (flat @ keys.transpose(-1, -2)).view(batch, c.num_kv_heads, -1, *mask.shape[1:])
        scores = torch.add(mask[:, None, None], scores, alpha=c.head_dim**-0.5)
        attended: Tensor = scores.softmax(-1).flatten(2, 3) @ values
        shaped = attended.view(batch, c.num_kv_heads, -1, width, c.head_dim)
        return shaped.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _at(turn: Turn, level: int) -> Turn:
    """Of one level, for [B, W, heads, D]."""
    return Turn(turn.cos[level][:, None], turn.sin[level][:, None])


def _longer(part: Tensor, room: int, dim: int) -> Tensor:
    shape = list(part.shape)
    shape[dim] = room
    return torch.cat((part, part.new_zeros(shape)), dim)


def _best(found: list[_Found], most: int) -> Tensor:
    """The likeliest `most`, or all if there are fewer, in order of numbers."""
    tokens, parents, chances = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    if most < tokens.shape[1]:
        width = found[0].tokens.shape[1]
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        levels = (numbers + (width * width - width)) // (width * width)
        kept = (chances - levels * STEP).topk(most, -1).indices.sort(-1).values
        tokens, parents = tokens.gather(1, kept), parents.gather(1, kept)
        # A parent is among them, for it is worth more; what has none stays -1.
        parents = torch.searchsorted(kept, parents) - (parents < 0).long()
    return torch.stack((tokens, parents), 1)


def planted(grown: Tensor, length: int) -> Tensor:
    """What `Growth.grow` gives [B, 2, N] of so many levels -> int32 [4, B, N]: tokens, depths, and
    masks of whom each sees, itself included, the lower half first."""
    tokens, parents = grown.unbind(1)
    numbers = torch.arange(tokens.shape[1], device=grown.device)
    follows = (parents[..., None] == numbers).float()  # [B, N, N]
    itself = torch.eye(len(numbers), device=grown.device)
    sees = itself.expand_as(follows)
    for _ in range(length - 1):
        sees = itself + follows @ sees
    seen = sees.long()
    masks = (seen << numbers).sum(-1)
    low, high = masks & 0xFFFFFFFF, masks >> 32
    return torch.stack((tokens, seen.sum(-1), low, high)).int()
