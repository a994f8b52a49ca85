"""Figures of replicas, read from their `/metrics`: how busy each is, and all of them in one answer.

Owns which figures say so. Knows nothing of where they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "mmserve:"


@dataclass(frozen=True)
class Figures:
    """Of one moment. `finished`: requests so far. `vision_use`: the share of the vision pool that
    is in use now, without what is kept in case it is asked for."""

    running: float = 0.0
    waiting: float = 0.0
    finished: float = 0.0
    vision_use: float = 0.0

    def queue_s(self, before: Figures, seconds: float) -> float:
        """How long a new request would wait, at the rate at which others have ended since."""
        rate = (self.finished - before.finished) / seconds if seconds > 0 else 0.0
        # One that came to no end takes at least as long as nothing has ended.
        return self.waiting / max(rate, 1 / max(seconds, 1.0))


def figures(text: str) -> Figures:
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(name: str, **labels: str) -> float:
        wanted = labels.items()
        found = (s for s in samples if s.name == PREFIX + name and wanted <= s.labels.items())
        return sum(s.value for s in found)

    return Figures(
        total("num_requests_running"),
        total("num_requests_waiting"),
        total("e2e_request_latency_seconds_count"),
        total("kv_cache_usage_perc", pool="vision"),
    )


class _Together(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples.extend(_labelled(family, replica))
        return families.values()


def _labelled(family: Metric, replica: str) -> Iterator[Sample]:
    for sample in family.samples:
        yield sample._replace(labels={**sample.labels, "replica": replica})


def with_replicas(texts: Mapping[str, str]) -> bytes:
    """One text of all, each sample with its replica's name."""
    registry = CollectorRegistry()
    registry.register(_Together(texts))
    return generate_latest(registry)
