"""Whose turn it is: between tenants that of who got least, and of one tenant's requests the first.

Owns what each tenant got, in tokens that were computed for it by its weight, and the order in which
sequences were seated. A tenant that comes, or comes back, starts level with who got least of those
that are there, so that nobody is owed for a time in which it asked nothing (the virtual token
counter of arXiv 2401.00588). With one tenant this is the order of arrival. Knows nothing of pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count

from mmserve.sequence import Sequence as Seq


def rank(seq: Seq) -> tuple[bool, float, float]:
    """Prefills without output last; before all that still have to be seated those that were, in the
    order in which that was."""
    return seq.request.prefill_only, seq.seat, seq.request.arrival


def _name(seq: Seq) -> str:
    return seq.request.tenant.name


class Turns:
    """Of one scheduler."""

    def __init__(self) -> None:
        self._got: dict[str, float] = {}  # tokens by weight, by tenant
        self._seats = count()

    def enter(self, seq: Seq, present: Iterable[Seq]) -> None:
        """A sequence comes to those that are there."""
        active = {_name(other) for other in present}
        if not active:
            self._got.clear()
        if _name(seq) not in active:
            level = min((self._got.get(name, 0.0) for name in active), default=0.0)
            self._got[_name(seq)] = max(self._served(seq), level)

    def spend(self, seq: Seq, tokens: int) -> None:
        """So many are computed for it."""
        self._got[_name(seq)] = self._served(seq) + tokens / seq.request.tenant.weight

    def _served(self, seq: Seq) -> float:
        return self._got.get(_name(seq), 0.0)

    def first(self, waiting: Sequence[Seq]) -> Seq:
        """Of those that wait, in order of their ranks, who is to be seated next."""
        head = waiting[0]
        if len(self._got) < 2:
            return head
        firsts: dict[str, Seq] = {}
        for seq in waiting:
            if seq.request.prefill_only is not head.request.prefill_only:
                break
            firsts.setdefault(_name(seq), seq)
        return min(firsts.values(), key=self._served)

    def before(self, seq: Seq, other: Seq) -> bool:
        """Whether its tenant got less."""
        return self._served(seq) < self._served(other)

    def seat(self, seq: Seq) -> None:
        """It is admitted, for the first time or again."""
        seq.seat = min(seq.seat, next(self._seats))

    def fairly(self, seqs: Sequence[Seq]) -> list[Seq]:
        """In the order in which they may take of a step."""
        return sorted(seqs, key=self._served)

    @staticmethod
    def gives_way(seq: Seq, running: Sequence[Seq], kept: Sequence[Seq]) -> Seq | None:
        """Whose seat a tenant takes that has none: the latest of who has most, and never `kept`."""
        seats = Counter(map(_name, running))
        if _name(seq) in seats or not seats:
            return None
        most = max(seats, key=seats.__getitem__)
        others = [other for other in running if _name(other) == most and other not in kept]
        return others[-1] if others else None
