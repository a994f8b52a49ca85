"""Traces of generations, for a collector that speaks OpenTelemetry's protocol.

Owns the spans: a request, and within it queue, prefill and decode, by the times that the engine
measured. They hold counts and names, nothing that was asked or said. Without an endpoint nothing
of OpenTelemetry is imported.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mmserve import __version__
from mmserve.request import Tenant, TokenEvent
from mmserve.server.engine_face import Generation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

MS = 1_000_000  # nanoseconds


class Tracing(Protocol):
    def watch(self, generation: Generation, tenant: Tenant) -> Generation:
        """The generation, which is traced from now to its end."""

    def within(self, headers: Headers) -> AbstractContextManager[None]:
        """What begins meanwhile is part of the trace that the headers name, if any."""

    def close(self) -> None:
        """What has ended is sent."""


class NoTracing:
    def watch(self, generation: Generation, tenant: Tenant) -> Generation:
        return generation

    def within(self, headers: Headers) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


class OTelTracing:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mmserve", __version__)

    def watch(self, generation: Generation, tenant: Tenant) -> Generation:
        span = self._tracer.start_span("mmserve.request", start_time=time.time_ns())
        span.set_attribute("gen_ai.response.id", generation.id)
        span.set_attribute("mmserve.tenant", tenant.name)
        return TracedGeneration(generation, span, self)

    @contextmanager
    def within(self, headers: Headers) -> Any:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        token = context.attach(TraceContextTextMapPropagator().extract(dict(headers)))
        try:
            yield
        finally:
            context.detach(token)

    def phase(self, parent: Span, name: str, start: int, end: int) -> None:
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(parent)
        self._tracer.start_span(name, context=inside, start_time=start).end(end)

    def close(self) -> None:
        self._provider.shutdown()


class TracedGeneration:
    def __init__(self, generation: Generation, span: Span, tracing: OTelTracing) -> None:
        self._generation, self._span, self._tracing = generation, span, tracing
        self._began = time.time_ns()

    @property
    def id(self) -> str:
        return self._generation.id

    def abort(self) -> None:
        self._generation.abort()
        self._span.end()  # harmless where it has ended

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        async for event in self._generation:
            if event.finish_reason is not None:
                self._ended(event)
            yield event

    def _ended(self, event: TokenEvent) -> None:
        span, usage, timings = self._span, event.usage, event.timings
        assert event.finish_reason is not None
        span.set_attribute("gen_ai.response.finish_reasons", [event.finish_reason.value])
        if usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
            span.set_attribute("mmserve.cached_tokens", usage.cached_tokens)
            span.set_attribute("mmserve.image_tokens", usage.image_tokens)
        if timings is not None:
            at = self._began
            phases = (timings.queue_ms, timings.prompt_ms, timings.predicted_ms)
            for name, ms in zip(("queue", "prefill", "decode"), phases, strict=True):
                self._tracing.phase(span, f"mmserve.{name}", at, at + int(ms * MS))
                at += int(ms * MS)
            span.set_attribute("mmserve.image_ms", timings.image_ms)
        span.end()


class TraceContext:
    """The middleware that takes in the trace a client is part of (`traceparent`)."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        with self._tracing.within(Headers(scope=scope)):
            await self._app(scope, receive, send)


def tracing_to(endpoint: str | None) -> Tracing:
    """To a collector's address, such as http://127.0.0.1:4318/v1/traces. Raises ValueError where
    what it needs is not installed."""
    if endpoint is None:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError("traces need: pip install 'mmserve[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "mmserve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OTelTracing(provider)
