"""A small model as a drafter: it goes on with the text by itself, one token at a time.

Owns which of its guesses turned out right, so that it computes every token once. Knows a model only
as `TextModel`. It sees the text alone: what images showed is for it in the words about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Landed, Wanted

PART = 1024  # tokens of a long prompt that are taken in at once


class Extension(NamedTuple):
    """A text goes on with these tokens, one at least."""

    name: str
    tokens: Sequence[int]


class TextModel(Protocol):
    """A model with texts of its own, each known by a name."""

    @property
    def longest(self) -> int:
        """Tokens that a text may come to."""

    def extend(self, parts: Sequence[Extension]) -> list[int | None]:
        """The likeliest next token of each; None where there is no room, and the text is as it was.
        A name that is new begins a text."""

    def shorten(self, name: str, length: int) -> None:
        """Only the first `length` tokens of a text stay."""

    def forget(self, name: str) -> None:
        """Of a name that may be unknown."""


@dataclass
class _Text:
    """What the model has of a sequence: its first `known` tokens, and guesses behind them."""

    known: int = 0
    guesses: list[int] = field(default_factory=list)


class ModelDrafter:
    """Chains of the model's likeliest tokens."""

    name = "draft_model"
    taps: tuple[int, ...] = ()

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._texts: dict[str, _Text] = {}

    def landed(self, context: Context, landed: Landed) -> None:
        if not landed.chosen:  # a long prompt is under way, and is read along with it
            self._settle(context)
            self._read([context])

    def end(self, context: Context) -> None:
        if self._texts.pop(context.id, None) is not None:
            self._model.forget(context.id)

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        for context, _ in wanted:
            self._settle(context)
        self._read([w.context for w in wanted if self._missing(w.context) > PART])
        chains: list[list[int]] = [[] for _ in wanted]
        able = [i for i, want in enumerate(wanted) if self._can(want)]
        parts = [wanted[i].context.token_ids[self._text(wanted[i].context).known :] for i in able]
        for step in range(max((wanted[i].length for i in able), default=0)):
            going = [(i, part) for i, part in zip(able, parts, strict=True) if part]
            going = [(i, part) for i, part in going if wanted[i].length > step]
            if not going:
                break
            chosen = self._model.extend([Extension(wanted[i].context.id, p) for i, p in going])
            following: dict[int, list[int]] = {}
            for (i, part), token in zip(going, chosen, strict=True):
                if token is None:
                    continue
                text = self._text(wanted[i].context)
                if step:
                    text.guesses += part
                else:
                    text.known = len(wanted[i].context.token_ids)
                chains[i].append(token)
                following[i] = [token]
            parts = [following.get(i, []) for i in able]
        return [Draft.chain(chain) if chain else None for chain in chains]

    def _text(self, context: Context) -> _Text:
        return self._texts.setdefault(context.id, _Text())

    def _missing(self, context: Context) -> int:
        return len(context.token_ids) - self._text(context).known

    def _can(self, want: Wanted) -> bool:
        room = len(want.context.token_ids) + want.length <= self._model.longest
        return room and want.length > 0 and self._missing(want.context) <= PART

    def _settle(self, context: Context) -> None:
        """What of the guesses came true stays; the last known token is still to be computed."""
        text, tokens = self._text(context), context.token_ids
        length = text.known
        for guess in text.guesses:
            if length >= len(tokens) or tokens[length] != guess:
                break
            length += 1
        length = min(length, len(tokens) - 1)
        if length < text.known + len(text.guesses):
            self._model.shorten(context.id, length)
        text.known, text.guesses = length, []

    def _read(self, contexts: Sequence[Context]) -> None:
        """A part of what is missing, but the last token."""
        parts = []
        for context in contexts:
            known = self._text(context).known
            part = context.token_ids[known : min(known + PART, len(context.token_ids) - 1)]
            if part and known + len(part) <= self._model.longest:
                parts.append((context, part))
        if not parts:
            return
        done = self._model.extend([Extension(context.id, part) for context, part in parts])
        for (context, part), token in zip(parts, done, strict=True):
            if token is not None:
                self._text(context).known += len(part)
