"""What steps of some size take, from the newest measurements.

Owns one curve, seconds by size. No torch, no clock; knows nothing of what its sizes count. An
outlier does no harm: of each size the lower median counts, so that even of two measurements the
one that had something compiled in it is not believed.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

KEPT = 9  # measurements by size
ENOUGH = 4  # that are needed to be sure of a size
STALE = 1024  # steps, after which what was measured is of other times: contexts have grown since


class _Point(NamedTuple):
    size: float
    seconds: float


@dataclass
class _Bucket:
    newest: int  # the step of its last measurement
    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    point: _Point = _Point(0.0, 0.0)

    def add(self, size: int, seconds: float) -> None:
        self.sizes.append(size)
        self.seconds.append(seconds)
        self.point = _Point(sum(self.sizes) / len(self.sizes), median_low(self.seconds))


class Curve:
    """Seconds by size; sizes less than half an octave apart are one."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._points: list[_Point] = []  # by size
        self._slope = 0.0  # seconds that one more takes, over all points
        self._changed = False

    def add(self, size: int, seconds: float, step: int) -> None:
        """A measurement made in step number `step`."""
        bucket = self._buckets.setdefault(bucket_of(size), _Bucket(step))
        if step - bucket.newest > STALE:
            bucket.sizes.clear()
            bucket.seconds.clear()
        bucket.add(size, seconds)
        bucket.newest = step
        self._changed = True

    def sure(self, size: int, step: int) -> bool:
        """Whether sizes like this one were measured often enough, and not too long ago."""
        bucket = self._buckets.get(bucket_of(size))
        return bool(bucket and len(bucket.sizes) >= ENOUGH and step - bucket.newest <= STALE)

    def at(self, size: float) -> float | None:
        """Seconds; None where nothing was ever measured. Straight lines between what is known,
        and a straight line through all of it beyond."""
        if self._changed:
            self._fit()
        points = self._points
        if not points:
            return None
        place = bisect(points, (size,))
        if 0 < place < len(points):
            low, high = points[place - 1], points[place]
            part = (size - low.size) / (high.size - low.size)
            return low.seconds + part * (high.seconds - low.seconds)
        nearest = points[0 if place == 0 else -1]
        return max(nearest.seconds + self._slope * (size - nearest.size), nearest.seconds / 2)

    @property
    def largest(self) -> float:
        """That was ever measured, about; 0: none was."""
        if self._changed:
            self._fit()
        return self._points[-1].size if self._points else 0.0

    def _fit(self) -> None:
        self._points = points = sorted(bucket.point for bucket in self._buckets.values())
        size = sum(point.size for point in points) / len(points)
        seconds = sum(point.seconds for point in points) / len(points)
        spread = sum((point.size - size) ** 2 for point in points)
        shared = sum((p.size - size) * (p.seconds - seconds) for p in points)
        self._slope = max(shared / spread, 0.0) if spread else 0.0
        self._changed = False


def bucket_of(size: int) -> int:
    """A number that sizes less than half an octave apart share."""
    return round(2 * math.log2(max(size, 1)))
