"""A request laid out on its history: cut where that has outgrown its budget, rendered, submitted.

Owns what is tried when a prompt does not fit. Knows nothing of turns or of readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmserve.errors import ContextLengthExceededError, RequestError, TooManyImagesError
from mmserve.prompt import Prompt
from mmserve.server.access import Access
from mmserve.server.deadline import Deadline
from mmserve.server.engine_face import Generation
from mmserve.server.history import History, render
from mmserve.server.responses_request import ResponseRequest
from mmserve.server.window import Budget, cut, in_turn, num_turns, shorter, text_tokens, trim

HINT = "With 'session_policy' or 'truncation': 'auto' it would go on without its oldest turns."


class Layout:
    """Prompts of one request."""

    def __init__(self, access: Access, request: ResponseRequest, deadline: Deadline) -> None:
        self._access = access
        self._request, self._deadline = request, deadline

    async def count(self, history: History) -> Prompt:
        """The prompt that `submit` would try first."""
        prompt, _ = await self._fit(next(self._attempts(history)))
        return prompt

    async def submit(
        self, id: str, history: History, *, durable: bool
    ) -> tuple[Generation, History]:
        """Submit with as much of the history as its policy, or `truncation`, lets it have.

        `durable`: what is computed may be kept on disk.
        """
        refused: RequestError | None = None
        for each in self._attempts(history):
            try:
                prompt, fitted = await self._fit(each)
                return self._submit(id, prompt, fitted, durable), fitted
            except (ContextLengthExceededError, TooManyImagesError) as error:
                refused = error
        assert refused is not None
        bounded = history.state.policy is not None or self._request.truncate
        if isinstance(refused, ContextLengthExceededError) and not bounded:
            if num_turns(history) > 1:
                raise ContextLengthExceededError(
                    f"{refused.message} {HINT}", param=refused.param
                ) from refused
        raise refused

    def _submit(self, id: str, prompt: Prompt, history: History, durable: bool) -> Generation:
        request, params = self._request, self._request.params
        if request.prefill or history.state.policy is None:
            streaming = None
        else:
            limit = self._access.info.max_model_len
            streaming = in_turn(history, prompt, limit)
            if params.max_tokens is None:  # the context no longer ends it
                params = replace(params, max_tokens=limit)
        return self._access.submit(
            id,
            prompt,
            params,
            prefill_only=request.prefill,
            streaming=streaming,
            durable=durable,
        )

    def _attempts(self, history: History) -> Iterator[History]:
        """What to try, the longest first."""
        info, policy = self._access.info, history.state.policy
        if policy is None:
            yield from shorter(history) if self._request.truncate else (history,)
            return
        budget, count = Budget.of(policy, info.max_model_len), len(history.shown)
        if not budget.holds(text_tokens(history), count * info.image_tokens):
            limit = budget.max_images(count, info.image_tokens)
            history = cut(history, budget.window, max_images=limit)
        yield history
        while count:
            count //= 2
            before, history = history, cut(history, budget.window, max_images=count)
            if history is not before:
                yield history
        if (newest := cut(history, 0, max_images=0)) is not history:
            yield newest

    async def _fit(self, history: History) -> tuple[Prompt, History]:
        """The prompt, and what it was made from: cut once more where it was estimated too short."""
        prompt = await self._prepare(history)
        policy = history.state.policy
        if policy is None:
            return prompt, history
        budget = Budget.of(policy, self._access.info.max_model_len)
        if budget.holds(prompt.num_text_tokens, prompt.num_image_tokens):
            return prompt, history
        less = trim(history, budget, prompt.num_text_tokens, prompt.num_image_tokens)
        return (prompt, history) if less is history else (await self._prepare(less), less)

    async def _prepare(self, history: History) -> Prompt:
        request = self._request
        preparing = self._access.prepare(
            await render(history, request.instructions),
            tools=request.calling.described,
            constraint=None if request.prefill else request.params.constraint,
        )
        return await self._deadline.bound(preparing)
