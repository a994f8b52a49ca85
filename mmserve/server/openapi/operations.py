"""What each route takes and how it may end, beside what all routes have in common.

Owns one `Operation` a method and path. What is refused stands here by status alone; the named
errors say which codes a status comes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmserve.server.auth import ADMIN_PATH, VIEW_PATH
from mmserve.server.bodies import BYTES, FORM, JSON
from mmserve.server.deadline import HEADER as TIMEOUT
from mmserve.server.files import ANCHOR, MAX_TTL_S, MIN_TTL_S, PURPOSES
from mmserve.server.openapi import requests
from mmserve.server.openapi.schema import (
    OBJECT,
    STRING,
    Schema,
    array,
    between,
    either,
    ref,
    said,
    words,
)
from mmserve.server.ops import METRICS_TYPE
from mmserve.server.responses import FLAGS, IMAGE_URLS, MAX_AFTER, MAX_PAGE

EVENTS = "text/event-stream"
BINARY: Schema = {"type": "string", "format": "binary"}
IMAGES = "/v1/responses/{id}/images"
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


@dataclass(frozen=True)
class Operation:
    """`answer`: the schema of its JSON, or schemas by content type. `refusals`: statuses beside
    those that every route has (`document.EVERYWHERE`), each with the error object unless `others`
    has its schema. `query`, `headers`: schemas by name."""

    tag: str
    answer: str | Mapping[str, Schema]
    refusals: tuple[int, ...] = ()
    body: Mapping[str, Schema] = field(default_factory=dict)
    optional_body: bool = False
    query: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, Schema] = field(default_factory=dict)
    others: Mapping[int, str] = field(default_factory=dict)


def _streamed(name: str, *events: str) -> dict[str, Schema]:
    """`events`: what the data of each may be."""
    content = either(*map(ref, events))
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    event = said({"data": data}, {"event": STRING})
    about = "With stream. Chat Completions end with the data [DONE]."
    return {JSON: ref(name), EVENTS: {**event, "description": about}}


def _json(name: str) -> dict[str, Schema]:
    return {JSON: ref(name)}


def _image_change(**more: Schema) -> Operation:
    return Operation("Images of a conversation", "ResponseImageList", (400, 404, 503))


DEADLINE = {TIMEOUT: {"type": "number", "exclusiveMinimum": 0}}
UPLOAD: Schema = {
    "type": "object",  # of a form, which has no null
    "properties": {
        "file": BINARY,
        "purpose": words(*PURPOSES),
        "expires_after[anchor]": words(ANCHOR),
        "expires_after[seconds]": between(MIN_TTL_S, MAX_TTL_S, whole=True),
    },
    "required": ["file", "purpose"],
}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Chat Completions",
        _streamed("ChatCompletion", "ChatCompletionChunk", "Error"),
        (400, 404, 408, 415, 429, 503, 504),
        body=_json("ChatCompletionRequest"),
        headers=DEADLINE,
    ),
    ("POST", "/v1/responses"): Operation(
        "Responses",
        _streamed("Response", "ResponseEvent"),
        (400, 404, 415, 429, 503, 504),
        body=_json("ResponseRequest"),
        headers=DEADLINE,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Responses", "InputTokens", (400, 404, 415, 429, 503), body=_json("ResponseRequest")
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        "Responses",
        _streamed("Response", "ResponseEvent"),
        (400, 404),
        query={"stream": words(*FLAGS), "starting_after": between(-1, MAX_AFTER, whole=True)},
    ),
    ("DELETE", "/v1/responses/{id}"): Operation("Responses", "ResponseDeleted", (404, 503)),
    ("POST", "/v1/responses/{id}/cancel"): Operation("Responses", "Response", (400, 404)),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "Responses",
        "InputItemList",
        (400, 404),
        query={
            "limit": between(1, MAX_PAGE, whole=True),
            "order": words("asc", "desc"),
            "after": STRING,
            "include": {**array(STRING), "examples": [[IMAGE_URLS]]},
            "include[]": {**array(STRING), "examples": [[IMAGE_URLS]]},
        },
    ),
    ("GET", IMAGES): Operation("Images of a conversation", "ResponseImageList", (400, 404, 503)),
    **{
        ("POST", f"{IMAGES}/{{image}}/{change}"): _image_change()
        for change in ("pin", "unpin", "restore")
    },
    ("POST", f"{IMAGES}/{{image}}/forget"): Operation(
        "Images of a conversation",
        "ResponseImageList",
        (400, 404, 415, 503),
        body={JSON: requests.FORGET},
        optional_body=True,
    ),
    ("POST", "/v1/files"): Operation("Files", "File", (400, 415, 429, 503), body={FORM: UPLOAD}),
    ("GET", "/v1/files"): Operation("Files", "FileList", (400,), query={"purpose": STRING}),
    ("GET", "/v1/files/{id}"): Operation("Files", "File", (404,)),
    ("DELETE", "/v1/files/{id}"): Operation("Files", "FileDeleted", (404, 503)),
    ("GET", "/v1/files/{id}/content"): Operation(
        "Files", dict.fromkeys((BYTES, *IMAGE_TYPES), BINARY), (404,)
    ),
    ("GET", "/v1/models"): Operation("Models", "ModelList", (503,)),
    ("GET", "/v1/models/{id}"): Operation("Models", "Model", (404, 503)),
    ("GET", ADMIN_PATH): Operation("KV", {BYTES: BINARY}, (400, 503)),
    ("POST", ADMIN_PATH): Operation("KV", "KVImported", (400, 415, 503), body={BYTES: BINARY}),
    ("GET", VIEW_PATH): Operation("KV", "KVPages", (503,)),
    ("DELETE", f"{VIEW_PATH}/images/{{key}}"): Operation("KV", "KVImage", (400, 404, 503)),
    ("GET", "/health"): Operation("Operations", "Health", others={503: "Health"}),
    ("GET", "/health/live"): Operation("Operations", "Health"),
    ("GET", "/metrics"): Operation("Operations", {METRICS_TYPE: STRING}),
    ("GET", "/version"): Operation("Operations", "Version"),
    ("GET", "/openapi.json"): Operation("Operations", {JSON: OBJECT}),
}
