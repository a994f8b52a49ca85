"""What is done for a conversation once a turn has ended: cut, summarised and computed anew, so that
the next turn need not wait for it.

Owns the order of these and the model's request for a summary. Knows nothing of readers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mmserve.errors import RequestError
from mmserve.prompt import Message, Prompt, TextPart
from mmserve.request import FinishReason, SamplingParams
from mmserve.server.access import Access
from mmserve.server.answer import Answer
from mmserve.server.errors import StorageUnavailableError
from mmserve.server.history import Entry, History, render
from mmserve.server.services import Services
from mmserve.server.turn import Turn
from mmserve.server.window import Budget, dropped, line, text_tokens, trim
from mmserve.server.wire import new_id

log = logging.getLogger("mmserve.server")

SUMMARY_TOKENS = 128
ASK = (
    "Summarize our conversation so far in two or three short sentences. Keep names, numbers and "
    "decisions."
)
PREFILL = SamplingParams(max_tokens=1, temperature=0.0)


def request_id(kind: str, turn: Turn) -> str:
    """Of a request that nobody made, for a turn; `ResponseStore.conversation` knows it."""
    return f"{new_id(kind)}.{turn.id}"


class Cut(NamedTuple):
    whole: History
    kept: History


@dataclass(frozen=True)
class Upkeep:
    """For one turn: `instructions` and `tools` are those that it was asked with."""

    services: Services
    instructions: str | None
    tools: Sequence[Mapping[str, Any]] = ()

    def cut(self, turn: Turn, answer: Answer) -> Cut | None:
        """At the end of a turn: where another one would not fit the window, decide what is kept."""
        policy = turn.session.policy
        if policy is None:
            return None
        budget = Budget.of(policy, self.services.info.max_model_len)
        images = answer.usage.image_tokens
        text = answer.usage.prompt_tokens - images + len(answer.token_ids)
        question = sum(line(Entry(item)).tokens for item in turn.items)
        if budget.holds_more(text, images, question):
            return None
        whole = turn.history()
        kept = trim(whole, budget, text, images)
        if kept is whole:
            return None
        turn.kept = kept
        return Cut(whole, kept)

    async def follow(self, turn: Turn, cuts: Sequence[Cut]) -> None:
        """Once the turn is kept, after the cuts made for its prompt and at its end: the summary,
        then the new layout's KV."""
        policy = turn.session.policy
        if policy is None:
            return
        window = Budget.of(policy, self.services.info.max_model_len).window
        cuts = [cut for cut in cuts if cut.kept.state.dropped > cut.whole.state.dropped]
        if cuts and policy.summary:  # not of images alone
            await self._summarise(turn, cuts, min(SUMMARY_TOKENS, window // 8))
        kept = turn.kept
        # A newest turn that fills the window is left out as soon as there is a newer one.
        if kept is not None and not turn.continued and text_tokens(kept) <= window:
            await self.prefill(turn, kept)

    async def _summarise(self, turn: Turn, cuts: Sequence[Cut], limit: int) -> None:
        summary, missing = cuts[0].kept.state.summary, None
        try:
            for cut in cuts:
                state = replace(cut.whole.state, summary=summary)
                gone = dropped(cut.whole, cut.kept)
                summary = await self._ask(turn, replace(gone, state=state), limit)
        except RequestError as error:
            missing = f"The summary could not be written: {error.message}"
        late = cuts[-1].kept.late
        assert late is not None
        late.text = summary
        kept = turn.history()
        turn.kept = replace(kept, state=replace(kept.state, summary=summary, missing=missing))
        try:
            await self.services.responses.keep_session(turn)
        except StorageUnavailableError:
            log.warning("the summary of %s is not stored", turn.id)

    async def _ask(self, turn: Turn, gone: History, limit: int) -> str:
        """The dropped turns are a prefix of what was just computed, and so is their KV, unless an
        earlier summary came late."""
        messages = await render(gone, self.instructions)
        messages.append(Message("user", (TextPart(ASK),)))
        prompt = await self._prepare(turn, messages)
        params = SamplingParams(max_tokens=limit, temperature=0.0)
        id = request_id("summary", turn)
        generation = self._access(turn).submit(id, prompt, params)
        pieces: list[str] = []
        try:
            async for event in generation:
                pieces.append(event.text)
                if event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    raise RequestError(event.error or "The generation was stopped.")
        finally:
            generation.abort()
        if not (text := "".join(pieces).strip()):
            raise RequestError("The model said nothing.")
        return text

    async def prefill(self, turn: Turn, history: History) -> None:
        """Compute the KV of a layout that continues a turn, behind all that is asked for; a refusal
        is no harm."""
        try:
            prompt = await self._prepare(turn, await render(history, self.instructions))
            id = request_id("prefill", turn)
            generation = self._access(turn).submit(
                id, prompt, PREFILL, prefill_only=True, durable=turn.durable
            )
        except RequestError as error:
            log.info("a new layout is not computed ahead: %s", error.message)
            return
        with self.services.ahead.counted(generation):
            try:
                async for _ in generation:
                    pass
            finally:
                generation.abort()

    def _access(self, turn: Turn) -> Access:
        return self.services.access(turn.owner).unasked

    async def _prepare(self, turn: Turn, messages: list[Message]) -> Prompt:
        return await self._access(turn).prepare(messages, tools=self.tools)
