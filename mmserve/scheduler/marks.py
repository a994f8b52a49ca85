"""Which text that saw an image is still good when the image has been marked as forgotten.

Owns the search for the most of it. Knows nothing of pages, and of the prefix cache only how far it
reaches.

What is cached of a sequence is a chain: text that saw all images, from some place on text that did
not see this one, and so on, as images were marked one after the other. Keys say of every text what
it saw, so the search decides only what is found again, never what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mmserve.placed import Gap
from mmserve.sequence import Sequence as Seq

Reach = Callable[[Sequence[Hashable]], int]  # of such keys: how many first ones are cached

MOST_LOOKS = 100  # each takes as long as the text, and everybody waits meanwhile


def settle(seq: Seq, reach: Reach) -> None:
    """Decide from where on text does not see the marked images; one that no cached text has seen is
    left out as if it had never been there. After many looks all that is left is decided at once."""
    seq.show_marked()
    looks = 0

    def look(keys: Sequence[Hashable]) -> int:
        nonlocal looks
        looks += 1
        return reach(keys)

    while left := seq.open_gaps:
        at = look(seq.keys)
        seen = [gap for gap in left if gap.text_index < at]
        unseen = left[len(seen) :]
        if looks > MOST_LOOKS:
            if seen:
                seq.unsee(seen, at)
            seq.leave_out(unseen)
        elif (known := _goes_on(seq, seen, at, look)) is not None:
            seq.unsee(known, at)
        elif unseen:
            seq.leave_out(unseen[:1])
        else:
            seq.unsee(seen, at)


def _goes_on(seq: Seq, seen: list[Gap], at: int, reach: Reach) -> list[Gap] | None:
    """Which of them text is cached without that goes on here: all, or one of them."""
    choices = [seen, *([gap] for gap in seen)] if len(seen) > 1 else [seen]
    known = (gaps for gaps in choices if gaps and reach(seq.keys_unseen(gaps, at)) > at)
    return next(known, None)
