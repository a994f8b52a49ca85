"""Faults behind a server: what a client is told, what outlives them, and how a process ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mmserve.faults import Faults
from mmserve.server.runner import EngineLostError
from tests.server.conftest import Running, eventually, png
from tests.server.fake_engine import FakeEngine

Launch = Callable[..., Running]


@pytest.mark.parametrize("kind", ["disk_full", "locked", "error"])
def test_a_database_that_refuses_costs_only_what_must_be_stored(
    launch: Launch, tmp_path: Path, kind: str
) -> None:
    faults = Faults()
    running = launch(data_dir=tmp_path, faults=faults)
    http = running.http()
    kept = http.post("/v1/responses", json={"input": "kept"}).json()
    faults.arm(f"journal.commit={kind}*2")  # the second is that change tried alone
    answer = http.post("/v1/responses", json={"input": "lost"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "storage_unavailable"
    assert answer.headers["retry-after"]
    body = {"input": "on", "previous_response_id": kept["id"]}
    assert http.post("/v1/responses", json=body).json()["status"] == "completed"
    assert running.idle()


@pytest.mark.parametrize("kind", ["disk_full", "gone"])
def test_a_disk_that_refuses_an_upload_says_so_and_takes_the_next(
    launch: Launch, tmp_path: Path, kind: str
) -> None:
    faults = Faults(f"blob.write={kind}")
    http = launch(data_dir=tmp_path, faults=faults).http()
    upload: dict[str, Any] = {"files": {"file": ("x", png())}, "data": {"purpose": "vision"}}
    answer = http.post("/v1/files", **upload)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "storage_unavailable"
    assert http.post("/v1/files", **upload).status_code == 200
    assert len(list((tmp_path / "blobs").iterdir())) == 1


def ended(code: str | None) -> FakeEngine:
    engine = FakeEngine()
    engine.ending = code
    return engine


@pytest.mark.parametrize(
    ("code", "status"),
    [("engine_restarted", 503), ("out_of_memory", 503), ("engine_unavailable", 503), (None, 500)],
)
def test_what_ended_a_generation_is_told_by_its_code(
    launch: Launch, code: str | None, status: int
) -> None:
    http = launch(engine=ended(code)).http()
    chat = {"messages": [{"role": "user", "content": "crash"}]}
    answer = http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == (code or "internal_error")
    assert ("retry-after" in answer.headers) == (status == 503)
    streamed = http.post("/v1/chat/completions", json={**chat, "stream": True}).text
    assert json.loads(streamed.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"]
    response = http.post("/v1/responses", json={"input": "crash"}).json()
    assert response["status"] == "failed"
    assert response["error"]["code"] == (code or "server_error")


@pytest.mark.parametrize("status", ["restarting", "stalled"])
def test_an_engine_that_does_not_work_now_is_unhealthy_and_takes_nothing(
    launch: Launch, status: str
) -> None:
    running = launch()
    running.engine.status = status
    http = running.http()
    health = http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, status)
    refused = http.post("/v1/responses", json={"input": "hello"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "engine_unavailable"
    running.engine.status = "ok"
    assert http.post("/v1/responses", json={"input": "hello"}).status_code == 200


def test_an_engine_that_is_lost_ends_the_server_and_tells_sockets_to_come_again(
    launch: Launch,
) -> None:
    running = launch()
    with connect(running.ws_url) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "hello"}))
        while json.loads(socket.recv())["type"] != "response.completed":
            pass
        running.engine.gone = "the device no longer computes"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    assert eventually(lambda: isinstance(running.server.failure, EngineLostError))
    assert "no longer computes" in str(running.server.failure)
