"""What one tenant may ask in a minute and at once, and how a client is told of it.

Owns the counts, which refill steadily: after a pause a minute's worth may come in one burst.
Knows nothing of keys or of HTTP beyond the names of headers, which are OpenAI's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from mmserve.server.errors import RateLimitError

Clock = Callable[[], float]  # seconds
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for what in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)


@dataclass(frozen=True)
class Limits:
    """None: without limit."""

    requests: int | None = None  # a minute: answers, prefills, uploads and counts of tokens
    tokens: int | None = None  # a minute: text and image tokens of prompts, and of answers
    concurrency: int | None = None  # answers that run or wait


class Bucket:
    """So many a minute. May be overdrawn, by an answer whose length nobody knew."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._clock, self._at, self._level = clock, clock(), float(limit)

    @property
    def level(self) -> float:
        now = self._clock()
        self._level += (now - self._at) * self.limit / 60
        self._level, self._at = min(self._level, float(self.limit)), now
        return self._level

    def take(self, count: int) -> None:
        self._level = self.level - count

    def wait(self, count: float) -> float:
        """Seconds until so many are there; what is more than a minute's worth has to wait for
        that much alone."""
        missing = min(count, self.limit) - self.level
        return max(missing, 0.0) * 60 / self.limit

    def change(self, limit: int) -> None:
        used = self.limit - self.level
        self.limit, self._level = limit, limit - used


class Meter:
    """Of one tenant."""

    def __init__(self, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self.running = 0
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """Other limits from now on; what was used counts on."""
        self.limits = limits
        for kind, limit in (("requests", limits.requests), ("tokens", limits.tokens)):
            if limit is None:
                self._buckets.pop(kind, None)
            elif (bucket := self._buckets.get(kind)) is None:
                self._buckets[kind] = Bucket(limit, self._clock)
            else:
                bucket.change(limit)

    def check(self, tokens: int = 1) -> None:
        """Raises `RateLimitError` where a request of so many tokens cannot be taken now."""
        most = self.limits.concurrency
        if most is not None and self.running >= most:
            raise RateLimitError(f"{self.running} requests run or wait; this key may have {most}.")
        for kind, count in (("requests", 1), ("tokens", tokens)):
            bucket = self._buckets.get(kind)
            if bucket is not None and (wait := bucket.wait(count)) > 0:
                raise RateLimitError(
                    f"This key may have {bucket.limit} {kind} a minute; try again in {wait:.1f} s.",
                    retry_after_s=wait,
                )

    def request(self, tokens: int = 0) -> None:
        """One request, with what its prompt takes. Raises `RateLimitError`, and nothing counts."""
        self.check(tokens)
        if (bucket := self._buckets.get("requests")) is not None:
            bucket.take(1)
        self.spend(tokens)

    def spend(self, tokens: int) -> None:
        """They are computed, whether or not they were allowed."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.take(tokens)

    def begin(self) -> None:
        self.running += 1

    def end(self) -> None:
        self.running -= 1

    def headers(self) -> dict[str, str]:
        """What is left, as OpenAI's clients read it."""
        headers = {}
        for kind, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(math.floor(bucket.level), 0))
            headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.wait(bucket.limit))
        return headers


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.1f}s" if minutes else f"{rest:.3f}s"
