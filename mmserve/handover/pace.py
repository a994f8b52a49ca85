"""How long a stage worker is going to take for a job: what it says, corrected by what was seen.

Owns the estimate. No torch, no sockets; whoever calls brings the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mmserve.handover.wire import LEAST_TIMED, Rates

WEIGHT = 0.2  # of a new measurement
LONGEST_STRETCH = 20.0
FORGETS_S = 30.0  # in which half of what was seen beyond the plain estimate is forgotten


@dataclass
class Pace:
    """`byte_s`: seconds that a byte takes from the worker to here; None: not measured yet.

    A worker computes and sends at once, so the longer of both is what a job takes. Where it takes
    longer than that, because cores or a network are shared, the estimate is stretched; what nobody
    has seen again for a while fades, or a worker that was slow once would never be asked again.
    """

    rates: Rates = Rates(None, None)
    byte_s: float | None = None
    _stretch: float = 1.0
    _seen_at: float = 0.0
    _expected: dict[int, float] = field(default_factory=dict)  # seconds, by job under way

    def moved(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= LEAST_TIMED:
            new = seconds / num_bytes
            old = new if self.byte_s is None else self.byte_s
            self.byte_s = (1 - WEIGHT) * old + WEIGHT * new

    def estimate(
        self, now: float, text_tokens: int, image_tokens: int, num_bytes: int
    ) -> float | None:
        """Seconds for such a job behind those under way; None: nobody knows."""
        token_s, image_token_s = self.rates
        if self.byte_s is None or (text_tokens and token_s is None):
            return None
        if image_tokens and image_token_s is None:
            return None
        compute = text_tokens * (token_s or 0.0) + image_tokens * (image_token_s or 0.0)
        alone = max(compute, num_bytes * self.byte_s) * self._stretched(now)
        return sum(self._expected.values()) + alone

    def began(self, job: int, seconds: float) -> None:
        """A job that is expected to end in so many seconds, those before it included."""
        self._expected[job] = max(seconds - sum(self._expected.values()), 0.0)

    def ended(self, job: int, now: float, expected: float, seconds: float) -> None:
        """It took so long, where `expected` was said of it."""
        self._expected.pop(job, None)
        if expected > 0:
            seen = self._stretched(now) * seconds / expected
            blended = (1 - WEIGHT) * self._stretched(now) + WEIGHT * seen
            self._stretch = min(max(blended, 1.0), LONGEST_STRETCH)
            self._seen_at = now

    def dropped(self, job: int) -> None:
        """It will not end."""
        self._expected.pop(job, None)

    def _stretched(self, now: float) -> float:
        age = max(now - self._seen_at, 0.0)
        return 1.0 + (self._stretch - 1.0) * math.exp2(-age / FORGETS_S)
