"""Counters of the border: requests, sockets, resumes. The engine's own metrics stand beside them.

Knows nothing of Prometheus servers; it renders text.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class ServerMetrics:
    """The server's registry; one a server, so that two in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mmserve:http_requests",
            "HTTP requests by handler and status.",
            ("handler", "status"),
            registry=self._registry,
        )
        self.sockets = Gauge("mmserve:websockets_open", "Open WebSockets.", registry=self._registry)
        self.resumes = Counter(
            "mmserve:response_resumes",
            "Event streams continued after a given sequence number.",
            registry=self._registry,
        )
        self.slow_readers = Counter(
            "mmserve:slow_readers",
            "Connections let go because nobody read what was asked for, by kind.",
            ("kind",),
            registry=self._registry,
        )
        self.stored_responses = Gauge(
            "mmserve:stored_responses", "Responses in the store.", registry=self._registry
        )
        self.blob_bytes = Gauge(
            "mmserve:stored_blob_bytes",
            "Bytes of distinct images and files on disk.",
            registry=self._registry,
        )

    def request(self, handler: str, status: int) -> None:
        self._requests.labels(handler, str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
