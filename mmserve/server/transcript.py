"""Token events to the events and the object of the Responses API.

Owns the event order, the output message and the final status. Knows nothing of readers or of how
prompts are made.
"""

from __future__ import annotations

import time
from typing import Any

from mmserve.request import FinishReason, TokenEvent
from mmserve.server.answer import Answer, cache_json, input_details, logprob_json, timings_json
from mmserve.server.event_log import DELTA, EventLog
from mmserve.server.wire import new_id


def usage_json(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": input_details(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cache": cache_json(usage),
    }


class Transcript:
    """One response as it grows. `head` holds the fields that never change.

    A prefill makes no output item. `cancelled` tells a user's abort from the server's.
    """

    def __init__(
        self, id: str, head: dict[str, Any], *, prefill: bool = False, logprobs: bool = False
    ) -> None:
        self.id = id
        self.message_id = new_id("msg")
        self.answer = Answer()
        self.cancelled = False
        self.status = "in_progress"
        self._head = head
        self._prefill = prefill
        self._logprobs = logprobs
        self._place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        self._opened = False
        self._completed_at: int | None = None

    # The object

    def _part(self) -> dict[str, Any]:
        logprobs = [logprob_json(entry) for entry in self.answer.logprobs]
        return {
            "type": "output_text",
            "text": self.answer.text,
            "annotations": [],
            "logprobs": logprobs if self._logprobs else [],
        }

    def item(self) -> dict[str, Any]:
        """The output message as it stands."""
        status = "incomplete" if self.status in ("cancelled", "failed") else self.status
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()],
        }

    def response(self) -> dict[str, Any]:
        """The Response object as it stands."""
        ended = self.status != "in_progress"
        answer = self.answer
        return {
            "id": self.id,
            "object": "response",
            **self._head,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error(),
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self.status == "incomplete" else None
            ),
            "output": [self.item()] if self._opened else [],
            "usage": usage_json(answer) if ended else None,
            "timings": timings_json(answer.timings, answer.usage) if ended else None,
        }

    def _error(self) -> dict[str, Any] | None:
        if self.status != "failed":
            return None
        if self.answer.finish_reason is FinishReason.ABORT:
            message = "The generation was stopped by the server."
        else:
            message = self.answer.error or "The generation ended with an internal error."
        return {"code": "server_error", "message": message}

    # The events

    def begin(self, log: EventLog) -> None:
        log.append("response.created", {"response": self.response()})
        log.append("response.in_progress", {"response": self.response()})

    def _open(self, log: EventLog) -> None:
        item = {**self.item(), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        log.append("response.output_item.added", {"output_index": 0, "item": item})
        log.append("response.content_part.added", {**self._place, "part": part})
        self._opened = True

    def feed(self, event: TokenEvent, log: EventLog) -> None:
        """Log what one token event shows."""
        self.answer.add(event)
        if self._prefill:
            return
        if not self._opened and event.finish_reason is not FinishReason.ERROR:
            self._open(log)
        logprobs = [logprob_json(entry) for entry in event.logprobs] if self._logprobs else []
        if event.text or logprobs:
            log.append(DELTA, {**self._place, "delta": event.text, "logprobs": logprobs})

    def _final_status(self) -> str:
        reason = self.answer.finish_reason
        if self.cancelled and reason in (FinishReason.ABORT, None):
            return "cancelled"
        if reason is FinishReason.STOP or (self._prefill and reason is FinishReason.LENGTH):
            return "completed"
        return "incomplete" if reason is FinishReason.LENGTH else "failed"

    def end(self, log: EventLog) -> None:
        """Log the closing events; the last is the terminal one."""
        self.status = self._final_status()
        self._completed_at = int(time.time()) if self.status == "completed" else None
        if self._opened and self.status != "failed":
            part = self._part()
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            log.append("response.output_text.done", {**self._place, **text})
            log.append("response.content_part.done", {**self._place, "part": part})
            log.append("response.output_item.done", {"output_index": 0, "item": self.item()})
        kind = "incomplete" if self.status == "cancelled" else self.status
        log.append(f"response.{kind}", {"response": self.response()})
