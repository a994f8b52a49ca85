"""A server that is told to end: what runs comes to its end, what is new is refused, sockets know.

Signals are handed to the server as Python would hand them.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mmserve.config import ServerConfig
from tests.server.conftest import PATIENCE_S, Running, eventually, start
from tests.server.fake_engine import FakeEngine

LONG_S = 20 * PATIENCE_S  # of draining: it ends because nothing runs any more


@contextmanager
def draining(folder: Path | None = None, **settings: Any) -> Iterator[Running]:
    """A server whose generations hold after two words; `leave` tells it to end."""
    config = ServerConfig(port=0, data_dir=folder, **settings)
    running, stop = start(config, FakeEngine(script="one two three four", hold_at=2))
    try:
        yield running
    finally:
        running.engine.hold_at = None
        stop()


def leave(running: Running) -> None:
    running.server.handle_exit(signal.SIGTERM, None)
    assert running.http().get("/health").json() == {"status": "draining"}


def begin(running: Running, **body: Any) -> str:
    answer = running.http().post("/v1/responses", json={"input": "x", "background": True, **body})
    id: str = answer.json()["id"]
    return id


def close_code(socket: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=PATIENCE_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


def get(id: str, http: httpx.Client) -> dict[str, Any]:
    kept: dict[str, Any] = http.get(f"/v1/responses/{id}").json()
    return kept


def after(folder: Path, look: Callable[[httpx.Client], Any]) -> Any:
    """What a server that comes later over the same folder says."""
    running, stop = start(ServerConfig(port=0, data_dir=folder), FakeEngine())
    try:
        return look(running.http())
    finally:
        stop()


def test_what_runs_is_finished_and_kept_and_sockets_are_told_to_come_again(tmp_path: Path) -> None:
    with draining(tmp_path, drain_s=LONG_S) as running, connect(running.ws_url) as idle:
        with connect(running.ws_url) as busy, ThreadPoolExecutor() as pool:
            background = begin(running)
            chat = {"messages": [{"role": "user", "content": "x"}]}
            waiting = pool.submit(running.http().post, "/v1/chat/completions", json=chat)
            busy.send(json.dumps({"type": "response.create", "input": "x"}))
            assert eventually(lambda: len(running.engine.running) == 3)
            leave(running)
            refused = running.http().post("/v1/responses", json={"input": "late"})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            idle.send(json.dumps({"type": "response.create", "input": "late"}))
            assert json.loads(idle.recv())["error"]["code"] == "shutting_down"
            running.engine.hold_at = None
            said = waiting.result().json()["choices"][0]["message"]["content"]
            assert said == "one two three four"
            events: list[dict[str, Any]] = []
            while not events or events[-1]["type"] != "response.completed":
                events.append(json.loads(busy.recv(timeout=PATIENCE_S)))
            assert close_code(busy) == 1012
        assert close_code(idle) == 1012
    for id in (background, events[-1]["response"]["id"]):
        kept = after(tmp_path, partial(get, id))
        assert kept["status"] == "completed"
        assert kept["output"][0]["content"][0]["text"] == said


def test_what_does_not_end_in_time_is_kept_as_far_as_it_is_and_goes_on_later(
    tmp_path: Path,
) -> None:
    with draining(tmp_path, drain_s=0.2) as running, connect(running.ws_url) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "x"}))
        assert eventually(lambda: len(running.engine.running) == 1)
        running.server.handle_exit(signal.SIGTERM, None)
        event: dict[str, Any] = {"type": ""}
        while event["type"] != "response.incomplete":
            event = json.loads(socket.recv(timeout=PATIENCE_S))
        assert close_code(socket) == 1012
    response = event["response"]
    assert response["incomplete_details"] == {"reason": "server_shutdown"}

    def look(http: httpx.Client) -> None:
        kept = http.get(f"/v1/responses/{response['id']}").json()
        assert kept == response
        assert kept["output"][0]["content"][0]["text"] == "one two"
        body = {"input": "go on", "previous_response_id": response["id"]}
        assert http.post("/v1/responses", json=body).json()["status"] == "completed"

    after(tmp_path, look)


def test_an_answer_without_a_word_has_failed_and_a_chat_is_told_why() -> None:
    with draining(drain_s=0.2) as running, ThreadPoolExecutor() as pool:
        running.engine.hold_at = 0
        chat = {"messages": [{"role": "user", "content": "x"}]}
        waits = [
            pool.submit(running.http().post, "/v1/responses", json={"input": "x"}),
            pool.submit(running.http().post, "/v1/chat/completions", json=chat),
        ]
        assert eventually(lambda: len(running.engine.running) == 2)
        running.server.handle_exit(signal.SIGTERM, None)
        response, completion = (wait.result() for wait in waits)
        assert response.json()["status"] == "failed"
        assert completion.status_code == 503


def test_a_second_signal_ends_at_once() -> None:
    with draining(drain_s=LONG_S) as running:
        begin(running)
        leave(running)
        http = running.http()
        running.server.handle_exit(signal.SIGTERM, None)

        def is_gone() -> bool:
            try:
                http.get("/health")
            except httpx.TransportError:
                return True
            return False

        assert eventually(is_gone)
