"""A client of the Responses socket for tests, which checks each event against the SDK's union."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.sync.client import ClientConnection, connect

from tests.server.conftest import PATIENCE_S, Running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def open_socket(running: Running, **options: Any) -> ClientConnection:
    headers = {"authorization": f"Bearer {running.key}"} if running.key else {}
    options.setdefault("open_timeout", PATIENCE_S)
    ws: ClientConnection = connect(running.ws_url, additional_headers=headers, **options)
    return ws


def receive(ws: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(ws.recv(timeout=PATIENCE_S))
    EVENT.validate_python(event)
    return event


def create(ws: ClientConnection, text: str, **fields: Any) -> None:
    ws.send(json.dumps({"type": "response.create", "input": text, **fields}))


def until_end(ws: ClientConnection) -> list[dict[str, Any]]:
    events = [receive(ws)]
    while events[-1]["type"] not in (*TERMINAL, "error"):
        events.append(receive(ws))
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
