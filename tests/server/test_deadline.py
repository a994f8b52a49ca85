"""Deadlines: what does not end in time ends with a code that says so, whatever asked for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from websockets.sync.client import connect

from mmserve.errors import RequestError
from mmserve.server.deadline import Deadline
from tests.server.conftest import PATIENCE_S, Running
from tests.server.fake_engine import FakeEngine

Launch = Callable[..., Running]
SOON, LATE = 0.1, 20 * PATIENCE_S  # seconds
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def held() -> FakeEngine:
    return FakeEngine(script="one two three", hold_at=2)


def error_of(stream: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(stream.strip().splitlines()[-1].removeprefix("data: "))
    return error


@pytest.mark.parametrize("by", ["field", "header", "server"])
def test_a_chat_that_is_late_ends_by_whichever_asked(launch: Launch, by: str) -> None:
    running = launch(engine=held(), max_request_s=SOON if by == "server" else LATE)
    http = running.http()
    body = {**CHAT, "timeout": SOON} if by == "field" else CHAT
    headers = {"x-request-timeout": str(SOON)} if by == "header" else {}
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 504 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers)
    assert error_of(streamed.text)["error"]["code"] == "deadline_exceeded"
    assert running.idle() and len(running.engine.aborted) == 2
    running.engine.hold_at = None
    if by != "server":
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("background", [False, True])
def test_a_response_that_is_late_has_failed_and_says_why(launch: Launch, background: bool) -> None:
    running = launch(engine=held())
    body = {"input": "x", "timeout": SOON, "background": background}
    id = running.http().post("/v1/responses", json=body).json()["id"]
    assert running.idle()
    response = running.http().get(f"/v1/responses/{id}").json()
    assert response["status"] == "failed"
    assert response["error"]["code"] == "deadline_exceeded"
    assert f"{SOON:g} s" in response["error"]["message"]


def test_sockets_have_deadlines_too(launch: Launch) -> None:
    running = launch(engine=held(), max_request_s=SOON)
    with connect(running.ws_url) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "x", "timeout": LATE}))
        event: dict[str, Any] = {"type": ""}
        while event["type"] != "response.failed":
            event = json.loads(socket.recv(timeout=PATIENCE_S))
        assert event["response"]["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_what_is_late_before_it_has_begun_never_begins(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def slowly(self: FakeEngine, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(LATE)

    monkeypatch.setattr(FakeEngine, "prepare", slowly)
    running = launch()
    body = {**CHAT, "input": "x", "timeout": SOON}
    answer = running.http().post(f"/v1/{path}", json=body)
    assert answer.status_code == 504
    assert running.engine.ids == [] and running.idle()


@pytest.mark.parametrize("timeout", [0, -1, "soon", True])
def test_a_timeout_that_is_none_is_refused_by_name(launch: Launch, timeout: Any) -> None:
    answer = launch().http().post("/v1/chat/completions", json={**CHAT, "timeout": timeout})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"


def test_the_earliest_wish_counts() -> None:
    async def look() -> None:
        assert Deadline.of({}, 0).seconds is None
        assert Deadline.of({"timeout": 5}, 9).seconds == 5
        assert Deadline.of({"timeout": 5}, 3, {"x-request-timeout": "4"}).seconds == 3
        assert Deadline.of({"timeout": 5}, 0, {"x-request-timeout": "4"}).seconds == 4
        with pytest.raises(RequestError) as refused:
            Deadline.of({}, 0, {"x-request-timeout": "nan"})
        assert refused.value.param == "x-request-timeout"

    asyncio.run(look())
