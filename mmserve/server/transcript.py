"""Token events to the events and the object of the Responses API.

Owns the event order, the output items and the final status. Knows nothing of readers or of how
prompts are made.
"""

from __future__ import annotations

import time
from typing import Any

from mmserve.request import FinishReason, TokenEvent
from mmserve.server.answer import (
    Answer,
    Call,
    cache_json,
    input_details,
    logprob_json,
    timings_json,
)
from mmserve.server.calling import Calling
from mmserve.server.event_log import DELTA, EventLog
from mmserve.server.wire import new_id
from mmserve.tools import Piece

NO_CALLS = Calling()


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


def function_call_json(call: Call) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


class Transcript:
    """One response as it grows. `head` holds the fields that never change.

    What is said is one message, and each call after it an item of its own; a prefill makes none.
    `cancelled` tells a user's abort from others', `interrupted` that of a server which stops.
    """

    def __init__(
        self,
        id: str,
        head: dict[str, Any],
        *,
        calling: Calling = NO_CALLS,
        prefill: bool = False,
        logprobs: bool = False,
    ) -> None:
        self.id = id
        self.calling = calling
        self.message_id = new_id("msg")
        self.call_ids: list[str] = []  # of the items, not `Call.id`
        self.answer = Answer(calling.parser())
        self.cancelled = self.interrupted = False
        self.status = "in_progress"
        self._head = head
        self._prefill = prefill
        self._logprobs = logprobs
        self._place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        self._opened = self._closed = False  # the message
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

    def _state(self, ended: bool) -> str:
        """The status of an item that has ended, or goes on as long as the response does."""
        if ended:
            return "completed"
        return "incomplete" if self.status in ("cancelled", "failed") else self.status

    def item(self) -> dict[str, Any]:
        """The output message as it stands."""
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": self._state(self._closed),
            "content": [self._part()],
        }

    def _call_item(self, index: int) -> dict[str, Any]:
        call = self.answer.calls[index]
        status = self._state(call.ended)
        return {"id": self.call_ids[index], "status": status, **function_call_json(call)}

    def _call_place(self, index: int) -> dict[str, Any]:
        return {"item_id": self.call_ids[index], "output_index": index + self._opened}

    def _output(self) -> list[dict[str, Any]]:
        calls = [self._call_item(i) for i in range(len(self.call_ids))]
        return [self.item(), *calls] if self._opened else calls

    def response(self) -> dict[str, Any]:
        """The Response object as it stands."""
        ended = self.status != "in_progress"
        answer = self.answer
        return {
            "id": self.id,
            "object": "response",
            **self._head,
            "session": self._session(),
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error(),
            "incomplete_details": self._incomplete(),
            "output": self._output(),
            "usage": usage_json(answer) if ended else None,
            "timings": timings_json(answer.timings, answer.usage) if ended else None,
        }

    def _session(self) -> dict[str, Any] | None:
        """What was dropped inside the turn comes on top of what had been before."""
        session: dict[str, Any] | None = self._head.get("session")
        usage = self.answer.usage
        if session is None or not usage.dropped_tokens:
            return session
        tokens = session["dropped_tokens"] + usage.dropped_tokens
        images = session["dropped_images"] + usage.dropped_images
        return {**session, "dropped_tokens": tokens, "dropped_images": images}

    def _incomplete(self) -> dict[str, str] | None:
        if self.status != "incomplete":
            return None
        cut = self.answer.finish_reason is FinishReason.LENGTH
        return {"reason": "max_output_tokens" if cut else "server_shutdown"}

    def _error(self) -> dict[str, Any] | None:
        if self.status != "failed":
            return None
        if self.answer.finish_reason is FinishReason.ABORT:
            message = "The generation was stopped by the server."
        else:
            message = self.answer.error or "The generation ended with an internal error."
        return {"code": self.answer.code or "server_error", "message": message}

    # The events

    def begin(self, log: EventLog) -> None:
        log.append("response.created", {"response": self.response()})
        log.append("response.in_progress", {"response": self.response()})

    def _open(self, log: EventLog) -> None:
        if self._opened:
            return
        item = {**self.item(), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        log.append("response.output_item.added", {"output_index": 0, "item": item})
        log.append("response.content_part.added", {**self._place, "part": part})
        self._opened = True

    def feed(self, event: TokenEvent, log: EventLog) -> None:
        """Log what one token event shows."""
        pieces, entries = self.answer.add(event)
        if self._prefill:
            return
        if not self.calling.callable and event.finish_reason is not FinishReason.ERROR:
            self._open(log)
        logprobs = [logprob_json(entry) for entry in entries] if self._logprobs else []
        if logprobs and not pieces:
            self._say("", logprobs, log)
        for piece in pieces:
            if piece.kind == "text":
                self._say(piece.text, logprobs, log)
                logprobs = []
            else:
                self._call(piece, log)

    def _say(self, text: str, logprobs: list[dict[str, Any]], log: EventLog) -> None:
        self._open(log)
        log.append(DELTA, {**self._place, "delta": text, "logprobs": logprobs})

    def _call(self, piece: Piece, log: EventLog) -> None:
        if piece.kind == "call":
            self._close(log)
            self.call_ids.append(new_id("fc"))
            index = len(self.call_ids) - 1
            item = self._call_item(index) | {"arguments": "", "status": "in_progress"}
            place = {"output_index": index + self._opened}
            log.append("response.output_item.added", {**place, "item": item})
            return
        index = len(self.call_ids) - 1
        if piece.kind == "arguments":
            delta = {**self._call_place(index), "delta": piece.text}
            log.append("response.function_call_arguments.delta", delta)
        else:
            self._end_call(index, log)

    def _end_call(self, index: int, log: EventLog) -> None:
        call, place = self.answer.calls[index], self._call_place(index)
        done = {**place, "name": call.name, "arguments": call.arguments}
        log.append("response.function_call_arguments.done", done)
        item = {"output_index": place["output_index"], "item": self._call_item(index)}
        log.append("response.output_item.done", item)

    def _close(self, log: EventLog) -> None:
        """The message is whole, if there is one."""
        if not self._opened or self._closed:
            return
        self._closed = self.status in ("in_progress", "completed")
        part = self._part()
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        log.append("response.output_text.done", {**self._place, **text})
        log.append("response.content_part.done", {**self._place, "part": part})
        log.append("response.output_item.done", {"output_index": 0, "item": self.item()})

    @property
    def _can_go_on(self) -> bool:
        """Whether a part of it is worth keeping: text is, half a call is not."""
        return self._opened and bool(self.answer.text) and not self.answer.calls

    def _final_status(self) -> str:
        reason = self.answer.finish_reason
        if self.cancelled and reason in (FinishReason.ABORT, None):
            return "cancelled"
        if self.interrupted and reason is FinishReason.ABORT and self._can_go_on:
            return "incomplete"
        if reason is FinishReason.STOP or (self._prefill and reason is FinishReason.LENGTH):
            return "completed"
        return "incomplete" if reason is FinishReason.LENGTH else "failed"

    def end(self, log: EventLog) -> None:
        """Log the closing events, all but the terminal one; the status is the last from now on."""
        self.status = self._final_status()
        self._completed_at = int(time.time()) if self.status == "completed" else None
        if self.status != "failed":
            if self.calling.callable and not self.call_ids and not self._prefill:
                self._open(log)
            self._close(log)
            calls = self.answer.calls
            if calls and not calls[-1].ended:
                self._end_call(len(calls) - 1, log)

    def fail(self, message: str) -> None:
        """After `end`: the response could not be brought to its end after all."""
        self.status, self._completed_at = "failed", None
        self.answer.finish_reason = FinishReason.ERROR
        self.answer.error, self.answer.code = message, None

    def conclude(self, log: EventLog) -> None:
        """Log the terminal event."""
        kind = "incomplete" if self.status == "cancelled" else self.status
        log.append(f"response.{kind}", {"response": self.response()})
