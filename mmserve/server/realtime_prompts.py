"""From the items of a Realtime response to a running generation, with as many of them as fit.

Owns what is left out when a conversation has outgrown the context. Knows nothing of events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from mmserve.errors import ContextLengthExceededError, RequestError, TooManyImagesError
from mmserve.prompt import Prompt
from mmserve.request import SamplingParams
from mmserve.server.access import Access
from mmserve.server.engine_face import Generation
from mmserve.server.history import Entry, History, Item, render
from mmserve.server.realtime_items import cut_points, without
from mmserve.server.realtime_session import Settings

ANSWER_SHARE = 8  # an answer without limit gets one in so many tokens of the context, at least
QUESTION_SHARE = 8  # and what comes next, one in so many of the room that prompts have


class Fitted(NamedTuple):
    """`left_out`: the items that found no room, and how many tokens they would have taken (None
    where even counting them was refused)."""

    prompt: Prompt
    left_out: list[Item]
    dropped_tokens: int | None


class Started(NamedTuple):
    generation: Generation
    fitted: Fitted


class Prompts:
    """Makes prompts of items and submits them."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def _room(self, settings: Settings) -> int:
        """Tokens a prompt may have, so that there is room for the answer."""
        limit = self._access.info.max_model_len
        answer = settings.params.max_tokens or limit // ANSWER_SHARE
        return max(limit - answer, limit // 2)

    def _room_ahead(self, settings: Settings) -> int:
        """And for another question: a cut that would be due then is better made before. Not where
        so much is to be retained that the cut would not help."""
        room = self._room(settings)
        less = room - room // QUESTION_SHARE
        helps = settings.retention is not None and settings.retention * room <= less
        return less if helps else room

    def is_due(self, num_tokens: int, settings: Settings) -> bool:
        """Whether a conversation that has come to so many tokens is to be cut before it goes on."""
        return settings.retention is not None and num_tokens > self._room_ahead(settings)

    async def start(
        self, id: str, items: list[Item], settings: Settings, *, old: bool = True
    ) -> Started:
        """Submit as many items as fit; `old`: they were checked when they came.

        Raises `RequestError`s: `context_length_exceeded` where nothing may be left out, or not even
        the last item fits.
        """
        room = self._room(settings)
        return await self._submit(id, self._fits(items, settings, room, old), settings.params)

    async def start_ahead(self, id: str, items: list[Item], settings: Settings) -> Started:
        """Compute what the next prompt begins with; behind every real turn."""
        fits = self._fits(items, settings, self._room_ahead(settings), old=True)
        return await self._submit(id, fits, settings.params, prefill_only=True)

    async def _submit(
        self,
        id: str,
        fits: AsyncGenerator[Fitted, None],
        params: SamplingParams,
        *,
        prefill_only: bool = False,
    ) -> Started:
        refused: RequestError | None = None
        async with aclosing(fits):
            async for fitted in fits:
                try:
                    access = self._access.unasked if prefill_only else self._access
                    generation = access.submit(id, fitted.prompt, params, prefill_only=prefill_only)
                except ContextLengthExceededError as error:
                    refused = error  # a pool may have less room than the context
                else:
                    return Started(generation, fitted)
        assert refused is not None
        raise refused

    async def _fits(
        self, items: list[Item], settings: Settings, room: int, old: bool
    ) -> AsyncGenerator[Fitted, None]:
        """What to try: all of the items; where they take more than `room`, as many as come to the
        retained share of it; and then fewer and fewer. Raises why the last is refused."""
        starts = cut_points(items) if settings.retention is not None else []
        whole, refused = await self._try(items, settings, old)
        if whole is not None and (not starts or whole.num_tokens <= room):
            yield Fitted(whole, [], 0)
        for start in starts[await self._first(starts, items, settings, old) :]:
            kept = without(items, start)
            prompt, refused = await self._try(kept, settings, old)
            if prompt is not None:
                ids = {item.id for item in kept}
                left_out = [item for item in items if item.id not in ids]
                dropped = None if whole is None else whole.num_tokens - prompt.num_tokens
                yield Fitted(prompt, left_out, dropped)
        if refused is not None:
            raise refused

    async def _first(
        self, starts: list[int], items: list[Item], settings: Settings, old: bool
    ) -> int:
        """The number of the first start from which on the items are few enough, or of the last."""
        goal = int((settings.retention or 0.0) * self._room(settings))
        low, high = 0, max(len(starts) - 1, 0)
        while low < high:
            middle = (low + high) // 2
            prompt, _ = await self._try(without(items, starts[middle]), settings, old)
            if prompt is not None and prompt.num_tokens <= goal:
                high = middle
            else:
                low = middle + 1
        return low

    async def _try(
        self, items: Sequence[Item], settings: Settings, old: bool
    ) -> tuple[Prompt | None, RequestError | None]:
        """The prompt, or why there is none: too long, or too many images."""
        history = History(tuple(Entry(item, old=old) for item in items))
        messages = await render(history, settings.instructions)
        try:
            prompt = await self._access.unasked.prepare(
                messages,
                tools=settings.calling.described,
                constraint=settings.params.constraint,
            )
        except (ContextLengthExceededError, TooManyImagesError) as error:
            return None, error
        return prompt, None
