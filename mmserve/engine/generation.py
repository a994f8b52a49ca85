"""The events of one submitted request on their way to its reader.

Owns how far a reader may fall behind. Knows nothing of engines, threads or what reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace

from mmserve.request import FinishReason, TokenEvent
from mmserve.scheduler.pace import Waiting

MOST_BEHIND = 4096  # events that wait for a reader


class Generation:
    """For one reader, on one event loop. One that falls behind by `MOST_BEHIND` events is let go:
    the request is aborted, and its last event says why."""

    def __init__(
        self,
        id: str,
        abort: Callable[[str], None],
        num_prompt_tokens: int = 0,
        prefill_only: bool = False,
    ) -> None:
        self.id, self.num_prompt_tokens, self.prefill_only = id, num_prompt_tokens, prefill_only
        self.begun = False  # whether there was a token, or an end
        self._abort = abort
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._left_behind = False

    @property
    def num_waiting(self) -> int:
        """Events that nobody has read yet."""
        return self._events.qsize()

    def put(self, event: TokenEvent) -> None:
        self.begun, last = True, event.finish_reason is not None
        if self.num_waiting >= MOST_BEHIND and not last:
            self._left_behind = True
            return self.abort()
        if self._left_behind and last:
            error = f"The reader is {MOST_BEHIND} events behind."
            ended = FinishReason.ERROR
            event = replace(event, finish_reason=ended, error=error, code="reader_too_slow")
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while True:
            event = await self._events.get()
            yield event
            if event.finish_reason is not None:
                return

    def abort(self) -> None:
        """Stop within one step; the last event then says ABORT. Harmless after the end."""
        self._abort(self.id)


def alike(generations: Iterable[Generation], prefill_only: bool) -> int:
    """How many there are of those that answer, or of those that do not, which are served last: so
    many of these may wait that they would leave no room in one queue for both."""
    return sum(generation.prefill_only is prefill_only for generation in generations)


def before(generations: Iterable[Generation], left: Mapping[str, int]) -> Waiting:
    """What a new request would have to wait for. `left`: tokens of prompts that are still to be
    computed, where that is known."""
    every = [g for g in generations if not g.prefill_only]  # those come behind it
    waiting = [g for g in every if not g.begun]
    tokens = sum(left.get(g.id, g.num_prompt_tokens) for g in waiting)
    return Waiting(tokens, len(waiting), len(every))
