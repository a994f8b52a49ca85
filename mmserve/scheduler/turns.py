"""Whose turn it is: between tenants that of who got least, and of one tenant's requests the first.

Owns what each tenant got, in tokens that were computed for it by its weight, and the order in which
sequences were seated. Nobody is owed for a time in which it asked nothing: a tenant that comes, or
comes back, starts level with who got least of those that are there (the virtual token counter of
arXiv 2401.00588). Nor for one in which it asked little: who had all that it could use of a step
counts as if it had got as much as those whose turn came after its own. With one tenant this is the
order of arrival. Knows nothing of pages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import count

from mmserve.scheduler.batch import Batch
from mmserve.sequence import Sequence as Seq
from mmserve.sequence import SequenceStatus


def rank(seq: Seq) -> tuple[bool, float, float]:
    """Prefills without output last; before all that still have to be seated those that were, in the
    order in which that was."""
    return seq.request.prefill_only, seq.seat, seq.request.arrival


def _name(seq: Seq) -> str:
    return seq.request.tenant.name


def _waits(seq: Seq) -> bool:
    """For a turn: it is not only decoding."""
    return seq.status is not SequenceStatus.RUNNING or not seq.num_output_tokens


class Turns:
    """Of one scheduler."""

    def __init__(self) -> None:
        self._got: defaultdict[str, float] = defaultdict(float)  # tokens by weight, by tenant
        self._seats = count()
        # Of the step that was chosen last: what was computed since, whose turn came, and who had
        # got less and was left with nothing to wait for.
        self._now: defaultdict[str, float] = defaultdict(float)
        self._took: set[str] = set()
        self._content: set[str] = set()

    def enter(self, seq: Seq, waiting: Iterable[Seq], running: Sequence[Seq]) -> None:
        """A sequence comes to those that are there."""
        active = {_name(other) for other in (*waiting, *running)}
        if not any(map(_waits, (*waiting, *running))):
            self._got.clear()
            self._content.clear()
        if _name(seq) not in active:
            level = min((self._got[name] for name in active), default=0.0)
            self._got[_name(seq)] = max(self._served(seq), level)

    def spend(self, seq: Seq, tokens: int) -> None:
        """So many are computed for it."""
        share = tokens / seq.request.tenant.weight
        self._got[_name(seq)] += share
        self._now[_name(seq)] += share

    def chosen(self, batch: Batch, waiting: Sequence[Seq]) -> None:
        """A step is chosen, and the one before it is computed."""
        most = max((self._now[name] for name in self._took), default=0.0)
        for name in self._content:
            self._got[name] += max(most - self._now[name], 0.0)
        self._now.clear()
        prompts = (c.seq for c in batch.chunks if c.count > 1 and not c.seq.request.prefill_only)
        left = {_name(seq) for seq in waiting if not seq.request.prefill_only}
        self._took = set(map(_name, prompts)) or left
        level = max((self._got[name] for name in self._took), default=0.0)
        self._content = {n for n, got in self._got.items() if got < level and n not in left}

    def _served(self, seq: Seq) -> float:
        return self._got[_name(seq)]

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
