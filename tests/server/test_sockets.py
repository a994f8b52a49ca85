"""What ends a socket: a peer that has left is no fault, and everything else that fails is one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mmserve.server.sockets import SocketGoneError, SocketSession
from tests.server.conftest import ADMIN_KEY, KEY, PATIENCE_S, Running
from tests.server.responses_client import create, open_socket, receive, text_of, until_end


async def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no socket has to do with this")


def test_a_response_that_fails_to_start_is_told_and_the_socket_goes_on(
    launch: Callable[..., Running],
) -> None:
    server = launch(api_keys=(KEY,))
    prepare, server.engine.prepare = server.engine.prepare, failing  # type: ignore[method-assign]
    with open_socket(server) as ws:
        create(ws, "x", stream_id="a")
        event = receive(ws)
        assert (event["error"]["code"], event["stream_id"]) == ("internal_error", "a")
        server.engine.prepare = prepare  # type: ignore[method-assign]
        create(ws, "y", stream_id="a")
        assert text_of(until_end(ws)) == "you said: y"


def test_a_realtime_event_that_fails_is_told_and_the_socket_goes_on(
    launch: Callable[..., Running],
) -> None:
    server = launch(api_keys=(KEY,))
    server.engine.prepare = failing  # type: ignore[method-assign]
    url = server.ws_url.replace("/responses", "/realtime")
    with connect(url, additional_headers={"authorization": f"Bearer {KEY}"}) as ws:
        assert json.loads(ws.recv(PATIENCE_S))["type"] == "session.created"
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
        ws.send(json.dumps({"type": "conversation.item.create", "item": item}))
        ws.send(json.dumps({"type": "response.create", "event_id": "mine"}))
        while (event := json.loads(ws.recv(PATIENCE_S)))["type"] != "error":
            assert event["type"].startswith("conversation.item.")
        assert (event["error"]["code"], event["error"]["event_id"]) == ("internal_error", "mine")


def test_a_fault_that_nobody_can_tell_of_is_logged_and_closes_the_socket(
    launch: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    server = launch(api_keys=(KEY,), admin_keys=(ADMIN_KEY,))
    server.engine.kv_snapshot = failing  # type: ignore[method-assign]
    url = server.ws_url.replace("/responses", "/kv/view")
    with caplog.at_level(logging.ERROR, "mmserve.server"):
        with connect(url, additional_headers={"authorization": f"Bearer {ADMIN_KEY}"}) as ws:
            with pytest.raises(ConnectionClosed):
                ws.recv(PATIENCE_S)
            assert ws.close_code == 1011
    assert "a socket failed" in caplog.text


@pytest.mark.parametrize("ours", [True, False], ids=["we closed it", "the protocol closed it"])
def test_to_send_after_a_close_is_no_fault(
    ours: bool, launch: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    services = launch().services

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        if message["type"] == "websocket.send":
            raise RuntimeError("Unexpected ASGI message, after sending 'websocket.close'.")

    async def sent() -> SocketSession:
        socket = WebSocket({"type": "websocket"}, receive, send)
        await socket.accept()
        session = SocketSession(socket, services)
        if ours:
            await socket.close()
        with pytest.raises(SocketGoneError):
            await session.send({})
        await session.guarded(session.send({}))
        return session

    session = asyncio.run(sent())
    assert session._closing.is_set() and session._close_code is None
    assert not caplog.records
