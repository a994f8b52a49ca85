"""The description of an application, made from its routes: `GET /openapi.json`.

Owns what all routes have in common, who needs which key, and the form of the document. Knows
nothing of any one route.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mmserve import __version__
from mmserve.errors import RequestError
from mmserve.server.auth import OPEN_PATHS, OPERATOR_PATHS, needs_admin
from mmserve.server.bodies import JSON
from mmserve.server.errors import ENDINGS, RETRY_AFTER_S
from mmserve.server.openapi import answers, requests
from mmserve.server.openapi.operations import OPERATIONS, Operation
from mmserve.server.openapi.schema import STRING, Schema, ref
from mmserve.server.wire import JSONBody

EVERYWHERE = (413, 500)  # the first by a Content-Length, whatever the method
GUARDED = (401, 403)  # where a key may be needed
ABOUT = """OpenAI's surfaces, and what else this server has, as far as it is HTTP: the WebSockets of
/v1/responses, /v1/realtime and /v1/kv/view have no words in OpenAPI. HEAD is answered as GET is.
Fields that are not described are ignored, and null is as good as absent. Every answer has an
x-request-id, which a client may choose by sending one. Where a server has no keys, none is needed.
A method that a path does not have is answered with 405."""
PARAMETER = re.compile(r"{(\w+)(?::path)?}")
KEYS = {"key": "A key of the server.", "admin_key": "An admin key of the server."}


def operations(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, Route, Operation]]:
    """Each method of each route; a GET's HEAD is left out. A KeyError: nobody described it."""
    for route in routes:
        if isinstance(route, Route):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                path = PARAMETER.sub(r"{\1}", route.path)
                yield method, route, OPERATIONS[method, path]


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for method, route, operation in operations(routes):
        path = PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[method.lower()] = _operation(path, route, operation)
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mmserve", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": {**requests.SCHEMAS, **answers.SCHEMAS},
            "securitySchemes": {
                name: {**bearer, "description": about} for name, about in KEYS.items()
            },
        },
    }


def statuses(path: str, operation: Operation) -> list[int]:
    """Every one that it may end with."""
    guarded = () if path in OPEN_PATHS else GUARDED
    return sorted({200, *EVERYWHERE, *guarded, *operation.refusals, *operation.others})


def _operation(path: str, route: Route, operation: Operation) -> dict[str, Any]:
    name = route.endpoint.__name__
    about = inspect.getdoc(route.endpoint) or ""
    described: dict[str, Any] = {
        "operationId": name,
        "tags": [operation.tag],
        "summary": name.replace("_", " ").capitalize(),
        "description": " ".join(about.split()),
        "security": _security(path),
        "parameters": [
            *(_parameter("path", name, STRING) for name in PARAMETER.findall(path)),
            *(_parameter("query", *each) for each in operation.query.items()),
            *(_parameter("header", *each) for each in operation.headers.items()),
        ],
        "responses": {
            str(status): _answer(status, operation) for status in statuses(path, operation)
        },
    }
    if operation.body:
        content = {kind: {"schema": schema} for kind, schema in operation.body.items()}
        described["requestBody"] = {"content": content, "required": not operation.optional_body}
    return described


def _security(path: str) -> list[dict[str, list[str]]]:
    if path in OPEN_PATHS:
        return []
    return [{"admin_key" if needs_admin(path) or path in OPERATOR_PATHS else "key": []}]


def _parameter(place: str, name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _answer(status: int, operation: Operation) -> dict[str, Any]:
    headers = {"x-request-id": {"schema": STRING, "required": True}}
    if status in RETRY_AFTER_S:
        seconds = {"type": "integer", "minimum": 1}
        headers["retry-after"] = {"schema": seconds, "required": True}
    about, content = _about(status), _content(status, operation)
    return {"description": about, "headers": headers, "content": content}


def _content(status: int, operation: Operation) -> dict[str, Any]:
    if status != 200:
        return {JSON: {"schema": ref(operation.others.get(status, "Error"))}}
    if isinstance(operation.answer, str):
        return {JSON: {"schema": ref(operation.answer)}}
    return {kind: {"schema": schema} for kind, schema in operation.answer.items()}


def _about(status: int) -> str:
    if status == 200:
        return "As asked."
    codes = {error.code for error in named_errors() if error.status == status}
    codes |= {code for code, ending in ENDINGS.items() if ending == status}
    return f"{HTTPStatus(status).phrase}: {', '.join(sorted(codes))}"


def named_errors() -> Iterator[type[RequestError]]:
    waiting = [RequestError]
    while waiting:
        error = waiting.pop()
        yield error
        waiting += error.__subclasses__()


async def describe(request: Request) -> Response:
    """GET /openapi.json: this description."""
    return JSONBody(document(request.app.routes))


ROUTES = [Route("/openapi.json", describe, methods=["GET"])]
