"""Which sequences get drafts in a step, and how long: as many tokens as bring more than they cost.

Owns the decision, and what it rests on: measured seconds of steps and of drafting, and how often
drafts were right. No torch and no clock: it is told what steps took. Knows nothing of drafters'
insides, pages or engines. It may only be slow to see a chance, never wrong about an answer.

It is learnt by kind: a head that reads text well may know little of images, and what was said
before is known by heart. So what one kind earns is not lost on another.

Without drafts, a step's work on the host overlaps the device's; with drafts it does not. Nothing
here says so: steps are measured from landing to landing, so that their seconds do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate, chain
from typing import NamedTuple

from mmserve.spec.acceptance import Acceptance
from mmserve.spec.costs import Curve, bucket_of

GAIN = 1.05  # times as many tokens a second, or no drafts
PROBE = 4  # tokens of a draft that only looks whether things have changed
PROBED = 8  # one sequence in so many of a crowd has one, where the whole batch goes without
WAIT, LONGEST_WAIT = 8, 256  # steps between probes
LEAP = 2  # times as many rows as were ever measured, at most: beyond that, costs are a guess
STAKE = 0.0075  # of all time may be lost to drafts that did not pay
DEBT, CREDIT = 4, 64  # steps' time: what was lost, or saved, beyond that counts no more
START = 3  # steps' time that drafts for few sequences may lose at first
CROWD = 8  # sequences: where more are, what only looks whether drafts pay is saved up for first
HOLDS = 4  # steps that a plan is for where drafts pay, nothing changes and none was all right
RESTS = 7  # steps that nobody need ask in again, where they do not pay and nothing changes
FAIR, RECENT = 8, 16  # steps that a spell gets before it is judged, and by which it is
STREAK = 8  # tokens right in a row: a good stretch, so ask for as many
SEQUENCE_MEMORY, ENGINE_MEMORY = 32, 100  # drafts


class Kind(Enum):
    """Of a sequence, at a step: what there is to guess by."""

    TEXT = auto()
    IMAGE = auto()  # there is one in its context
    RECALLED = auto()  # its end stands in what the drafter remembers


class Outcome(NamedTuple):
    """What came of a sequence's draft: of `wanted` tokens in a row that were asked for, `rows`
    tokens (of all branches; 0: the drafter had no guess) were checked, `accepted` were right."""

    id: str
    wanted: int
    rows: int
    accepted: int


@dataclass
class _Spell:
    """Steps with drafts, then a pause; one that is twice as long after each spell in vain."""

    drafting: bool = True
    paid: float = 0.0  # what it has brought so far, less what it cost
    recent: float = 0.0  # the same, of its latest steps
    steps: int = 0
    wait: int = WAIT
    left: int = 0  # of the pause
    length: int = PROBE  # of the next probe

    def stop(self) -> None:
        self.wait = WAIT if self.paid > 0 else min(2 * self.wait, LONGEST_WAIT)
        self.drafting, self.left, self.length = False, self.wait, PROBE

    def start(self) -> None:
        if not self.drafting:
            self.drafting, self.paid, self.recent, self.steps = True, 0.0, 0.0, 0

    def probe(self) -> int:
        """How long a draft to try; twice as long each time, while the spell goes on."""
        self.start()
        self.length *= 2
        return self.length // 2

    def due(self, steps: int) -> bool:
        """So many steps more have passed of a pause: whether it is over."""
        self.left -= steps
        return self.left < 0

    def brought(self, amount: float) -> None:
        self.paid += amount
        self.recent += (amount - self.recent) / RECENT
        self.steps += 1

    @property
    def failing(self) -> bool:
        """Whether it does not bring what was expected of it."""
        return self.steps >= FAIR and self.recent < 0


@dataclass
class _Known:
    """Of one sequence."""

    acceptance: Acceptance
    spell: _Spell = field(default_factory=_Spell)
    tried: bool = False  # whether it ever had a draft
    streak: int = 0  # tokens of its latest drafts, as long as they were right to their ends


class _Ledger(NamedTuple):
    """What is counted together: sizes of a batch that are about the same, and the kinds in it."""

    bucket: int
    kinds: frozenset[Kind]


class Control:
    """`most`: tokens behind the last known one that its drafter guesses at most; it is asked for
    a multiple of `unit` of them (`most`, where a part of a draft is worth nothing)."""

    def __init__(self, most: int, unit: int = 1) -> None:
        assert unit > 0 and most > 0 and most % unit == 0, "a draft has tokens"
        self._most = most
        self._unit = unit
        self._step = 0
        self._plain = Curve()  # by sequences
        self._checked = Curve()  # by rows
        self._drafting = Curve()  # by tokens asked for
        self._rows_per_token = 1.0  # of a draft, by tokens in a row asked for
        self._priors = {kind: Acceptance(most, ENGINE_MEMORY) for kind in Kind}
        self._known: dict[tuple[str, Kind], _Known] = {}
        self._kinds: dict[str, Kind] = {}  # in the last plan
        self._spells: dict[_Ledger, _Spell] = {}
        self._held, self._held_plan = 0, dict[str, int]()  # steps that the last plan is yet for
        self._held_for: Sequence[tuple[str, Kind]] = ()
        self._least = 0.0  # that a unit had to bring in the last plan
        self.rests = 0  # steps of the same sequences for which the last plan stands without asking
        self._credits: dict[_Ledger, float] = {}  # seconds that drafts may yet lose

    def plan(self, contexts: Sequence[tuple[str, Kind]], steps: int = 1) -> dict[str, int]:
        """For the next step's sequences: how many tokens to draft. Who is not in it gets none; an
        empty plan is a plain step. `steps` since the last plan."""
        size, self.rests = len(contexts), 0
        if self._held and self._held_for == contexts:
            self._held -= 1
            return self._held_plan
        self._held = 0
        self._kinds = dict(contexts)
        if not size or not self._plain.sure(size, self._step):
            return {}
        spell = self._spells.setdefault(self._ledger(size), _Spell())
        due = not spell.drafting and spell.due(steps)
        begun = spell.drafting and (spell.steps or size <= CROWD)
        poor = not begun and self._credit(size) < self._price(size)
        if poor or (not (spell.drafting or due) and not self._is_new(contexts)):
            self.rests = RESTS
            return {}
        known = {id: self._sequence(id, kind) for id, kind in contexts}
        if due:
            for each in known.values():
                each.acceptance.fade()
        least = self._worthwhile(list(known.values()))
        if least is not None and not spell.failing:
            spell.start()
            self._least = least
            lengths = self._lengths(known, least)
            if spell.steps >= FAIR and spell.recent > 0:
                self._held, self._held_for, self._held_plan = HOLDS - 1, list(contexts), lengths
            return lengths
        if spell.drafting and spell.recent <= 0:
            spell.stop()
            return {}
        return self._probes(known, spell.probe())

    def stepped(
        self,
        seconds: float | None,
        num_seqs: int,
        outcomes: Sequence[Outcome] = (),
        draft_seconds: float = 0.0,
        alike: int = 1,
    ) -> float:
        """A step has landed in which each of `num_seqs` sequences got a token or more. Returns the
        seconds that its drafts saved (negative: lost).

        `seconds`: since the step before had landed, or since this one was begun if nothing was
        under way; `draft_seconds` of them went to guessing. None: something else was done as well
        (a part of a prompt, an image), so that they tell nothing. `outcomes`: of every sequence
        that had been planned a draft, also where none was made; none for a plain step, which may
        stand for `alike` ones.
        """
        self._step += alike
        if seconds is None or any(o.accepted >= o.wanted for o in outcomes):
            self._held = 0
        if seconds is None:
            self._learn(outcomes)
            return 0.0
        ledger = self._ledger(num_seqs)
        if not outcomes:
            self._plain.add(num_seqs, seconds, self._step)
            self._earn(ledger, STAKE * seconds * alike, seconds)
            return 0.0
        rows = sum(outcome.rows for outcome in outcomes)
        wanted = sum(outcome.wanted for outcome in outcomes)
        self._checked.add(num_seqs + rows, seconds - draft_seconds, self._step)
        self._drafting.add(wanted, draft_seconds, self._step)
        self._rows_per_token += 0.1 * (max(rows / wanted, 0.1) - self._rows_per_token)
        self._learn(outcomes)
        plain = self._plain.at(num_seqs) or seconds
        accepted = sum(outcome.accepted for outcome in outcomes)
        saved = plain * (num_seqs + accepted) / num_seqs - seconds
        lost = -DEBT * plain  # at most: once, something may have been compiled in a step
        self._earn(ledger, max(saved, lost) + STAKE * seconds, plain)
        spell = self._spells.get(ledger)
        if spell is not None:
            spell.brought(max(saved - (GAIN - 1) * seconds, lost))
        return saved

    def _credit(self, size: int) -> float:
        """Seconds that drafts may yet lose at this size of a batch."""
        begin = 0.0 if size > CROWD else START * (self._plain.at(size) or 0.0)
        return self._credits.get(self._ledger(size), begin)

    def _ledger(self, size: int) -> _Ledger:
        return _Ledger(bucket_of(size), frozenset(self._kinds.values()))

    def _price(self, size: int) -> float:
        """Seconds to have before a spell begins. Of few sequences a new one is worth a look, and a
        loss is paid off afterwards; many are nearly always better off without."""
        return (self._plain.at(size) or 0.0) if size > CROWD else 0.0

    def forget(self, id: str) -> None:
        """A sequence has ended; it may be one that was never seen."""
        for kind in Kind:
            self._known.pop((id, kind), None)

    def _earn(self, ledger: _Ledger, seconds: float, plain: float) -> None:
        begin = START * plain if ledger.bucket <= bucket_of(CROWD) else 0.0
        credit = self._credits.get(ledger, begin) + seconds
        self._credits[ledger] = min(max(credit, -DEBT * plain), CREDIT * plain)

    def _is_new(self, contexts: Sequence[tuple[str, Kind]]) -> bool:
        """Whether one of few sequences never had a draft: where there are many, all wait."""
        known = map(self._known.get, contexts)
        return len(contexts) <= CROWD and not all(each and each.tried for each in known)

    def _sequence(self, id: str, kind: Kind) -> _Known:
        known = self._known.get((id, kind))
        if known is None:
            acceptance = Acceptance(self._most, SEQUENCE_MEMORY, self._priors[kind])
            self._known[id, kind] = known = _Known(acceptance)
        return known

    def _learn(self, outcomes: Sequence[Outcome]) -> None:
        kinds = [(o, self._kinds.get(o.id)) for o in outcomes]
        found = [(o, k) for o, kind in kinds if kind and (k := self._known.get((o.id, kind)))]
        for outcome, known in found:  # the shared ones first: all others rest on them
            if known.acceptance.prior:
                known.acceptance.prior.add(outcome.wanted, outcome.accepted)
        for outcome, known in found:
            known.tried = True
            known.acceptance.add(outcome.wanted, outcome.accepted)
            right = outcome.accepted == outcome.wanted
            known.streak = known.streak + outcome.wanted if right else 0
            known.spell.brought(outcome.accepted - self._least * outcome.wanted / self._unit)

    def _worthwhile(self, known: Sequence[_Known]) -> float | None:
        """How many tokens a unit of a draft must bring at least; None: no draft pays.

        Units are taken in order of what they bring, whosever they are, as long as the whole batch
        gets more tokens a second by them.
        """
        size = len(known)
        plain = self._plain.at(size)
        assert plain is not None, "planned without a measurement"
        units = sorted(chain.from_iterable(map(self._units, known)), reverse=True)
        gained = list(accumulate(units, initial=0.0))
        largest = max(self._plain.largest, self._checked.largest)
        limit = (LEAP * largest - size) / (self._rows_per_token * self._unit)
        best, least = GAIN * size / plain, None
        count = 0
        while count < min(limit, len(units)):
            # A quarter more than last time, and all that bring as much: costs have no finer teeth.
            brings = units[min(count + count // 4, len(units) - 1)]
            count = _at_least(brings, units)
            rate = (size + gained[count]) / self._seconds(size, count * self._unit)
            if rate > best:
                best, least = rate, brings
        return least

    def _units(self, known: _Known) -> list[float]:
        """By unit of a draft, how many tokens it would bring; never more than the one before."""
        survival, unit = known.acceptance.survival, self._unit
        if unit == 1:
            return survival
        return [sum(survival[i : i + unit]) for i in range(0, len(survival), unit)]

    def _seconds(self, size: int, tokens: int) -> float:
        """What a step takes in which so many tokens are asked for."""
        rows = size + tokens * self._rows_per_token
        checked = self._checked.at(rows)
        if checked is None:  # a plain step has as many rows as sequences
            checked = self._plain.at(rows)
        assert checked is not None, "planned without a measurement"
        return checked + (self._drafting.at(tokens) or 0.0)

    def _lengths(self, known: dict[str, _Known], least: float) -> dict[str, int]:
        lengths = {}
        for id, each in known.items():
            spell, count = each.spell, _at_least(least, self._units(each))
            if count:
                spell.start()
                lengths[id] = count * self._unit
                if each.streak >= STREAK:
                    lengths[id] = max(lengths[id], self._whole(each.streak))
            elif spell.drafting and spell.recent <= 0:
                spell.stop()
            elif spell.drafting or spell.due(1):
                each.acceptance.fade()
                lengths[id] = self._whole(spell.probe())
        return lengths

    def _probes(self, known: dict[str, _Known], length: int) -> dict[str, int]:
        """Drafts for a few, though they should not pay: new sequences, and the most promising. Few
        have them all: most of what drafts cost is the same for one of them."""

        order = sorted(known, key=lambda id: (known[id].tried, -sum(known[id].acceptance.survival)))
        count = len(order) if len(order) <= CROWD else len(order) // PROBED
        return dict.fromkeys(order[:count], self._whole(length))

    def _whole(self, length: int) -> int:
        """Rounded up to whole units, as far as drafts go."""
        return min(-(-length // self._unit) * self._unit, self._most)


def _at_least(least: float, falling: Sequence[float]) -> int:
    """How many of them are."""
    return bisect_right(falling, -least, key=lambda each: -each)
