"""How many replicas there should be, by how long requests wait and how much of the vision pools is
in use.

Owns the rule. Knows nothing of Ray; when a wish becomes true (delays, bounds) is the autoscaler's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

QUEUE_S, VISION_USE = "queue_s", "vision_use"
TARGETS = {QUEUE_S: 1.0, VISION_USE: 0.8}  # seconds, share
CALM = 0.5  # of the targets: below it fewer replicas do


class Context(Protocol):
    """What an autoscaler tells: figures by name and replica."""

    @property
    def current_num_replicas(self) -> int: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


def pressure(metrics: Mapping[str, Mapping[Any, float]]) -> float:
    """The worst figure's mean over its target; 1 is as it should be."""
    means = {name: sum(values.values()) / len(values) for name, values in metrics.items() if values}
    return max((means.get(name, 0.0) / target for name, target in TARGETS.items()), default=0.0)


def desired_replicas(context: Context) -> tuple[int, dict[str, Any]]:
    """At most twice as many at once; one fewer at a time."""
    count, metrics = context.current_num_replicas, context.aggregated_metrics
    if not metrics or not count:
        return max(count, 1), {}
    now = pressure(metrics)
    if now > 1:
        return math.ceil(count * min(now, 2.0)), {}
    return (count - 1 if now < CALM * (count - 1) / count else count), {}
