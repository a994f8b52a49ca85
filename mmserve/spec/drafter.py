"""What a drafter is: it guesses tokens that may come next, and the target checks them all at once.

Owns `Draft`, what a drafter is asked and told, and the protocol itself. Knows nothing of pages,
steps or sampling, nor how any drafter guesses. Whatever is guessed, the answer is the target's own
(mmserve.spec.verify); a bad guess costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

MOST_TOKENS = 64  # of one draft: who sees whom among them is a mask of so many bits


@dataclass(frozen=True)
class Draft:
    """A tree of tokens: number i follows number `parents[i]`, or the sequence's last token where
    that is -1. Parents stand before their children, and no two children of one token are equal."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert 0 < len(self.tokens) == len(self.parents) <= MOST_TOKENS, "no draft of that size"
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), "parents come first"

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Draft:
        """Each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How far each stands behind the sequence's last token: 1 for those that follow it."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Of each token, the ones that it sees: bit j stands for number j, itself included."""
        masks: list[int] = []
        for i, parent in enumerate(self.parents):
            masks.append(1 << i | (masks[parent] if parent >= 0 else 0))
        return tuple(masks)

    def children(self, number: int) -> dict[int, int]:
        """By token, the numbers of those that follow number `number` (-1: the last known token)."""
        found = enumerate(self.parents)
        return {self.tokens[i]: i for i, parent in found if parent == number}

    def shortened(self, length: int) -> Draft | None:
        """Without tokens that stand further back than `length`; None where nothing is left."""
        kept = [i for i, depth in enumerate(self.depths) if depth <= length]
        if len(kept) == len(self):
            return self
        place = {old: new for new, old in enumerate(kept)} | {-1: -1}
        tokens = tuple(self.tokens[i] for i in kept)
        return Draft(tokens, tuple(place[self.parents[i]] for i in kept)) if kept else None


@dataclass(frozen=True, eq=False)
class Context:
    """One sequence as drafters see it.

    `token_ids`: the sequence's own growing list of text tokens, prompt and output, all known; it is
    read, never changed, and is another object's after a cut (`Drafter.end`, then a new context).
    `images`: digests of those that it shows, in order; `tenant`: whose answers it may draw upon.
    """

    id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    images: tuple[bytes, ...] = ()
    tenant: bytes = b""


class Wanted(NamedTuple):
    """A draft that is asked for: no token of it further than `length` behind the last known one."""

    context: Context
    length: int


class Landed(NamedTuple):
    """What a step made of one sequence, whose `token_ids` hold it already.

    `draft`: what was checked (None: nothing was, this step); `chosen`: what the target chose behind
    the last token that was known before, and behind each of the draft's, right or wrong; `path`:
    the numbers of the draft's tokens that were right, in order. A step that ends inside of the
    prompt chooses nothing.

    `features` [n, F] floats, on the target's device (None: `Drafter.taps` is empty): of the text
    tokens from index `first` on, which are now known and computed: outputs of the tapped layers,
    one beside another.
    """

    draft: Draft | None
    chosen: tuple[int, ...]
    path: tuple[int, ...]
    first: int = 0
    features: Tensor | None = None


class Drafter(Protocol):
    """Called on the engine's thread only."""

    @property
    def name(self) -> str:
        """As configuration and metrics call it."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Whose output it has to see: decoder layers by number; -1: after the final norm."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        """A guess for each, or None."""

    def landed(self, context: Context, landed: Landed) -> None:
        """Told of every step that a sequence was in, also of those without a draft."""

    def end(self, context: Context) -> None:
        """Nothing more comes of a sequence. It may be one that nothing has been told of."""
