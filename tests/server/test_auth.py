"""Keys on every route, and Origin and Host checks where there are none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from mmserve.config import ServerConfig
from mmserve.server.app import create_app
from mmserve.server.auth import Keys, needs_admin
from mmserve.server.runner import InsecureBindError, make_server
from tests.server.conftest import KEY, Running
from tests.server.fake_engine import FakeEngine

ROUTES = [
    (method, route.path)
    for route in create_app(FakeEngine(), ServerConfig()).routes
    if isinstance(route, Route) and not needs_admin(route.path)
    for method in sorted(route.methods or ())
]
OPEN = {"/health", "/health/live"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_all_routes_but_health_need_a_right_key(server: Running, method: str, path: str) -> None:
    path = path.replace("{id:path}", "x").replace("{id}", "x")
    for key in (None, "Bearer wrong", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x"):
        http = server.http(headers={"authorization": key} if key else {})
        if key is None:
            del http.headers["authorization"]
        answer = http.request(method, path)
        if path in OPEN:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401
        if method != "HEAD":
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    right = server.http().request(method, path)
    assert right.status_code != 401


def test_the_websocket_needs_a_key() -> None:
    app = create_app(FakeEngine(), ServerConfig())
    sockets = [route.path for route in app.routes if isinstance(route, WebSocketRoute)]
    paths = [path for path in sockets if not needs_admin(path)]
    assert paths == ["/v1/responses", "/v1/realtime"]


@pytest.mark.parametrize("header", [None, "Bearer wrong"])
def test_a_program_without_a_key_sees_401_with_the_envelope(
    server: Running, header: str | None
) -> None:
    headers = {"authorization": header} if header else {}
    with pytest.raises(InvalidStatus) as caught:
        connect(server.ws_url, additional_headers=headers)
    assert caught.value.response.status_code == 401
    assert b"invalid_api_key" in (caught.value.response.body or b"")


def test_unknown_sockets_and_offers_without_realtime_are_refused(server: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with pytest.raises(InvalidStatus):
        connect(server.ws_url + "/none", additional_headers=headers)
    with pytest.raises(InvalidStatus) as caught:
        protocols: Any = ["chat"]
        connect(server.ws_url, additional_headers=headers, subprotocols=protocols)
    assert caught.value.response.status_code == 400


def test_keys_are_told_apart_and_named_without_showing_them() -> None:
    keys = Keys(["one", "two"])
    assert keys.owner("one") != keys.owner("two")
    assert keys.owner("three") is None and keys.owner(None) is None and keys.owner("") is None
    assert "one" not in str(keys.owner("one"))
    assert not Keys([])


def test_without_keys_only_loopback_is_bound() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5"):
        with pytest.raises(InsecureBindError):
            make_server(ServerConfig(host=host), FakeEngine())
    make_server(ServerConfig(host="0.0.0.0", api_keys=("k",)), FakeEngine())


def test_foreign_hosts_and_origins_are_refused_without_keys(launch: Callable[..., Any]) -> None:
    running = launch(allow_origins=("https://ui.example",))
    http = running.http()
    body = {"messages": [{"role": "user", "content": "x"}]}

    def post(**headers: str) -> int:
        status: int = http.post("/v1/chat/completions", json=body, headers=headers).status_code
        return status

    assert post() == 200
    assert post(origin=running.url) == 200
    assert post(origin="https://ui.example") == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "", "x"):
        assert post(origin=origin) == 403, origin
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", "a b"):
        assert post(host=host) in (400, 403), host
        answer = http.get("/v1/models", headers={"host": host})
        assert answer.status_code in (400, 403)
    assert post(host="localhost:8000") == 200
    assert http.get("/health", headers={"host": "evil.example"}).status_code == 200
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        assert handshake_status(running.ws_url, headers) == 403
    for origin in (running.url, "https://ui.example"):
        assert handshake_status(running.ws_url, {"origin": origin}) == 101


def handshake_status(url: str, headers: dict[str, str]) -> int:
    """The status a WebSocket handshake gets."""
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    upgrade["sec-websocket-key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    with httpx.stream("GET", url.replace("ws", "http", 1), headers=upgrade | headers) as answer:
        return answer.status_code


def test_cors_answers_listed_origins_only(launch: Callable[..., Any]) -> None:
    running = launch(api_keys=(KEY,), allow_origins=("https://ui.example",))
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    http = running.http()
    good = http.options("/v1/responses", headers={"origin": "https://ui.example", **ask})
    assert good.headers["access-control-allow-origin"] == "https://ui.example"
    bad = http.options("/v1/responses", headers={"origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in bad.headers
    plain = launch().http()
    answer = plain.get("/health", headers={"origin": "https://ui.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_no_key_or_payload_reaches_a_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        http = server.http()
        secret = "SECRET-WORDS"
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": secret}]})
        http.get(f"/v1/models?key={secret}")
        http.post("/v1/responses", json={"input": secret, "temperature": "x"})
        protocols: Any = ["realtime", f"openai-insecure-api-key.{KEY}"]
        connect(server.ws_url, subprotocols=protocols).close()
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("mmserve"))
    assert "POST /v1/chat/completions 200" in ours
    assert secret not in ours and KEY not in ours
