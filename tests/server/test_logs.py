"""What the log and traces say, and what they never do."""

from __future__ import annotations

import base64
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from mmserve.prompt import Prompt
from mmserve.server.logs import TEXT, JSONFormatter, TextFormatter, told
from tests.server.conftest import ADMIN_KEY, KEY, Running, data_url, eventually, png
from tests.server.fake_engine import FakeEngine

SECRET = "SECRET-WORDS of a prompt"
PICTURE = png("a picture that nobody else is to see " * 9)
BASE64 = base64.b64encode(PICTURE).decode()


@pytest.fixture(params=[JSONFormatter(), TextFormatter(TEXT)], ids=["json", "text"])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """All that any logger says while the test runs, whatever its level."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(request.param)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    for name in ("mmserve.access", "mmserve.server"):
        logging.getLogger(name).setLevel(logging.DEBUG)
    # The clients' own loggers in this process are not the server's.
    for name in ("httpx", "httpcore", "websockets.client", "openai"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


class Breaking(FakeEngine):
    """Quotes what it was given when it is asked to fail."""

    def submit(self, request_id: str, prompt: Prompt, *args: Any, **options: Any) -> Any:
        said = str(self._last[id(prompt)][1])
        if "please fail" in said:
            raise LookupError(said)
        return super().submit(request_id, prompt, *args, **options)


def picture_session(server: Running, text: str) -> None:
    """On each surface, with a picture."""
    http = server.http()
    url = data_url(PICTURE)
    content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    for stream in (False, True):
        messages = [{"role": "user", "content": content}]
        http.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
    upload = {"file": (f"{SECRET}.png", PICTURE)}
    file = http.post("/v1/files", files=upload, data={"purpose": "vision"}).json()["id"]
    shown = {"type": "input_image", "file_id": file}
    input = [{"role": "user", "content": [{"type": "input_text", "text": text}, shown]}]
    http.post("/v1/responses", json={"input": input})
    http.post("/v1/responses", json={"input": text, "temperature": SECRET})
    http.post("/v1/responses", content=f'{{"input": "{SECRET}')
    http.get(f"/v1/models?key={SECRET}")
    protocols: Any = ["realtime", f"openai-insecure-api-key.{KEY}"]
    with connect(server.ws_url, subprotocols=protocols) as socket:
        socket.send(json.dumps({"type": "response.create", "input": input}))
        socket.recv()
        socket.send(SECRET)
        socket.recv()
    with connect(server.ws_url.replace("responses", "realtime"), subprotocols=protocols) as socket:
        socket.recv()
        item = {"type": "message", "role": "user", "content": input[0]["content"]}
        socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        socket.recv()
        socket.send(json.dumps({"type": "response.create", "response": {}}))
        socket.recv()


@pytest.mark.parametrize("text", [SECRET, f"please fail {SECRET}"])
def test_a_session_with_a_picture_leaves_no_payload_and_no_key_in_the_log(
    launch: Callable[..., Any], log: io.StringIO, text: str
) -> None:
    server = launch(Breaking(), api_keys=(KEY,), admin_keys=(ADMIN_KEY,))
    picture_session(server, text)
    wrong = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer sk-WRONG"})
    assert wrong.status_code == 401 and server.idle()
    assert eventually(lambda: log.getvalue().count("/v1/re") >= 5)
    said = log.getvalue()
    assert "/v1/chat/completions" in said and "req_" in said
    assert ("LookupError" in said) is ("fail" in text), "a fault is told by its kind and place"
    for secret in (SECRET, "SECRET", KEY, ADMIN_KEY, "sk-WRONG", BASE64[:40], BASE64[60:100]):
        assert secret not in said, secret


def test_a_line_of_json_has_the_requests_fields(launch: Callable[..., Any]) -> None:
    stream, access = io.StringIO(), logging.getLogger("mmserve.access")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONFormatter())
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    server = launch(api_keys=(f"{KEY}",))
    named = server.http().get("/v1/models", headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    odd = server.http().get("/v1/models", headers={"x-request-id": "a b\t" + "x" * 200})
    assert odd.headers["x-request-id"].startswith("req_")
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine-2"}
    with connect(server.ws_url, additional_headers=headers) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "mine-2"
    assert eventually(lambda: "mine-2" in stream.getvalue())
    access.removeHandler(handler)
    first, *_, last = map(json.loads, stream.getvalue().splitlines())
    assert first["message"].startswith("GET /v1/models 200")
    expected = {"method": "GET", "path": "/v1/models", "status": 200, "request_id": "mine-1"}
    assert first.items() >= expected.items() and first["owner"] and first["level"] == "info"
    assert (last["method"], last["status"], last["request_id"]) == ("WEBSOCKET", 101, "mine-2")


def test_a_fault_is_told_with_its_causes_and_without_their_messages() -> None:
    def fails() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(SECRET) from error

    with pytest.raises(ValueError) as caught:
        fails()
    lines = told(caught.value).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "builtins.KeyError",
        "builtins.ValueError",
    ]
    assert "test_logs.py" in lines[0] and "in fails" in lines[0] and SECRET not in str(lines)


# -- traces ----------------------------------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector's address, and what came to it."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    server.server_close()


def test_a_generation_is_a_span_with_its_phases_in_the_clients_trace(
    launch: Callable[..., Any], collector: tuple[str, list[bytes]]
) -> None:
    trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    endpoint, received = collector
    server = launch(api_keys=(KEY,), otlp_traces_endpoint=endpoint)
    client = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{client}-b7ad6b7169203331-01"}
    body = {"messages": [{"role": "user", "content": SECRET}]}
    usage = server.http().post("/v1/chat/completions", json=body, headers=headers).json()["usage"]
    server.services.tracing._provider.force_flush()
    spans = {}
    for data in received:
        message = trace.ExportTraceServiceRequest.FromString(data)
        for of_resource in message.resource_spans:
            for scope in of_resource.scope_spans:
                spans.update({span.name: span for span in scope.spans})
    assert set(spans) == {f"mmserve.{name}" for name in ("request", "queue", "prefill", "decode")}
    request = spans.pop("mmserve.request")
    assert request.trace_id.hex() == client and request.parent_span_id.hex() == "b7ad6b7169203331"
    assert all(span.parent_span_id == request.span_id for span in spans.values())
    said = {a.key: a.value for a in request.attributes}
    assert said["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert SECRET.encode() not in b"".join(received) and KEY.encode() not in b"".join(received)


def test_without_an_endpoint_nothing_is_traced(launch: Callable[..., Any]) -> None:
    assert type(launch().services.tracing).__name__ == "NoTracing"
