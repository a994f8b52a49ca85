"""What is asked: the bodies of both text surfaces, as their parsers read them.

Owns what the two have in common. A schema admits what its parser admits as far as one field goes;
what several fields must be together is said in words.
"""

from __future__ import annotations

from mmserve.prompt import ROLES
from mmserve.server.calling import MAX_TOOLS, NAME
from mmserve.server.chat import CHAT_ROLES
from mmserve.server.content import DETAILS, MAX_INDEX, TEXT_PARTS
from mmserve.server.deadline import FIELD as TIMEOUT
from mmserve.server.formats import KINDS, NOT_HERE, OLD_WORDS, WORDS
from mmserve.server.openapi.schema import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NULL,
    OBJECT,
    STRING,
    Schema,
    array,
    asked,
    between,
    either,
    nullable,
    ref,
    words,
)
from mmserve.server.sampling import MAX_BIAS, MAX_INT, MAX_STOPS, RANGES, WHOLE_RANGES
from mmserve.server.session_json import FIELD as POLICY
from mmserve.server.session_json import MAX_IMAGES
from mmserve.server.window import MIN_WINDOW
from mmserve.session import FORGETTING

TEXT: Schema = {"type": "string", "minLength": 1}
BEAMS = ("n", "best_of", "num_beam_groups", "diversity_penalty", "length_penalty")
REFUSED: Schema = {"enum": [None, False, [], {}], "description": "Not supported here."}


def _number(name: str) -> Schema:
    if name in RANGES:
        return between(*RANGES[name])
    return between(*WHOLE_RANGES[name], whole=True)


def _numbers(*names: str) -> dict[str, Schema]:
    return {name: _number(name) for name in names}


def _length(name: str) -> dict[str, Schema]:
    limit = {**between(-1, MAX_INT, whole=True), "not": {"const": 0}}
    return {name: {**limit, "description": "-1: no limit."}}


SAMPLING: dict[str, Schema] = {
    **_numbers(*(name for name in (*RANGES, *WHOLE_RANGES) if name not in BEAMS)),
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,9}$": nullable(between(-MAX_BIAS, MAX_BIAS))},
        "additionalProperties": False,
        "description": "By token id.",
    },
    "stop": either(TEXT, array(TEXT, maxItems=MAX_STOPS)),
    "stop_token_ids": array(INTEGER),
    "ignore_eos": BOOLEAN,
}


def _formats(nested: bool) -> Schema:
    """`nested`: the schema stands in a level of its own, as Chat Completions has it; each surface
    takes both."""
    schema = asked(
        {"schema": OBJECT, "strict": BOOLEAN, "name": STRING, "description": STRING}, ["schema"]
    )
    text, json_object, json_schema = KINDS
    fields = {"type": {"const": json_schema}}
    either_way = [
        asked({**fields, "json_schema": schema}, ["type", "json_schema"]),
        {"allOf": [schema, asked({**fields, "json_schema": NULL}, ["type"])]},
    ]
    return either(
        asked({"type": words(text)}),
        asked({"type": words(json_object)}, ["type"]),
        *(either_way if nested else reversed(either_way)),
    )


EXTRA_FORMATS: dict[str, Schema] = {
    "json": either(OBJECT, STRING),
    "json_object": BOOLEAN,
    "regex": STRING,
    "choice": array(TEXT, minItems=1),
    "grammar": STRING,
}
FORMATS: dict[str, Schema] = {
    "structured_outputs": asked(
        {
            **{word: EXTRA_FORMATS[word] for word in WORDS},
            **{word: {"enum": [False]} for word in NOT_HERE},
        }
    ),
    **{name: EXTRA_FORMATS[word] for word, name in OLD_WORDS.items()},
}

_FUNCTION = asked(
    {
        "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
        "description": STRING,
        "parameters": asked({"type": {"const": "object"}}),
        "strict": BOOLEAN,
    },
    ["name"],
)
_TOOL_TYPE = {"type": {"const": "function"}}
_NAMED = either(
    asked({"function": asked({"name": STRING}, ["name"])}, ["function"]),
    asked({"name": STRING, "function": NULL}, ["name"]),
)
_ALLOWED = asked({"mode": words("auto", "required"), "tools": array(_NAMED, minItems=1)}, ["tools"])
CALLING: dict[str, Schema] = {
    "tools": array(ref("Tool"), maxItems=MAX_TOOLS),
    "tool_choice": either(
        words("none", "auto", "required"),
        {"allOf": [asked(_TOOL_TYPE, ["type"]), _NAMED]},
        asked(
            {"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED},
            ["type", "allowed_tools"],
        ),
        {"allOf": [asked({"type": {"const": "allowed_tools"}}, ["type"]), _ALLOWED]},
    ),
    "parallel_tool_calls": BOOLEAN,
    "function_call": {
        "enum": ["none", "auto"],
        "description": "Older; only what does not ask for a call.",
    },
}

ASKED: dict[str, Schema] = {
    "model": {"type": "string", "description": "Absent: the model that is served."},
    "modalities": array({"const": "text"}),
    "audio": REFUSED,
    TIMEOUT: {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "Seconds from the request to the end of its answer.",
    },
    "stream": BOOLEAN,
}

_TEXTS = [
    asked({"type": {"const": kind}, field: STRING}, ["type", field])
    for kind, field in TEXT_PARTS.items()
]
_DETAIL = {"detail": words(*DETAILS)}
_URL = asked({"url": STRING, **_DETAIL}, ["url"])
_FILE = asked({"file_data": STRING, "file_id": STRING})
_INPUT_IMAGE = asked(
    {
        "type": {"const": "input_image"},
        "image_url": either(STRING, asked({"url": STRING})),
        "file_id": STRING,
        "item_id": STRING,
        "index": between(0, MAX_INDEX, whole=True),
        **_DETAIL,
    },
    ["type"],
    description="One of image_url, file_id and item_id: an earlier item that has the image.",
)
PART = either(
    STRING,
    *_TEXTS,
    asked(
        {"type": {"const": "image_url"}, "image_url": either(STRING, _URL)}, ["type", "image_url"]
    ),
    _INPUT_IMAGE,
    asked({"type": {"const": "file"}, "file": _FILE}, ["type", "file"]),
    {"allOf": [asked({"type": {"const": "input_file"}}, ["type"]), _FILE]},
)
CONTENT = nullable(either(STRING, array(ref("Part"))))

_CALL = asked({"function": asked({"name": STRING, "arguments": STRING})})
MESSAGE = asked(
    {"role": words(*CHAT_ROLES), "content": ref("Content"), "tool_calls": array(_CALL)}, ["role"]
)
CHAT = asked(
    {
        "messages": array(ref("Message"), minItems=1),
        **ASKED,
        "stream_options": asked({"include_usage": BOOLEAN}),
        **_length("max_completion_tokens"),
        **_length("max_tokens"),
        **SAMPLING,
        "logprobs": BOOLEAN,
        "use_beam_search": BOOLEAN,
        **_numbers(*BEAMS),
        "early_stopping": either(BOOLEAN, {"const": "never"}),
        "response_format": _formats(nested=True),
        **FORMATS,
        **CALLING,
        "continue_final_message": BOOLEAN,
        "add_generation_prompt": BOOLEAN,
        "web_search_options": REFUSED,
        "prediction": REFUSED,
    },
    ["messages"],
)

_TYPED = {"id": STRING, "call_id": STRING}
ITEM = either(
    asked(
        {"type": words("message"), "id": STRING, "role": words(*ROLES), "content": ref("Content")},
        ["role"],
    ),
    asked(
        {"type": {"const": "function_call"}, **_TYPED, "name": STRING, "arguments": STRING},
        ["type"],
    ),
    asked(
        {"type": {"const": "function_call_output"}, **_TYPED, "output": ref("Content")}, ["type"]
    ),
    asked({"type": words("item_reference"), "id": STRING, "role": NULL}, ["id"]),
    asked({"type": {"const": "reasoning"}}, ["type"], description="Not read by this model."),
)
SESSION_POLICY = asked(
    {
        "window": between(MIN_WINDOW, MAX_INT, whole=True),
        "sinks": {"type": "integer", "minimum": 0},
        "images": either(words("all", "pinned"), between(0, MAX_IMAGES, whole=True)),
        "summary": BOOLEAN,
    },
    additionalProperties=False,
    description="Absent: as the conversation has it; null: none.",
)
RESPONSE = asked(
    {
        "input": either(TEXT, array(ref("InputItem"))),
        **ASKED,
        "instructions": STRING,
        "previous_response_id": STRING,
        **_length("max_output_tokens"),
        **SAMPLING,
        "include": array(ANYTHING),
        "text": asked({"format": _formats(nested=False)}),
        **FORMATS,
        **CALLING,
        "store": BOOLEAN,
        "background": BOOLEAN,
        "generate": {**BOOLEAN, "description": "false: the prompt is computed, no answer made."},
        "prompt_cache_options": asked({"prewarm": ANYTHING}),
        "truncation": words("auto", "disabled"),
        "metadata": {
            "type": "object",
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "user": STRING,
        POLICY: ref("SessionPolicy"),
        "conversation": {"type": "null", "description": "Not kept; use previous_response_id."},
        "prompt": REFUSED,
        "context_management": REFUSED,
        "use_beam_search": REFUSED,
    },
    description="Without input it goes on from previous_response_id.",
)
FORGET = asked({"mode": words(*FORGETTING)})

SCHEMAS: dict[str, Schema] = {
    "ChatCompletionRequest": CHAT,
    "ResponseRequest": RESPONSE,
    "Message": MESSAGE,
    "InputItem": ITEM,
    "Content": CONTENT,
    "Part": PART,
    "Tool": either(
        asked({**_TOOL_TYPE, "function": _FUNCTION}, ["type", "function"]),
        {"allOf": [asked({**_TOOL_TYPE, "function": NULL}, ["type"]), _FUNCTION]},
    ),
    "SessionPolicy": SESSION_POLICY,
}
