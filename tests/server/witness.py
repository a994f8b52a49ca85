"""Holds every answer of an application against what `/openapi.json` says of its route.

Stands before the application, so that all tests of the server are tests of the description, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
from starlette.applications import Starlette
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from mmserve.server.openapi.document import PARAMETER, document

JSON, EVENTS = "application/json", "text/event-stream"


class Witness:
    """`wrong`: what was answered against the description, in sentences."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self.state = app.state
        self.wrong: list[str] = []
        self._document = json.loads(json.dumps(document(app.routes)))
        self._validators: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        described = self._described(scope) if scope["type"] == "http" else None
        if described is None:
            return await self._app(scope, receive, send)
        start: Message = {}
        body = b""

        async def watch(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
            else:
                told = _is(start, JSON) or _is(start, EVENTS)
                body += message.get("body", b"") if told else b""
            await send(message)

        await self._app(scope, receive, watch)
        if start:  # else the client had left
            name = f"{scope['method']} {scope['path']} {start['status']}"
            fault = self._fault(described, start, body, scope["method"] == "HEAD")
            self.wrong += [f"{name}: {fault}"] if fault else []

    def _described(self, scope: Scope) -> Any:
        for route in self._app.routes:
            if isinstance(route, Route) and route.matches(scope)[0] is Match.FULL:
                method = scope["method"].lower().replace("head", "get")
                return self._document["paths"][PARAMETER.sub(r"{\1}", route.path)][method]
        return None

    def _fault(self, described: Any, start: Message, body: bytes, bare: bool) -> str | None:
        answer = described["responses"].get(str(start["status"]))
        if answer is None:
            return "an undocumented status"
        headers = _headers(start)
        missing = [name for name in answer["headers"] if name not in headers]
        if missing:
            return f"without {', '.join(missing)}"
        schemas = [content for kind, content in answer["content"].items() if _is(start, kind)]
        if not schemas:
            return f"an undocumented content type {headers.get('content-type')}"
        if _is(start, EVENTS):
            content = schemas[0]["schema"]["properties"]["data"]["contentSchema"]
            faults = (self._invalid(content, data) for data in _data(body))
            return next((fault for fault in faults if fault), None)
        if bare or not _is(start, JSON):
            return None
        return self._invalid(schemas[0]["schema"], body)

    def _invalid(self, schema: Any, body: bytes) -> str | None:
        name = json.dumps(schema)
        if name not in self._validators:
            whole = {**schema, "components": self._document["components"]}
            self._validators[name] = jsonschema_rs.Draft202012Validator(whole)
        try:
            self._validators[name].validate(json.loads(body, parse_constant=_refuse))
        except ValueError as error:  # no JSON, or none of this schema
            return str(error)
        return None


def _data(body: bytes) -> Iterator[bytes]:
    """Of the events that have come whole."""
    for event in body.split(b"\n\n")[:-1]:
        for line in event.splitlines():
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield line.removeprefix(b"data: ")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _headers(start: Message) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in start.get("headers", ())}


def _is(start: Message, kind: str) -> bool:
    said = _headers(start).get("content-type", "")
    return said.partition(";")[0] == kind.partition(";")[0]
