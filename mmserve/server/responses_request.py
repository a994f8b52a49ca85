"""The body of a Responses request, checked.

Owns input items in all their spellings and the fields a Response echoes. Knows nothing of the
store: references are resolved later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mmserve.errors import RequestError
from mmserve.prompt import ROLES, TextPart
from mmserve.request import SamplingParams
from mmserve.server.calling import Calling, call_text, parse_calling
from mmserve.server.content import Content, parse_content
from mmserve.server.engine_face import ModelInfo
from mmserve.server.errors import MissingParameterError, UnsupportedParameterError
from mmserve.server.fields import Fields, as_object, as_text, wrong_type
from mmserve.server.formats import Format, constrain, parse_format
from mmserve.server.sampling import (
    check_model,
    parse_sampling,
    text_only,
    unsupported,
    whole,
)
from mmserve.server.session_json import INHERITED, PolicyChange, parse_policy
from mmserve.server.wire import new_id

MAX_ID = 64  # characters; a longer id of a client is replaced
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class InputItem:
    """One input item; its images are still references. `reference` names a stored item instead."""

    id: str
    role: str
    content: tuple[Content, ...] = ()
    call: dict[str, Any] | None = None
    reference: str | None = None
    param: str = "input"


@dataclass(frozen=True)
class ResponseRequest:
    """A checked body. `head` is what every snapshot of the Response repeats."""

    items: tuple[InputItem, ...]
    instructions: str | None
    previous_response_id: str | None
    params: SamplingParams
    calling: Calling
    head: dict[str, Any]
    store: bool
    stream: bool
    background: bool
    prefill: bool
    truncate: bool
    policy: PolicyChange = INHERITED


def _id(item: Fields, prefix: str) -> str:
    id = item.text("id")
    return id if id and len(id) <= MAX_ID else new_id(prefix)


def _message_item(item: Fields) -> InputItem:
    role = ROLES[item.choice("role", tuple(ROLES), "user")]
    content = parse_content(item.get("content"), item.param("content"))
    if role == "user" and not content:
        raise RequestError("A user message must hold text or an image.", param=item.path)
    return InputItem(_id(item, "msg"), role, content)


def _call_item(item: Fields, info: ModelInfo) -> InputItem:
    name, arguments = item.text("name") or "", item.text("arguments") or ""
    call = {"type": "function_call", "call_id": item.text("call_id") or ""}
    call |= {"name": name, "arguments": arguments}
    text = TextPart(call_text(info, name, arguments))
    return InputItem(_id(item, "fc"), "assistant", (text,), call)


def _call_output_item(item: Fields) -> InputItem:
    content = parse_content(item.get("output"), item.param("output"))
    call = {"type": "function_call_output", "call_id": item.text("call_id") or ""}
    call["output"] = "".join(part.text for part in content if isinstance(part, TextPart))
    return InputItem(_id(item, "fco"), "tool", content, call)


def parse_item(value: Any, param: str, info: ModelInfo) -> InputItem | None:
    item = Fields(as_object(value, param), param)
    kind = item.get("type")
    if kind is None and item.get("role") is None and item.get("id") is not None:
        kind = "item_reference"  # the SDK's type is optional there
    if kind in (None, "message"):
        item.required("role")
        return _message_item(item)
    if kind == "function_call":
        return _call_item(item, info)
    if kind == "function_call_output":
        return _call_output_item(item)
    if kind == "item_reference":
        reference = as_text(item.required("id"), item.param("id"))
        return InputItem(reference, "", reference=reference, param=param)
    if kind == "reasoning":
        return None  # this model does not read it
    raise UnsupportedParameterError(
        f"Input items of type '{str(kind)[:100]}' are not supported.", param=item.param("type")
    )


def parse_input(fields: Fields, info: ModelInfo) -> tuple[InputItem, ...]:
    """`input` as a string or an array of items."""
    value = fields.get("input")
    if value is None:
        return ()
    if isinstance(value, str):
        text = as_text(value, "input")
        if not text:
            raise RequestError("'input' must not be empty.", param="input")
        return (InputItem(new_id("msg"), "user", (TextPart(text),)),)
    if not isinstance(value, list):
        raise wrong_type(value, "a string or an array of items", "input")
    items = [parse_item(item, f"input[{i}]", info) for i, item in enumerate(value)]
    return tuple(item for item in items if item is not None)


def _logprobs(fields: Fields) -> int | None:
    top = whole(fields, "top_logprobs")
    if LOGPROBS in fields.list("include"):
        return top or 0
    return top or None


def _instructions(fields: Fields) -> str | None:
    value = fields.get("instructions")
    if value is None or isinstance(value, str):
        return fields.text("instructions")
    raise wrong_type(value, "a string", "instructions")


def _head(
    fields: Fields, params: SamplingParams, info: ModelInfo, calling: Calling, format: Format
) -> dict[str, Any]:
    return {
        "created_at": int(time.time()),
        "model": info.name,
        "background": fields.flag("background"),
        "instructions": _instructions(fields),
        "max_output_tokens": params.max_tokens,
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "previous_response_id": fields.text("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": fields.flag("store", True),
        "temperature": params.temperature,
        "text": {"format": format.echo or {"type": "text"}},
        "tool_choice": calling.choice_json,
        "tools": list(calling.tools_json),
        "top_p": params.top_p,
        "truncation": fields.choice("truncation", ("auto", "disabled"), "disabled"),
        "metadata": fields.metadata(),
        "user": fields.text("user"),
    }


def _check_conversation(fields: Fields) -> None:
    if fields.get("conversation") is None:
        return
    if fields.get("previous_response_id") is not None:
        raise RequestError("'conversation' excludes 'previous_response_id'.", param="conversation")
    raise UnsupportedParameterError(
        "Conversations are not kept here; use 'previous_response_id'.", param="conversation"
    )


def parse_response_request(body: dict[str, Any], info: ModelInfo) -> ResponseRequest:
    """Check a body. Raises `RequestError`s that name the field."""
    fields = Fields(body)
    check_model(fields, info)
    _check_conversation(fields)
    text_only(fields)
    format = parse_format(fields, fields.object("text"), "format")
    calling = parse_calling(fields, info, formatted=format.constraint is not None)
    unsupported(fields, "prompt", "context_management", "use_beam_search")
    params = parse_sampling(
        fields,
        info,
        limits=("max_output_tokens",),
        logprobs=_logprobs(fields),
        constraint=constrain(format, calling),
    )
    prewarm = fields.object("prompt_cache_options").get("prewarm") is True
    items = parse_input(fields, info)
    head = _head(fields, params, info, calling, format)
    if not items and head["previous_response_id"] is None:
        raise MissingParameterError("'input' is required.", param="input")
    return ResponseRequest(
        items=items,
        instructions=head["instructions"],
        previous_response_id=head["previous_response_id"],
        params=params,
        calling=calling,
        head=head,
        store=head["store"],
        stream=fields.flag("stream"),
        background=head["background"],
        prefill=prewarm or not fields.flag("generate", True),
        truncate=head["truncation"] == "auto",
        policy=parse_policy(fields, info),
    )
