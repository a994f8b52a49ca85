"""The application as a whole: operations, framework errors, limits, the page, start and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mmserve.config import ServerConfig
from mmserve.server.app import create_app
from mmserve.server.key_file import parse
from tests.server.conftest import PATIENCE_S, Running, eventually
from tests.server.fake_engine import FakeEngine


def test_the_sdk_lists_and_retrieves_models(server: Running) -> None:
    client = server.openai()
    models = list(client.models.list())
    assert [model.id for model in models] == ["mm/fake"]
    model: Any = client.models.retrieve("mm/fake")
    assert (model.object, model.owned_by, model.max_model_len) == ("model", "mmserve", 4096)
    assert model.limits["max_image_pixels"] == 40_000_000
    answer = server.http().get("/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_health_follows_the_engine(launch: Callable[..., Any]) -> None:
    running = launch()
    http = running.http()
    body = {"messages": [{"role": "user", "content": "x"}]}
    for status, code in (
        ("loading", "model_loading"),
        ("draining", "shutting_down"),
        ("dead", "engine_unavailable"),
    ):
        running.engine.status = status
        assert http.get("/health").status_code == 503
        assert http.get("/health/live").status_code == 200
        for path, payload in (("/v1/chat/completions", body), ("/v1/responses", {"input": "x"})):
            answer = http.post(path, json=payload)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == code
            assert answer.headers["retry-after"] == "5"
    running.engine.status = "loading"
    assert http.get("/v1/models").json()["error"]["code"] == "model_loading"
    assert running.metrics() and http.get("/version").status_code == 200
    running.engine.status = "ok"
    assert http.get("/health").json() == {"status": "ok"}


def test_metrics_count_requests_by_handler_and_status(server: Running) -> None:
    http = server.http()
    http.post("/v1/responses", json={})
    text = server.metrics()
    assert "# fake engine" in text
    assert 'mmserve:http_requests_total{handler="create_response",status="400"}' in text
    assert "mmserve:websockets_open 0.0" in text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/responses", 405, "method_not_allowed"),
        ("POST", "/some/page", 405, "method_not_allowed"),
        ("GET", "/some/page", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
    ],
)
def test_framework_errors_leave_in_our_envelope(
    server: Running, method: str, path: str, status: int, code: str
) -> None:
    answer = server.http().request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"].startswith("req_")


def test_our_own_fault_is_a_500_without_a_trace(launch: Callable[..., Any]) -> None:
    running = launch()

    async def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("private detail")

    running.engine.prepare = broken
    http = running.http()
    bodies = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ]
    for path, body in bodies:
        answer = http.post(path, json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert answer.headers["x-should-retry"] == "false"
        assert "private" not in answer.text and answer.headers["x-request-id"]


def test_a_body_over_the_limit_is_413_before_it_is_read(launch: Callable[..., Any]) -> None:
    running = launch(max_body_bytes=100_000)
    answer = running.http().post("/v1/responses", content=b"x" * 200_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 10_000

    answer = running.http().post("/v1/responses", content=chunks())
    assert answer.status_code == 413
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        head = f"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        raw.sendall(f"{head}content-length: 99999999999\r\n\r\n".encode())
        raw.settimeout(PATIENCE_S)
        assert b"413" in raw.recv(100)
    assert running.http().post("/v1/responses", json={"input": "x"}).status_code == 200


def test_errors_come_while_the_engine_is_busy_and_ask_nothing_of_it(server: Running) -> None:
    http = server.http()
    server.engine.hold_at = 0
    job = http.post("/v1/responses", json={"input": "x", "background": True}).json()
    assert server.engine.num_prepared == 1
    assert http.post("/v1/responses", json={"input": 5}).status_code == 400
    assert server.engine.running == {job["id"]} and server.engine.num_prepared == 1
    server.engine.hold_at = None
    assert server.idle()


def test_the_page_has_its_headers_and_never_leaves_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dist"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "assets" / "app-1a2b.js").write_text("1")
    (tmp_path / "secret").write_text("no")
    app = create_app(FakeEngine(), ServerConfig(api_keys=("k",)), page_folder=folder)
    with TestClient(app) as client:
        for path in ("/", "/index.html"):
            page = client.get(path)
            assert page.text == "<!doctype html>"
            assert page.headers["cache-control"] == "no-cache"
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        asset = client.get("/assets/app-1a2b.js")
        assert "immutable" in asset.headers["cache-control"]
        assert client.get("/assets/none.js").status_code == 404
        for path in ("/../secret", "/%2e%2e/secret", "/assets/..%2f..%2fsecret", "//etc/passwd"):
            assert client.get(path).status_code == 404
        assert client.head("/").status_code == 200
        assert client.post("/").status_code == 405


def test_a_page_that_is_not_built_says_how_to(tmp_path: Path) -> None:
    config = ServerConfig(api_keys=("k",))
    with TestClient(create_app(FakeEngine(), config, page_folder=tmp_path / "none")) as client:
        answer = client.get("/")
        assert answer.status_code == 200 and "npm run build" in answer.text


def test_blobs_are_gone_after_the_end(launch: Callable[..., Any]) -> None:
    app = create_app(FakeEngine(), ServerConfig(api_keys=("k",)))
    with TestClient(app) as client:
        folder = app.state.services.blobs._folder
        upload = {"file": ("x", b"text")}
        headers = {"authorization": "Bearer k"}
        data = {"purpose": "user_data"}
        assert client.post("/v1/files", files=upload, data=data, headers=headers).is_success
        assert len(os.listdir(folder)) == 1
    assert not folder.exists()


def test_running_responses_are_stopped_at_the_end() -> None:
    engine = FakeEngine(script="w " * 20, hold_at=5)
    app = create_app(engine, ServerConfig(api_keys=("k",)))
    with TestClient(app, headers={"authorization": "Bearer k"}) as client:
        id = client.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
        assert engine.running == {id}
        turn = app.state.services.responses.get(id, parse("k").owner)
    assert not engine.running
    assert turn.response["status"] == "incomplete"
    assert turn.response["incomplete_details"] == {"reason": "server_shutdown"}


# The answer is held until something comes on standard input.
SCRIPT = """
import sys, threading
sys.path.append({root!r})
from mmserve.config import ServerConfig
from mmserve.server.runner import serve
from tests.server.fake_engine import FakeEngine

class Engine(FakeEngine):
    async def start(self):
        if {fail}:
            raise RuntimeError("no weights")

def release():
    sys.stdin.readline()
    engine.hold_at = None

engine = Engine(script="w " * 60, hold_at=5)
threading.Thread(target=release, daemon=True).start()
serve(ServerConfig(port=0), engine)
"""


@contextlib.contextmanager
def own_process(fail: bool) -> Iterator[subprocess.Popen[str]]:
    root = str(Path(__file__).parents[2])
    script = SCRIPT.format(root=root, fail=fail)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def refuses(url: str) -> bool:
    """Whether nothing new is taken any more; it is still answered."""
    said: dict[str, str] = httpx.get(f"{url}/health", timeout=PATIENCE_S).json()
    return said == {"status": "draining"}


def test_a_term_signal_lets_running_answers_end() -> None:
    with own_process(fail=False) as process:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline()
        assert line.startswith("mmserve is ready: http://127.0.0.1:")
        url = line.split()[-1]
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert eventually(lambda: refuses(url))
            process.stdin.write("go on\n")
            process.stdin.flush()
            rest = [text for text in lines if text]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)


def test_an_engine_that_cannot_start_ends_the_process() -> None:
    with own_process(fail=True) as process:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "no weights" in err and "ready" not in out
