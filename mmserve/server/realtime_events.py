"""One response of a Realtime session: its log in Realtime's words, its items in the conversation.

Owns the events' names, order and fields, and `response.done`. The log's order is the transcript's.
Knows nothing of sockets or prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mmserve.prompt import TextPart
from mmserve.server.history import Item
from mmserve.server.realtime_items import Conversation
from mmserve.server.transcript import Transcript, function_call_json
from mmserve.server.wire import new_id

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def event(type: str, **fields: Any) -> dict[str, Any]:
    return {"type": type, "event_id": new_id("event"), **fields}


@dataclass
class Reply:
    """`conversation`: where its items go; None: nowhere. `head`: fields of the response object
    that never change; `session`: what was left out of its prompt."""

    transcript: Transcript
    conversation: Conversation | None
    head: dict[str, Any]
    session: dict[str, Any]
    _open: dict[int, dict[str, Any]] = field(default_factory=dict)  # by output index

    def events(self, logged: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What one event of the log is here; puts items into the conversation as it goes."""
        kind = logged["type"]
        if kind == "response.created":
            yield event(kind, response=self._response(logged["response"]))
        elif kind == "response.output_item.added":
            yield from self._added(logged["output_index"], _item_json(logged["item"]))
        elif kind == "response.output_item.done":
            yield from self._done(logged["output_index"], _item_json(logged["item"]))
        elif kind in TERMINAL:
            response = self._response(logged["response"])
            for index in list(self._open):  # of a response that failed
                yield from self._done(index, response["output"][index])
            yield event("response.done", response=response)
        elif kind != "response.in_progress":
            yield event(kind, response_id=self.transcript.id, **self._rest(logged))

    def _rest(self, logged: dict[str, Any]) -> dict[str, Any]:
        """The fields of a content event."""
        rest = {k: v for k, v in logged.items() if k not in ("type", "sequence_number", "logprobs")}
        if "part" in rest:
            rest["part"] = {"type": "text", "text": rest["part"]["text"]}
        if logged["type"].startswith("response.function_call_arguments."):
            rest["call_id"] = self._call(logged["item_id"])["call_id"]
        return rest

    def _call(self, id: str) -> dict[str, Any]:
        transcript = self.transcript
        return function_call_json(transcript.answer.calls[transcript.call_ids.index(id)])

    def _item(self, item: dict[str, Any]) -> Item:
        """As a history takes it: exact tokens where the answer is nothing but this text."""
        answer, format = self.transcript.answer, self.transcript.calling.format
        if item["type"] == "message":
            text = "".join(part["text"] for part in item["content"])
            tokens = answer.spliceable_tokens() if text == answer.text else None
            return Item(
                item["id"],
                "assistant",
                (TextPart(text),),
                token_ids=None if answer.calls else tokens,
            )
        assert format is not None
        call = self._call(item["id"]) | {"arguments": item["arguments"]}
        text = format.call(call["name"], call["arguments"])
        return Item(item["id"], "assistant", (TextPart(text),), call=call)

    def _added(self, index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open[index] = item
        place = {"response_id": self.transcript.id, "output_index": index}
        yield event("response.output_item.added", **place, item=item)
        if self.conversation is not None:
            previous = self.conversation.begin(self._item(item))
            yield event("conversation.item.added", previous_item_id=previous, item=item)

    def _done(self, index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        del self._open[index]
        if self.conversation is not None:
            previous = self.conversation.finish(self._item(item), item["status"])
            yield event("conversation.item.done", previous_item_id=previous, item=item)
        place = {"response_id": self.transcript.id, "output_index": index}
        yield event("response.output_item.done", **place, item=item)

    def _response(self, response: dict[str, Any]) -> dict[str, Any]:
        body = {
            "object": "realtime.response",
            "id": response["id"],
            "status": response["status"],
            "status_details": _details(response),
            "conversation_id": self.conversation.id if self.conversation else None,
            "output_modalities": ["text"],
            **self.head,
            "output": [_item_json(item) for item in response["output"]],
            "usage": _usage(response["usage"]),
        }
        if response["status"] != "in_progress":
            body |= {"timings": response["timings"], "session": self.session}
        return body


def _details(response: dict[str, Any]) -> dict[str, Any] | None:
    status = response["status"]
    if status == "cancelled":
        return {"type": status, "reason": "client_cancelled"}
    if status == "incomplete":
        return {"type": status, "reason": response["incomplete_details"]["reason"]}
    if status == "failed":
        return {"type": status, "error": {"type": "server_error", **response["error"]}}
    return None


def _item_json(item: dict[str, Any]) -> dict[str, Any]:
    item = {**item, "object": "realtime.item"}
    if "content" in item:
        texts = [part["text"] for part in item["content"]]
        item["content"] = [{"type": "output_text", "text": text} for text in texts]
    return item


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    details = usage["input_tokens_details"]
    cached, images = details["cached_tokens"], details["cached_image_tokens"]
    return {
        "total_tokens": usage["total_tokens"],
        "input_tokens": usage["input_tokens"],
        "output_tokens": usage["output_tokens"],
        "input_token_details": {
            "text_tokens": details["text_tokens"],
            "audio_tokens": 0,
            "image_tokens": details["image_tokens"],
            "cached_tokens": cached,
            "cached_tokens_details": {
                "text_tokens": cached - images,
                "audio_tokens": 0,
                "image_tokens": images,
            },
        },
        "output_token_details": {"text_tokens": usage["output_tokens"], "audio_tokens": 0},
        "cache": usage["cache"],
    }
