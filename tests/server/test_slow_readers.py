"""Streams whose client does not read: bounded, let go, and nobody else's trouble.

What waits is counted, not timed; a client that shall be let go is let go after `BRIEF_S`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import Running, eventually
from tests.server.fake_engine import FakeEngine

Launch = Callable[..., Running]
BRIEF_S = 0.3
MANY = ("x" * 20_000 + " ") * 300  # more than the buffers between us hold
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def never_read(running: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """Ask for a stream and take nothing of it."""
    where = urlsplit(running.url)
    assert where.hostname is not None and where.port is not None
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((where.hostname, where.port))
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def let_go(running: Running) -> bool:
    http = running.http()

    def told() -> bool:
        shown = http.get("/metrics").text
        return 'mmserve:slow_readers_total{kind="stream"} 1.0' in shown

    return eventually(told)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "x", "store": False})],
)
def test_a_client_that_reads_nothing_is_let_go_and_its_answer_is_aborted(
    launch: Launch, path: str, body: dict[str, Any]
) -> None:
    running = launch(FakeEngine(script=MANY), slow_reader_s=BRIEF_S)
    with never_read(running, path, body):
        assert let_go(running)
        assert eventually(lambda: not running.services.chats)
        assert running.idle()
    assert running.http().post("/v1/responses", json={"input": "x"}).status_code == 200


def test_the_answer_of_a_background_response_is_finished_and_kept(launch: Launch) -> None:
    running = launch(FakeEngine(script=MANY), slow_reader_s=BRIEF_S, max_log_events=100_000)
    body = {"input": "x", "background": True}
    with never_read(running, "/v1/responses", body):
        assert let_go(running)
        assert running.idle()
        (turn,) = running.services.responses._turns.values()
    kept = running.http().get(f"/v1/responses/{turn.id}").json()
    assert kept["status"] == "completed"
    assert kept["output"][0]["content"][0]["text"] == MANY.rstrip()


def test_what_waits_for_a_client_is_no_more_than_its_log_may_hold(launch: Launch) -> None:
    running = launch(FakeEngine(script=MANY, hold_at=299), slow_reader_s=600, max_log_events=64)
    with never_read(running, "/v1/responses", {"input": "x", "background": True}):
        assert eventually(lambda: running.services.jobs)
        (job,) = running.services.jobs
        assert eventually(lambda: job.log.next_number > 290)
        assert len(job.log._events) <= 64
        running.engine.hold_at = None
        assert running.idle()
