"""A Realtime client for tests: raw frames, each server event checked against the SDK's union."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.server.conftest import PATIENCE_S, Running, data_url

EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
Event = dict[str, Any]


class RealtimeClient:
    def __init__(self, ws: ClientConnection) -> None:
        self.ws = ws

    def receive(self) -> Event:
        event: Event = json.loads(self.ws.recv(timeout=PATIENCE_S))
        EVENT.validate_python(event)
        return event

    def send(self, type: str, **fields: Any) -> None:
        self.ws.send(json.dumps({"type": type, **fields}))

    def ask(self, type: str, **fields: Any) -> Event:
        """Send, and the one event that answers."""
        self.send(type, **fields)
        return self.receive()

    def code(self, type: str, **fields: Any) -> str:
        """The code of the error that answers; it names the event."""
        answer = self.ask(type, event_id="mine", **fields)
        assert answer["type"] == "error", answer
        assert answer["error"]["event_id"] == "mine"
        return str(answer["error"]["code"])

    def add(self, *parts: str | bytes, previous: str | None = None, **item: Any) -> Event:
        """A user's item of texts and images; returns it as the server has it."""
        content = [part_json(part) for part in parts]
        fields = {"type": "message", "role": "user", "content": content, **item}
        where = {} if previous is None else {"previous_item_id": previous}
        added = self.ask("conversation.item.create", item=fields, **where)
        assert added["type"] == "conversation.item.added", added
        done = self.receive()
        assert done["type"] == "conversation.item.done"
        assert done["item"] == added["item"]
        assert done["previous_item_id"] == added["previous_item_id"]
        return added

    def until(self, type: str, response: str | None = None) -> list[Event]:
        """Events up to the first of this type, of this response where one is named."""
        events = [self.receive()]
        while events[-1]["type"] != type or (
            response is not None and response_of(events[-1]) != response
        ):
            assert events[-1]["type"] != "error", events[-1]
            events.append(self.receive())
        return events

    def respond(self, **response: Any) -> list[Event]:
        """One response from its creation to its end."""
        self.send("response.create", response=response)
        return self.until("response.done")

    def say(self, *parts: str | bytes) -> str:
        """Add an item and take the answer to it."""
        self.add(*parts)
        return text_of(self.respond())

    def close_code(self) -> int:
        try:
            while True:
                self.ws.recv(timeout=PATIENCE_S)
        except ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.code


def part_json(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    return {"type": "input_image", "image_url": data_url(part), "detail": "auto"}


def response_of(event: Event) -> str | None:
    id: str | None = event.get("response_id") or event.get("response", {}).get("id")
    return id


def text_of(events: list[Event]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


@contextmanager
def open_realtime(running: Running, query: str = "", **options: Any) -> Iterator[RealtimeClient]:
    """A session whose `session.created` has been read."""
    headers = {"authorization": f"Bearer {running.key}"} if running.key else {}
    options.setdefault("open_timeout", PATIENCE_S)
    url = running.url.replace("http", "ws", 1) + f"/v1/realtime{query}"
    with connect(url, additional_headers=headers, **options) as ws:
        client = RealtimeClient(ws)
        assert client.receive()["type"] == "session.created"
        yield client
