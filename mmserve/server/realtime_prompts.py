"""From the items of a Realtime response to a running generation, with as many of them as fit.

Owns what is left out when a conversation has outgrown the context. Knows nothing of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mmserve.errors import ContextLengthExceededError, RequestError, TooManyImagesError
from mmserve.prompt import Prompt
from mmserve.request import SamplingParams
from mmserve.server.engine_face import Generation
from mmserve.server.history import Entry, History, Item, render
from mmserve.server.realtime_items import cut_points, without
from mmserve.server.realtime_session import Settings
from mmserve.server.services import Services

ANSWER_SHARE = 8  # an answer without limit gets one in so many tokens of the context, at least


def _history(items: Sequence[Item], old: bool) -> History:
    return History(tuple(Entry(item, old=old) for item in items))


class Started(NamedTuple):
    """`left_out`: the items that found no room, and how many tokens they would have taken (None
    where even counting them was refused)."""

    generation: Generation
    left_out: list[Item]
    dropped_tokens: int | None


class Prompts:
    """Makes prompts of items and submits them."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def _prompt(self, items: Sequence[Item], settings: Settings, old: bool) -> Prompt:
        messages = await render(_history(items, old), settings.instructions)
        calling = settings.calling
        return await self._services.engine.prepare(
            messages, tools=calling.described, constraint=settings.params.constraint
        )

    async def prefill(self, id: str, items: Sequence[Item], settings: Settings) -> Generation:
        """Compute what the next prompt begins with; behind every real turn."""
        messages = await render(_history(items, old=True), settings.instructions)
        engine = self._services.engine
        prompt = await engine.prepare(messages, tools=settings.calling.described)
        return engine.submit(id, prompt, SamplingParams(), prefill_only=True)

    def _room(self, settings: Settings) -> int:
        """Tokens a prompt may have, so that there is room for the answer."""
        limit = self._services.info.max_model_len
        answer = settings.params.max_tokens or limit // ANSWER_SHARE
        return max(limit - answer, limit // 2)

    async def start(
        self, id: str, items: list[Item], settings: Settings, *, old: bool = True
    ) -> Started:
        """Submit as many items as fit; `old`: they were checked when they came.

        Raises `RequestError`s: `context_length_exceeded` where nothing may be left out, or not even
        the last item fits.
        """
        engine = self._services.engine
        whole: Prompt | None = None
        try:
            whole = await self._prompt(items, settings, old)
            fits = settings.retention is None or whole.num_tokens <= self._room(settings)
            if fits or not cut_points(items):
                return Started(engine.submit(id, whole, settings.params), [], 0)
        except (ContextLengthExceededError, TooManyImagesError):
            if settings.retention is None or not cut_points(items):
                raise
        return await self._start_cut(id, items, settings, old, whole)

    async def _start_cut(
        self, id: str, items: list[Item], settings: Settings, old: bool, whole: Prompt | None
    ) -> Started:
        """With the oldest items left out: as few as bring the prompt to the retained share."""
        assert settings.retention is not None
        goal = int(settings.retention * self._room(settings))
        starts = cut_points(items)
        low, high = 0, len(starts) - 1  # the cut is among starts[low:high + 1]
        while low < high:
            middle = (low + high) // 2
            if await self._size(without(items, starts[middle]), settings, old) <= goal:
                high = middle
            else:
                low = middle + 1
        refused: RequestError | None = None
        for start in starts[low:]:  # a pool may have less room than the context
            kept = without(items, start)
            try:
                prompt = await self._prompt(kept, settings, old)
                generation = self._services.engine.submit(id, prompt, settings.params)
            except (ContextLengthExceededError, TooManyImagesError) as error:
                refused = error
                continue
            ids = {item.id for item in kept}
            left_out = [item for item in items if item.id not in ids]
            dropped = None if whole is None else whole.num_tokens - prompt.num_tokens
            return Started(generation, left_out, dropped)
        assert refused is not None
        raise refused

    async def _size(self, items: list[Item], settings: Settings, old: bool) -> float:
        """Tokens of a prompt; endless where it cannot even be made."""
        try:
            return (await self._prompt(items, settings, old)).num_tokens
        except (ContextLengthExceededError, TooManyImagesError):
            return float("inf")
