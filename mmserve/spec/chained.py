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
    for longer than what a model thinks.
    """

    def __init__(self, drafters: Sequence[Drafter], lengths: Sequence[int]) -> None:
        tapping = [drafter.taps for drafter in drafters if drafter.taps]
        assert drafters and len(tapping) <= 1, "features are of one drafter's layers"
        self._drafters = tuple(drafters)
        self._lengths = tuple(lengths)
        self._taps = tapping[0] if tapping else ()

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self._drafters)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    def propose(self, wanted: Sequence[Wanted]) -> list[AnyDraft | None]:
        drafts: list[AnyDraft | None] = [None] * len(wanted)
        for drafter, most in zip(self._drafters, self._lengths, strict=True):
            without = [i for i, draft in enumerate(drafts) if draft is None]
            if not without:
                break
            asked = [Wanted(wanted[i].context, min(wanted[i].length, most)) for i in without]
            for i, draft in zip(without, drafter.propose(asked), strict=True):
                drafts[i] = draft and replace(draft, author=drafter.name)
        return drafts

    def landed(self, context: Context, landed: Landed) -> None:
        for drafter in self._drafters:
            drafter.landed(context, landed)

    def end(self, context: Context) -> None:
        for drafter in self._drafters:
            drafter.end(context)
