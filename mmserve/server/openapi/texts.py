"""What both text surfaces answer: completions and their chunks, responses, items and images.

Each object is closed: what is not described here is not said.
"""

from __future__ import annotations

from mmserve.held_image import ABSENT, ACTIVE, COLD, DISK, HOST
from mmserve.server.openapi.schema import (
    BOOLEAN,
    COUNT,
    DIGEST,
    NULL,
    NUMBER,
    OBJECT,
    PAGED,
    STRING,
    TIME,
    Schema,
    array,
    between,
    either,
    listed,
    nullable,
    ref,
    said,
    words,
)
from mmserve.session import FORGETTING

FLOATS: Schema = {"type": "number", "minimum": 0}
STATUS = {"id": STRING, "status": words("completed", "in_progress", "incomplete")}

# Of both text surfaces

_INPUT_DETAILS = said(
    dict.fromkeys(
        ("cached_tokens", "cache_write_tokens", "image_tokens", "text_tokens")
        + ("cached_image_tokens",),
        COUNT,
    )
)
_REASONING = said({"reasoning_tokens": COUNT})
_CACHE = said(
    dict.fromkeys(("vision_hits", "vision_misses", "prefix_tokens"), COUNT),
    {
        "vision_mode": {"const": "blend"},
        "vision_kv_dtype": STRING,
        "beam_kv_saved": between(0, 1),
    },
)
_TIMINGS = said(
    {
        **dict.fromkeys(("queue_ms", "image_ms", "prompt_ms", "predicted_ms"), FLOATS),
        **dict.fromkeys(("prompt_n", "cache_n", "predicted_n"), COUNT),
    },
    {"draft_n": COUNT, "draft_n_accepted": COUNT},
)
_TOKEN = {
    "token": STRING,
    "logprob": NUMBER,
    "bytes": array(between(0, 255, whole=True)),
    "token_id": COUNT,
}
_LOGPROB = said({**_TOKEN, "top_logprobs": array(said(_TOKEN))})

# Chat Completions

_TOOL_CALL = said(
    {
        "id": STRING,
        "type": {"const": "function"},
        "function": said({"name": STRING, "arguments": STRING}),
    }
)
_CHAT_MESSAGE = said(
    {"role": {"const": "assistant"}, "content": nullable(STRING), "refusal": NULL},
    {"tool_calls": array(_TOOL_CALL)},
)
_LOGPROBS = said({"content": array(ref("Logprob")), "refusal": NULL})
_REASON = words("stop", "length", "tool_calls")
_CHOICE = said(
    {
        "index": COUNT,
        "message": _CHAT_MESSAGE,
        "logprobs": nullable(_LOGPROBS),
        "finish_reason": _REASON,
    }
)
_USAGE = said(
    {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT),
        "prompt_tokens_details": ref("InputDetails"),
        "completion_tokens_details": _REASONING,
        "cache": ref("Cache"),
    }
)
_HEAD = {"id": STRING, "created": TIME, "model": STRING, "system_fingerprint": STRING}
_COMPLETION = said(
    {
        **_HEAD,
        "object": {"const": "chat.completion"},
        "choices": array(_CHOICE),
        "usage": _USAGE,
        "timings": ref("Timings"),
    }
)

_CALL_DELTA = said(
    {"index": COUNT, "function": said({"arguments": STRING}, {"name": STRING})},
    {"id": STRING, "type": {"const": "function"}},
)
_DELTA = said(
    {}, {"role": {"const": "assistant"}, "content": STRING, "tool_calls": array(_CALL_DELTA)}
)
_CHUNK = said(
    {
        **_HEAD,
        "object": {"const": "chat.completion.chunk"},
        "choices": array(
            said(
                {
                    "index": COUNT,
                    "delta": _DELTA,
                    "logprobs": nullable(_LOGPROBS),
                    "finish_reason": nullable(_REASON),
                }
            )
        ),
    },
    {"usage": nullable(_USAGE), "timings": ref("Timings"), "cache": ref("Cache")},
)

# Responses

_OUTPUT_TEXT = said(
    {"type": {"const": "output_text"}, "text": STRING, "annotations": array(OBJECT)},
    {"logprobs": array(ref("Logprob"))},
)
_IMAGE_PART = said(
    {
        "type": {"const": "input_image"},
        "detail": STRING,
        "file_id": nullable(STRING),
        "sha256": DIGEST,
    },
    {"image_url": {**STRING, "description": "A data URL, where it was asked for."}},
)
_MESSAGE = said(
    {
        **STATUS,
        "type": {"const": "message"},
        "role": words("system", "user", "assistant", "tool"),
        "content": array(
            either(
                said({"type": {"const": "input_text"}, "text": STRING}), _OUTPUT_TEXT, _IMAGE_PART
            )
        ),
    }
)
_CALL = said(
    {
        **STATUS,
        "type": {"const": "function_call"},
        "call_id": STRING,
        "name": STRING,
        "arguments": STRING,
    }
)
_CALL_OUTPUT = said(
    {**STATUS, "type": {"const": "function_call_output"}, "call_id": STRING, "output": STRING}
)
_SESSION = said(
    {
        "policy": nullable(
            said(
                {
                    "window": nullable(COUNT),
                    "sinks": COUNT,
                    "images": either(words("all", "pinned"), COUNT),
                    "summary": BOOLEAN,
                }
            )
        ),
        **dict.fromkeys(("dropped_items", "dropped_tokens", "dropped_images"), COUNT),
        "kept_images": COUNT,
        "summary": nullable(STRING),
        "summary_missing": nullable(STRING),
        "approximate": BOOLEAN,
        "why": nullable(STRING),
    }
)
_RESPONSE = said(
    {
        "id": STRING,
        "object": {"const": "response"},
        "created_at": TIME,
        "model": STRING,
        "background": BOOLEAN,
        "instructions": nullable(STRING),
        "max_output_tokens": nullable(COUNT),
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": nullable(STRING),
        "reasoning": said({"effort": NULL, "summary": NULL}),
        "store": BOOLEAN,
        "temperature": NUMBER,
        "text": said({"format": OBJECT}),
        "tool_choice": either(STRING, OBJECT),
        "tools": array(OBJECT),
        "top_p": NUMBER,
        "truncation": words("auto", "disabled"),
        "metadata": {"type": "object", "additionalProperties": STRING},
        "user": nullable(STRING),
        "session": nullable(ref("Session")),
        "status": words("in_progress", "completed", "incomplete", "cancelled", "failed"),
        "completed_at": nullable(TIME),
        "error": nullable(said({"code": STRING, "message": STRING})),
        "incomplete_details": nullable(
            said({"reason": words("max_output_tokens", "server_shutdown")})
        ),
        "output": array(either(ref("OutputMessage"), ref("FunctionCall"))),
        "usage": nullable(
            said(
                {
                    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT),
                    "input_tokens_details": ref("InputDetails"),
                    "output_tokens_details": _REASONING,
                    "cache": ref("Cache"),
                }
            )
        ),
        "timings": nullable(ref("Timings")),
    }
)
_EVENT = {
    "type": "object",
    "properties": {"type": STRING, "sequence_number": COUNT},
    "required": ["type", "sequence_number"],
}
_RESPONSE_IMAGE = said(
    {
        "object": {"const": "response.image"},
        "number": nullable(COUNT),
        "item_id": nullable(STRING),
        "file_id": nullable(STRING),
        "sha256": DIGEST,
        "first_response_id": nullable(STRING),
        "tokens": nullable(COUNT),
        "state": words(ACTIVE, HOST, DISK, COLD, ABSENT),
        "bytes": COUNT,
        "hits": COUNT,
        "pinned": BOOLEAN,
        "forgotten": nullable(words(*FORGETTING)),
    },
    {"kv_dtype": STRING},
)

SCHEMAS: dict[str, Schema] = {
    "InputDetails": _INPUT_DETAILS,
    "Cache": _CACHE,
    "Timings": _TIMINGS,
    "Logprob": _LOGPROB,
    "ChatCompletion": _COMPLETION,
    "OutputMessage": _MESSAGE,
    "FunctionCall": _CALL,
    "Session": _SESSION,
    "Response": _RESPONSE,
    "ResponseDeleted": said(
        {"id": STRING, "object": {"const": "response.deleted"}, "deleted": {"const": True}}
    ),
    "InputItemList": listed(either(ref("OutputMessage"), ref("FunctionCall"), _CALL_OUTPUT), PAGED),
    "InputTokens": said(
        {
            "object": {"const": "response.input_tokens"},
            "input_tokens": COUNT,
            "input_tokens_details": said({"image_tokens": COUNT, "text_tokens": COUNT}),
        }
    ),
    "ResponseImageList": listed(_RESPONSE_IMAGE, {"has_more": {"const": False}}),
    "ChatCompletionChunk": _CHUNK,
    "ResponseEvent": _EVENT,
}
