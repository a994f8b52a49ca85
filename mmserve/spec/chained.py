"""Several drafters, asked in order of preference: who has no guess leaves it to the next.

Owns the order. Knows nothing of how any of them guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmserve.spec.drafter import Context, Draft, Drafter, Landed, Wanted


class ChainedDrafter:
    """All of them are told of everything. No more than one may see the target's features."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        tapping = [drafter.taps for drafter in drafters if drafter.taps]
        assert drafters and len(tapping) <= 1, "features are of one drafter's layers"
        self._drafters = tuple(drafters)
        self._taps = tapping[0] if tapping else ()

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self._drafters)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(wanted)
        for drafter in self._drafters:
            without = [i for i, draft in enumerate(drafts) if draft is None]
            if not without:
                break
            for i, draft in zip(
                without, drafter.propose([wanted[i] for i in without]), strict=True
            ):
                drafts[i] = draft and replace(draft, author=drafter.name)
        return drafts

    def landed(self, context: Context, landed: Landed) -> None:
        for drafter in self._drafters:
            drafter.landed(context, landed)

    def end(self, context: Context) -> None:
        for drafter in self._drafters:
            drafter.end(context)
