"""Several drafters, asked in order of preference: who has no guess leaves it to the next.

Owns the order. Knows nothing of how any of them guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmserve.spec.draft import AnyDraft
from mmserve.spec.drafter import Context, Drafter, Landed, Recaller, Wanted

LOOK = 4  # drafts in a row by the last one, before others are asked again


class ChainedDrafter:
    """All of them are told of everything. No more than one may see the target's features.

    `lengths`: how far ahead each guesses at most, whatever is wanted: what was said before holds
    for longer than what a model thinks. `ahead`: the last one guesses while others go on, so where
    it guessed last time it is asked before they are, and they are every few drafts.
    """

    def __init__(
        self, drafters: Sequence[Drafter], lengths: Sequence[int], *, ahead: bool = False
    ) -> None:
        tapping = [drafter.taps for drafter in drafters if drafter.taps]
        assert drafters and len(tapping) <= 1, "features are of one drafter's layers"
        self._drafters = tuple(drafters)
        self._recallers = [each for each in drafters if isinstance(each, Recaller)]
        self._lengths = tuple(lengths)
        self._taps = tapping[0] if tapping else ()
        self._ahead = ahead
        self._last: dict[str, int] = {}  # drafts in a row that were the last drafter's

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
        looking = [i for i in sorted(late) if self._last[names[i]] % LOOK == 0]
        for number in range(len(self._drafters) - 1):
            self._ask(number, [i for i in every if i not in late], wanted, drafts)
        guessed = [i for i in every if drafts[i] is None]
        self._ask(len(self._drafters) - 1, guessed, wanted, drafts)
        if looking:  # while a guess is under way: what others would say is worth more
            better: list[AnyDraft | None] = [None] * len(wanted)
            for number in range(len(self._drafters) - 1):
                self._ask(number, looking, wanted, better)
            drafts = [other or draft for other, draft in zip(better, drafts, strict=True)]
            guessed = [i for i in guessed if better[i] is None]
        runs = {names[i]: self._last.get(names[i], 0) + 1 for i in guessed}
        for name in names:
            self._last.pop(name, None)
        self._last |= runs
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

    def recalls(self, context: Context) -> bool:
        return any(each.recalls(context) for each in self._recallers)

    def landed(self, context: Context, landed: Landed) -> None:
        for drafter in self._drafters:
            drafter.landed(context, landed)

    def end(self, context: Context) -> None:
        self._last.pop(context.id, None)
        for drafter in self._drafters:
            drafter.end(context)
