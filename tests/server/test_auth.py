"""Keys on every route, and Origin and Host checks where there are none."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mmserve.config import ServerConfig
from mmserve.server.app import create_app
from mmserve.server.auth import needs_admin
from mmserve.server.runner import InsecureBindError, make_server
from tests.server.conftest import ADMIN_KEY, KEY, Running
from tests.server.fake_engine import FakeEngine

TABLE = create_app(FakeEngine(), ServerConfig()).routes
ROUTES = [
    (method, route.path)
    for route in TABLE
    if isinstance(route, Route)
    for method in sorted(route.methods or ())
]
SOCKETS = [route.path for route in TABLE if isinstance(route, WebSocketRoute)]
OPEN = {"/health", "/health/live"}
WRONG = (None, "Bearer wrong", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x")


@pytest.fixture(scope="module")
def http(module_server: Running) -> Iterator[httpx.Client]:
    """Without any key; one, because each is slow to make."""
    with httpx.Client(base_url=module_server.url) as client:
        yield client


def for_admins(path: str) -> bool:
    return needs_admin(path) or path == "/metrics"


def filled(path: str) -> str:
    return re.sub(r"{\w+(:path)?}", "x", path)


def test_every_route_of_the_application_is_asked_below() -> None:
    other = [route for route in TABLE if not isinstance(route, (Route, WebSocketRoute))]
    assert not other, "a route of another kind needs a test of its own"
    assert all(route.methods for route in TABLE if isinstance(route, Route)), "any method at all"
    assert {path for _, path in ROUTES} | set(SOCKETS) == {
        route.path for route in TABLE if isinstance(route, (Route, WebSocketRoute))
    }
    assert OPEN < {path for _, path in ROUTES}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_all_routes_but_health_need_a_right_key(http: httpx.Client, method: str, path: str) -> None:
    right, other = (ADMIN_KEY, KEY) if for_admins(path) else (KEY, ADMIN_KEY)
    for key in (*WRONG, f"Bearer {other}"):
        headers = {} if key is None else {"authorization": key}
        answer = http.request(method, filled(path), headers=headers)
        if path in OPEN:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, key
        if method != "HEAD":
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    headers = {"authorization": f"Bearer {right}"}
    assert http.request(method, filled(path), headers=headers).status_code != 401


@pytest.mark.parametrize("path", SOCKETS)
def test_all_sockets_need_a_right_key(server: Running, path: str) -> None:
    url = server.url.replace("http", "ws", 1) + path
    right, other = (ADMIN_KEY, KEY) if for_admins(path) else (KEY, ADMIN_KEY)
    for key in (*WRONG, f"Bearer {other}"):
        assert handshake_status(url, {} if key is None else {"authorization": key}) == 401, key
    for key in ("wrong", other):
        protocols: Any = ["realtime", f"openai-insecure-api-key.{key}"]
        with connect(url, subprotocols=protocols) as socket:
            assert json.loads(socket.recv())["error"]["code"] == "invalid_api_key"
            with pytest.raises(ConnectionClosed):
                socket.recv()
            assert socket.close_code == 1008
    assert handshake_status(url, {"authorization": f"Bearer {right}"}) == 101


def test_where_there_is_no_admin_key_nobody_reads_what_is_of_everybody(
    launch: Callable[..., Any],
) -> None:
    server = launch(api_keys=(KEY,))
    for path in ("/metrics", "/v1/kv", "/v1/kv/view"):
        answer = server.http().get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")


def test_a_single_user_reads_the_metrics_without_a_key(launch: Callable[..., Any]) -> None:
    assert launch().http().get("/metrics").status_code == 200


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
