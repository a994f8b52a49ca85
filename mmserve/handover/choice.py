"""Whether to have a prompt computed elsewhere: what it delays here against what it takes there.

Owns the comparison. No torch, no clock; knows nothing of requests or sockets.

What is computed here delays, beside its own first token, everybody whose tokens the same steps
make, so it costs its seconds once for each of them. What is computed elsewhere costs its own
request the way there and back, and the others only what is left to do here. So nothing is sent away
by an engine that has nothing else to do: it would be no sooner, whatever was measured.
"""

from __future__ import annotations

from typing import NamedTuple

MARGIN = 1.25  # by which elsewhere has to be better: estimates are rough


class Here(NamedTuple):
    """`seconds`: that it takes to compute all of it here; `queue`: before its turn; `others`: that
    run beside it."""

    seconds: float
    queue: float
    others: int


def cost_here(here: Here) -> float:
    """Seconds of delay, of all together."""
    return here.queue + here.seconds * (1 + here.others)


def cost_away(here: Here, away: float, rest: float) -> float:
    """The same, where so many seconds pass elsewhere and `rest` are left to be computed here."""
    return max(away, here.queue) + rest * (1 + here.others)


def pays(here: Here, away: float, rest: float) -> bool:
    if not here.others and not here.queue:
        return False
    return cost_away(here, away, rest) * MARGIN < cost_here(here)
