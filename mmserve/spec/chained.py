"""Several drafters, asked in order of preference: who has no guess leaves it to the next.

Owns the order. Knows nothing of how any of them guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmserve.spec.draft import AnyDraft
from mmserve.spec.drafter import Context, Drafter, Landed, Wanted


class ChainedDrafter:
    """All of them are told of everything. No more than one may see the target's features.

    `lengths`: how far ahead each guesses at most, whatever is wanted: what was said before holds
    for longer than what a model thinks. `ahead`: the last one guesses while others go on, so where
    it guessed last time it is asked before they are.
    """

    def __init__(
        self, drafters: Sequence[Drafter], lengths: Sequence[int], *, ahead: bool = False
    ) -> None:
        tapping = [drafter.taps for drafter in drafters if drafter.taps]
        assert drafters and len(tapping) <= 1, "features are of one drafter's layers"
        self._drafters = tuple(drafters)
        self._lengths = tuple(lengths)
        self._taps = tapping[0] if tapping else ()
        self._ahead = ahead
        self._last: set[str] = set()  # whose draft was the last drafter's, or would have been

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self._drafters)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    def propose(self, wanted: Sequence[Wanted]) -> list[AnyDraft | None]:
        drafts: list[AnyDraft | None] = [None] * len(wanted)
        names = [want.context.id for want in wanted]
        every = range(len(wanted))
        late = {i for i in every if self._ahead and names[i] in self._last}
        for number in range(len(self._drafters) - 1):
            self._ask(number, [i for i in every if i not in late], wanted, drafts)
        guessed = [i for i in every if drafts[i] is None]
        self._ask(len(self._drafters) - 1, guessed, wanted, drafts)
        if late:  # whose guess is under way: what others would say is worth more
            better: list[AnyDraft | None] = [None] * len(wanted)
            for number in range(len(self._drafters) - 1):
                self._ask(number, sorted(late), wanted, better)
            drafts = [other or draft for other, draft in zip(better, drafts, strict=True)]
            guessed = [i for i in guessed if better[i] is None]
        self._last -= set(names)
        self._last |= {names[i] for i in guessed}
        return drafts

    def _ask(
        self,
        number: int,
        some: Sequence[int],
        wanted: Sequence[Wanted],
        drafts: list[AnyDraft | None],
    ) -> None:
        """A drafter about some of those that have no draft; `drafts` are filled in."""
        drafter, most = self._drafters[number], self._lengths[number]
        without = [i for i in some if drafts[i] is None]
        if not without:
            return
        asked = [Wanted(wanted[i].context, min(wanted[i].length, most)) for i in without]
        for i, draft in zip(without, drafter.propose(asked), strict=True):
            drafts[i] = draft and replace(draft, author=drafter.name)

    def landed(self, context: Context, landed: Landed) -> None:
        for drafter in self._drafters:
            drafter.landed(context, landed)

    def end(self, context: Context) -> None:
        self._last.discard(context.id)
        for drafter in self._drafters:
            drafter.end(context)
