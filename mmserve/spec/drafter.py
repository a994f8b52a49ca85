"""What a drafter is: it guesses tokens that may come next, and the target checks them all at once.

Owns what a drafter is asked and told, and the protocol itself. Knows nothing of pages,
steps or sampling, nor how any drafter guesses. Whatever is guessed, the answer is the target's own
(mmserve.spec.verify); a bad guess costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from mmserve.spec.draft import AnyDraft, Draft

FINAL = -1  # the tap behind the target's final norm


@dataclass(frozen=True, eq=False)
class Context:
    """One sequence as drafters see it.

    `token_ids`: the sequence's own growing list of text tokens, prompt and output; it is read,
    never changed, and is another object's after a cut (`Drafter.end`, then a new context). All are
    known when a draft is asked for; when a step is told of, the last may be on its way, and is
    negative.
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

    `features` [n, F] floats, on the target's device (None: `Drafter.taps` is empty): outputs of the
    tapped layers, one beside another. Its rows `rows`, in order (None: all), are of the text tokens
    from index `first` on, which are now known and computed.
    """

    draft: Draft | None
    chosen: tuple[int, ...]
    path: tuple[int, ...]
    first: int = 0
    features: Tensor | None = None
    rows: Sequence[int] | None = None

    @property
    def known(self) -> Sequence[int]:
        """The rows of `features` that are of known tokens."""
        if self.features is None:
            return ()
        return range(len(self.features)) if self.rows is None else self.rows


class Drafter(Protocol):
    """Called on the engine's thread only."""

    @property
    def name(self) -> str:
        """As configuration and metrics call it."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Whose output it has to see: decoder layers by number, or FINAL."""

    def propose(self, wanted: Sequence[Wanted]) -> Sequence[AnyDraft | None]:
        """A guess for each, or None. One that is `Unread` may reach further than is wanted."""

    def landed(self, context: Context, landed: Landed) -> None:
        """Told of every step that a sequence was in, also of those without a draft."""

    def end(self, context: Context) -> None:
        """Nothing more comes of a sequence. It may be one that nothing has been told of."""


@runtime_checkable
class Recaller(Protocol):
    """A drafter that may know by heart what comes."""

    def recalls(self, context: Context) -> bool:
        """Whether the end of this text stands in what is remembered, at such length that what
        followed there is likely to follow here. Asked while the next token is on its way."""
