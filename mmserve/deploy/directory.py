"""Which replicas there are, how busy each is, and which of them a request goes to.

Owns the choice: who keeps the conversation, else who has seen most of its pictures, else whom
rendezvous hashing names, weighted by load; and whom to try next. What it remembers of pictures
saves work and is never needed. Knows nothing of transport or of how replicas are started.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mmserve.deploy.asked import Asked
from mmserve.routing.rendezvous import LIMIT, Rendezvous, load_weights

SEEN = 200_000  # pictures and beginnings whose replicas are remembered
CALMING = 0.3  # share of the newest report in what a load is taken to be


@dataclass(frozen=True)
class Facts:
    """What a replica says of itself. `ready`: it takes new work; one that drains still answers for
    what it keeps. `load`: requests that run and wait. `at`: seconds since 1970."""

    name: str
    url: str
    ready: bool
    load: float
    at: float


class Directory:
    """`now`: seconds since 1970."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._facts: dict[str, Facts] = {}
        self._loads: dict[str, float] = {}  # calmed
        self._failed: dict[str, float] = {}  # when a replica was last not to be reached
        self._seen: OrderedDict[str, str] = OrderedDict()
        self.sockets: Counter[str] = Counter()  # open here, by replica

    def learn(self, reports: Iterable[Facts]) -> None:
        """All that there are, as they say; one that is missing is gone."""
        facts = {each.name: each for each in reports}
        self._facts = facts
        for name, each in facts.items():
            before = self._loads.get(name, each.load)
            self._loads[name] = before + CALMING * (each.load - before)
        for old in self._loads.keys() - facts.keys():
            del self._loads[old]
            self._failed.pop(old, None)

    def failed(self, name: str) -> None:
        """It could not be reached; it must report anew before it is believed again."""
        self._failed[name] = self._now()

    def reachable(self) -> list[Facts]:
        every = self._facts.values()
        return [each for each in every if each.at > self._failed.get(each.name, 0.0)]

    def ready(self) -> list[Facts]:
        return [each for each in self.reachable() if each.ready]

    def candidates(self, asked: Asked, *, reads: bool = False) -> list[Facts]:
        """Where to send it, best first; `reads`: of what is kept, so that who drains will do."""
        ready = self.ready()
        by_name = {each.name: each for each in ready}
        if reads:
            by_name |= {each.name: each for each in self.reachable()}
        first = asked.home if asked.home in by_name else None
        if first is None and ready:
            first = self._choose(asked, [each.name for each in ready])
        others = sorted(ready, key=self._business)
        chosen = [by_name[first]] if first is not None else []
        return chosen + [each for each in others if each.name != first]

    def calmest(self) -> list[Facts]:
        """Those that take new work, the least busy first."""
        return sorted(self.ready(), key=self._business)

    def _business(self, each: Facts) -> tuple[float, str]:
        return self._loads[each.name] + self.sockets[each.name], each.name

    def remember(self, asked: Asked, name: str) -> None:
        """The replica that a request was served by knows its pictures from now on."""
        for key in _keys(asked):
            self._seen[key] = name
            self._seen.move_to_end(key)
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)

    def _choose(self, asked: Asked, names: list[str]) -> str:
        loads = [self._loads[name] for name in names]
        full = LIMIT * sum(loads) / len(loads) + 2
        calm = {name for name, load in zip(names, loads, strict=True) if load < full}
        votes = Counter(name for name in asked.votes if name in calm)
        rendezvous, weights = Rendezvous(names), load_weights(loads)
        for key in _keys(asked):
            name = self._seen.get(key)
            if name not in calm:
                name = rendezvous.choose([key], "", weights)
            votes[name] += 1
        return votes.most_common(1)[0][0] if votes else min(names)


def _keys(asked: Asked) -> tuple[str, ...]:
    """What a request is found again by: what its client calls it, its pictures, its beginning."""
    if asked.session is not None:
        return (f"session {asked.session}",)
    if asked.digests or asked.votes:
        return asked.digests
    return (asked.prefix,) if asked.prefix else ()
