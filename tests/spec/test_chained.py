"""Drafters in order of preference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mmserve.spec.chained import LOOK, ChainedDrafter
from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.ngram import NgramDrafter
from mmserve.spec.suffix import SuffixDrafter


class Head:
    """Always guesses 9, and sees features."""

    name, taps = "head", (3,)

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.told: list[str] = []

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        self.asked += [(each.context.id, each.length) for each in wanted]
        return [Draft.chain([9])] * len(wanted)

    def landed(self, context: Context, landed: Landed) -> None:
        self.told.append(context.id)

    def end(self, context: Context) -> None:
        self.told.append("end of " + context.id)


def test_the_first_that_has_a_guess_is_taken() -> None:
    head = Head()
    drafter = ChainedDrafter([NgramDrafter(2, 4), head], [8, 2])
    said, new = Context("said", [1, 2, 3, 1, 2], 5), Context("new", [1, 2], 2)
    drafts = drafter.propose([Wanted(new, 3), Wanted(said, 3)])
    assert drafts == [Draft.chain([9]), Draft.chain([3, 1, 2])]
    assert [draft and draft.author for draft in drafts] == ["head", "ngram"]
    assert head.asked == [("new", 2)]  # and no further ahead than it can see


def test_who_is_not_needed_is_not_asked() -> None:
    head = Head()
    drafter = ChainedDrafter([NgramDrafter(2, 4), head], [8, 2])
    drafter.propose([Wanted(Context("said", [1, 2, 3, 1, 2], 5), 1)])
    assert not head.asked


def test_who_guessed_last_time_is_asked_ahead_and_gives_way_all_the_same() -> None:
    head = Head()
    drafter = ChainedDrafter([NgramDrafter(2, 4), head], [8, 2], ahead=True)
    tokens = [1, 2, 3, 1]
    want = Wanted(Context("a", tokens, 4), 3)
    assert drafter.propose([want]) == [Draft.chain([9])]
    tokens.append(2)  # now it was said before, which is seen when others are asked again
    drafts = [drafter.propose([want])[0] for _ in range(LOOK)]
    assert drafts == [Draft.chain([9])] * (LOOK - 1) + [Draft.chain([3, 1, 2])]
    assert drafts[-1] is not None and drafts[-1].author == "ngram"
    assert len(head.asked) == 1 + LOOK
    assert drafter.propose([want]) == drafts[-1:] and len(head.asked) == 1 + LOOK
    tokens.append(7)
    assert drafter.propose([want]) == [Draft.chain([9])] and len(head.asked) == 2 + LOOK
    drafter.end(want.context)
    assert not drafter._last


def test_all_are_told_of_everything() -> None:
    head = Head()
    drafter = ChainedDrafter([NgramDrafter(2, 4), head], [8, 2])
    context = Context("a", [1, 2], 2)
    drafter.landed(context, Landed(None, (2,), ()))
    drafter.end(context)
    assert head.told == ["a", "end of a"]


def test_it_is_called_after_all_of_them_and_sees_what_one_of_them_has_to_see() -> None:
    drafter = ChainedDrafter([SuffixDrafter(1 << 20), Head()], [8, 2])
    assert drafter.name == "suffix+head" and drafter.taps == (3,)
    with pytest.raises(AssertionError):
        ChainedDrafter([Head(), Head()], [8, 2])


def test_it_recalls_what_any_of_them_does() -> None:
    seen = Context("a", [1, 2, 3, 1, 2, 3, -1], 1)
    new = Context("b", [1, 2, 3, 4, 5, 6, -1], 1)
    drafter = ChainedDrafter([NgramDrafter(2, 3), Head()], [8, 2])
    assert drafter.recalls(seen) and not drafter.recalls(new)
    assert not ChainedDrafter([Head()], [2]).recalls(seen)
