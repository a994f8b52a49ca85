"""Until when a request has to have ended, as its client and the server want it.

Owns the field, the header, and what happens when time is up: what is still being prepared is
dropped, a generation is aborted and its last event says why. Knows nothing of protocols.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mmserve.errors import RequestError
from mmserve.request import FinishReason, TokenEvent
from mmserve.server.engine_face import Generation
from mmserve.server.errors import GenerationFailedError
from mmserve.server.fields import Fields
from mmserve.server.wire import cancel

T = TypeVar("T")

FIELD = "timeout"
HEADER = "x-request-timeout"
CODE = "deadline_exceeded"


class Deadline:
    """`seconds` from now, on the running event loop; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        now = asyncio.get_running_loop().time()
        self._at = None if seconds is None else now + seconds

    @classmethod
    def of(
        cls, body: Mapping[str, Any], limit_s: float, headers: Mapping[str, str] | None = None
    ) -> Deadline:
        """The earliest that anybody wants; `limit_s`: the server's, 0 for none. Raises
        `RequestError`."""
        wishes = [limit_s] if limit_s else []
        asked = Fields(dict(body)).number(FIELD, 0, math.inf)
        if asked is not None:
            wishes.append(_positive(asked, FIELD))
        if headers is not None and (text := headers.get(HEADER)) is not None:
            wishes.append(_positive(text, HEADER))
        return cls(min(wishes, default=None))

    @property
    def message(self) -> str:
        return f"The answer has not come to its end in {self.seconds:g} s."

    async def bound(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes before a generation, of which nothing is left where it is cancelled. Raises
        `GenerationFailedError`."""
        if self._at is None:
            return await work
        left = self._at - asyncio.get_running_loop().time()
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task,), timeout=max(left, 0.0))
            if not task.done():
                raise GenerationFailedError(self.message, CODE)
            return task.result()
        finally:
            await cancel(task)

    def bind(self, generation: Generation) -> Generation:
        return generation if self._at is None else _Bound(generation, self._at, self.message)


class _Bound:
    """A generation that ends in time, on the clock of its event loop."""

    def __init__(self, generation: Generation, at: float, message: str) -> None:
        self.id = generation.id
        self._generation, self._message = generation, message
        self._is_late = False
        self._timer = asyncio.get_running_loop().call_at(at, self._expire)

    def _expire(self) -> None:
        self._is_late = True
        self._generation.abort()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        async for event in self._generation:
            if event.finish_reason is not None:
                self._timer.cancel()
            if self._is_late and event.finish_reason is FinishReason.ABORT:
                event = replace(
                    event, finish_reason=FinishReason.ERROR, error=self._message, code=CODE
                )
            yield event

    def abort(self) -> None:
        self._timer.cancel()
        self._generation.abort()


def _positive(value: str | float, param: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise RequestError(f"'{param}' must be a number of seconds above 0.", param=param)
    return seconds
