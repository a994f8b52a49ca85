"""The engine as one tenant reaches it: under its salt, within its limits.

Owns what a request costs its tenant, on every surface. Knows nothing of surfaces.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmserve.prompt import Message, Prompt
from mmserve.request import Constraint, SamplingParams, Streaming, TokenEvent
from mmserve.server.engine_face import EngineFace, Generation, ModelInfo
from mmserve.server.limits import Meter
from mmserve.server.tenants import Account
from mmserve.server.tracing import NoTracing, Tracing


class Metered:
    """A generation that tells its tenant's meter of every token, and of its end: its last event,
    an abort, or that nobody has it any more."""

    def __init__(self, generation: Generation, meter: Meter) -> None:
        self._generation, self._meter = generation, meter
        meter.begin()
        self._end = weakref.finalize(self, meter.end)
        self._end.atexit = False

    @property
    def id(self) -> str:
        return self._generation.id

    def abort(self) -> None:
        self._generation.abort()
        self._end()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        async for event in self._generation:
            answers = event.choices or (event,)
            self._meter.spend(sum(len(answer.token_ids) for answer in answers))
            if event.finish_reason is not None:
                self._end()
            yield event


@dataclass(frozen=True)
class Access:
    """`asked`: by the tenant itself; else it is done for it, costs tokens and is not refused."""

    engine: EngineFace
    account: Account
    tracing: Tracing = NoTracing()
    asked: bool = True

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def unasked(self) -> Access:
        return replace(self, asked=False)

    def request(self) -> None:
        """What is no generation, and yet work. Raises `RateLimitError`."""
        self.account.meter.request()

    async def prepare(
        self,
        messages: Sequence[Message],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: Constraint | None = None,
    ) -> Prompt:
        """As the engine's; a tenant that has spent its limits is told so before anything is done.
        Raises `RequestError`s."""
        if self.asked:
            self.account.meter.check()
        return await self.engine.prepare(
            messages,
            continue_final=continue_final,
            tools=tools,
            constraint=constraint,
            tenant=self.account.tenant,
        )

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prefill_only: bool = False,
        streaming: Streaming | None = None,
        durable: bool = False,
    ) -> Generation:
        """As the engine's. Raises `RequestError`s."""
        meter = self.account.meter
        if self.asked:
            meter.check(prompt.num_tokens)
        generation = self.engine.submit(
            request_id,
            prompt,
            params,
            prefill_only=prefill_only,
            streaming=streaming,
            durable=durable,
            tenant=self.account.tenant,
        )
        generation = self.tracing.watch(generation, self.account.tenant)
        if not self.asked:
            meter.spend(prompt.num_tokens)
            return generation
        meter.request(prompt.num_tokens)
        return Metered(generation, meter)
