"""Beams: the sequences of one request that follow several answers at once.

Owns who belongs together, and how one sequence becomes several: they hold the same pages, and each
copies its last page, if others have it too, when it first writes there (`Holdings.grow`). Knows
nothing of scores; which beams go on is decided elsewhere (`branch`).

A request waits as one sequence, its *root*, whose images and prompt are computed once; once these
are there, its beams run in its place. They are preempted together: then the root waits again, with
what all of them have in common, and what each has beyond that is computed anew behind it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mmserve.scheduler.holdings import Holdings, held_pages
from mmserve.sequence import Sequence as Seq
from mmserve.sequence import SequenceStatus

Pick = tuple[Seq, int]  # a beam and the token that it goes on with


class SharedKV(NamedTuple):
    """Bytes of pages that beams hold, and what these would be if each had its own."""

    held: int = 0
    copied: int = 0

    @property
    def saved(self) -> float | None:
        return 1 - self.held / self.copied if self.copied else None

    def plus(self, other: SharedKV) -> SharedKV:
        return SharedKV(self.held + other.held, self.copied + other.copied)


@dataclass(eq=False)
class Group:
    """`members`: those that run, the root alone until its prompt is computed. `tails`: of each
    preempted one, the tokens behind the root's."""

    root: Seq
    width: int
    members: list[Seq] = field(default_factory=list)
    tails: list[list[int]] = field(default_factory=list)

    @property
    def is_split(self) -> bool:
        return self.members != [self.root]


class Beams:
    """The groups of one scheduler, whose `running` list it keeps."""

    def __init__(self, holdings: Holdings, running: list[Seq]) -> None:
        self._holdings, self._running = holdings, running
        self._groups: dict[str, Group] = {}  # by the request's id

    def add(self, root: Seq) -> None:
        """A sequence enters the queue, with or without beams."""
        beams = root.request.params.beams
        if beams is not None and not root.request.prefill_only:
            self._groups[root.id] = Group(root, beams.width, [root])

    def members(self, seq: Seq) -> list[Seq]:
        """Who runs for a request: its beams, or the sequence itself."""
        group = self._groups.get(seq.id)
        return [seq] if group is None else list(group.members)

    def seats(self, seq: Seq) -> int:
        """How many may come to run once a sequence is admitted."""
        if not self._groups:
            return len(self._running) + 1
        groups = self._groups.values()
        later = sum(g.width - len(g.members) for g in groups if g.members[0] in self._running)
        own = self._groups.get(seq.id)
        return len(self._running) + later + (1 if own is None else own.width)

    def tail(self, seq: Seq) -> int:
        """Tokens that a waiting sequence will have to go on with."""
        group = self._groups.get(seq.id)
        return len(group.tails[0]) if group is not None and group.tails else 0

    def advanced(self, seq: Seq) -> None:
        """More of a sequence is computed: a root that is complete becomes its beams again."""
        group = self._groups.get(seq.id)
        if group is None or not group.tails or seq.num_computed_tokens < seq.num_tokens:
            return
        members = [self._fork(seq) for _ in group.tails]
        for member, tail in zip(members, group.tails, strict=True):
            for token in tail:
                member.append(token)
        group.tails = []
        self._replace(group, members)

    def branch(self, root: Seq, picks: Sequence[Pick]) -> None:
        """Go on with these, in this order; beams that none of them goes on with end."""
        group = self._groups[root.id]
        left = Counter(parent for parent, _ in picks)
        members = []
        for parent, token in picks:
            left[parent] -= 1
            last = not left[parent] and parent is not root
            member = parent if last else self._fork(parent)
            member.append(token)
            members.append(member)
        self._replace(group, members)

    def gather(self, seq: Seq) -> Seq:
        """What waits for all members, which hold nothing any more."""
        group = self._groups.get(seq.id)
        if group is None or not group.is_split:
            return seq
        root, at = group.root, group.root.num_tokens
        made = [member.token_ids[at:] for member in group.members]
        several = (i for i, ids in enumerate(zip(*made, strict=True)) if len({*ids}) > 1)
        common = next(several, len(made[0]) - 1)  # what has no successor yet is computed by each
        for token in made[0][:common]:
            root.append(token)
        group.tails = [tokens[common:] for tokens in made]
        group.members = [root]
        return root

    def shared(self, root: Seq, page_bytes: Sequence[int]) -> SharedKV:
        """What a request's beams hold, text and images. `page_bytes` by layer group."""
        members = self.members(root)
        held = copied = 0
        for g, size in enumerate(page_bytes):
            text = [set(held_pages(member.tables[g])) for member in members]
            images = [
                {page for placed in member.images if placed.pages for page in placed.pages[g]}
                for member in members
            ]
            for sets in (text, images):
                held += size * len(set().union(*sets))
                copied += size * sum(map(len, sets))
        return SharedKV(held, copied)

    def end(self, seq: Seq) -> None:
        """A request is over, its members hold nothing any more."""
        self._groups.pop(seq.id, None)

    def _fork(self, seq: Seq) -> Seq:
        """The same sequence once more, holding the same pages."""
        other = copy.copy(seq)
        for name, value in vars(seq).items():
            if isinstance(value, (list, dict)):
                setattr(other, name, copy.copy(value))
        other.course = copy.copy(seq.course)
        other.tables = [list(table) for table in seq.tables]
        other.images = [replace(p, pages=list(p.pages or [])) for p in seq.images]
        for g in self._holdings.text_groups:
            self._holdings.text[g].retain(held_pages(other.tables[g]))
        self._holdings.open_pages.retain(other)
        for placed in other.images:
            for g, pages in enumerate(placed.pages or []):
                if pages:
                    self._holdings.vision[g].retain(placed.key)
        return other

    def _replace(self, group: Group, members: list[Seq]) -> None:
        at = self._running.index(group.members[0])
        end = at + len(group.members)
        assert self._running[at:end] == group.members, "others run between the beams of a request"
        self._running[at:end] = members
        for old in group.members:
            if old not in members:
                self._holdings.drop(old)
                if old is not group.root:
                    old.status = SequenceStatus.FINISHED
        group.members = members
