"""The KV view's socket and routes: who may look, what they are told, and what it costs nobody."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from mmserve.server.key_file import parse
from tests.server.conftest import KEY, PATIENCE_S, Running, data_url, eventually, png
from tests.server.fake_engine import FakeEngine, named
from tests.server.test_auth import handshake_status

ADMIN = "admin-key"
Launch = Callable[..., Running]
SUBPROTOCOLS: Any = ["realtime", f"openai-insecure-api-key.{ADMIN}"]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def view_url(server: Running) -> str:
    return server.url.replace("http", "ws", 1) + "/v1/kv/view"


def watch(server: Running, key: str | None = ADMIN) -> ClientConnection:
    return connect(view_url(server), additional_headers=bearer(key))


def told(socket: ClientConnection) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(socket.recv(PATIENCE_S))
    assert body["type"] == "kv.pages"
    return body


def ask(server: Running, *pictures: bytes, previous: str | None = None) -> str:
    images = [{"type": "input_image", "image_url": data_url(p)} for p in pictures]
    content = [*images, {"type": "input_text", "text": "hello"}]
    body = {"input": [{"role": "user", "content": content}], "previous_response_id": previous}
    answer = server.http().post("/v1/responses", json=body)
    assert answer.status_code == 200
    id: str = answer.json()["id"]
    return id


@pytest.fixture
def server(launch: Launch) -> Running:
    return launch(api_keys=(KEY,), admin_keys=(ADMIN,))


def test_a_watcher_hears_the_whole_first_and_then_what_changes(server: Running) -> None:
    first = ask(server, png("a"))
    with watch(server) as socket:
        whole = told(socket)
        assert [pool["kind"] for pool in whole["pools"]] == ["text", "vision"]
        assert whole["runs"] == [[0, 0, 1, 0], [1, 0, 1, 1000]]
        assert whole["figures"] == {"mmserve:generation_tokens_total": 7.0}
        assert {owner["session"] for owner in whole["owners"]} == {first}
        second = ask(server, previous=first)
        change = told(socket)
        while not change["runs"]:
            change = told(socket)
        assert "pools" not in change and change["runs"] == [[0, 1, 1, 1]]
        new = next(owner for owner in change["owners"] if owner["id"] == 1)
        assert (new["request"], new["session"]) == (second, first)


def test_what_is_computed_for_a_conversation_belongs_to_it(server: Running) -> None:
    first = ask(server, png("a"))
    second = ask(server, png("b"), previous=first)
    with httpx.Client(base_url=server.url, headers=bearer(KEY)) as client:
        sha = hashlib.sha256(png("a")).hexdigest()
        path = f"/v1/responses/{second}/images/{sha}/forget"
        assert client.post(path).status_code == 200
    assert server.idle()  # the new layout has been computed
    with watch(server) as socket:
        owners = told(socket)["owners"]
    assert len({owner["request"] for owner in owners}) == 3
    assert {owner["session"] for owner in owners} == {first}


def test_nobody_looks_at_the_pools_while_nobody_watches(server: Running) -> None:
    engine = server.engine
    ask(server)
    assert engine.num_looks == 0
    with watch(server) as socket:
        told(socket)
        assert eventually(lambda: engine.num_looks > 2)
    assert eventually(lambda: not server.services.sockets)
    seen = engine.num_looks
    ask(server)
    assert engine.num_looks == seen


def test_two_watchers_share_what_is_looked_up(server: Running) -> None:
    with watch(server) as one, watch(server) as other:
        told(one), told(other)
        ask(server)
        changes = []
        for socket in (one, other):
            change = told(socket)
            while not change["runs"]:
                change = told(socket)
            changes.append(change)
    assert changes[0]["runs"] == changes[1]["runs"] == [[0, 0, 1, 0]]
    assert changes[0]["version"] == changes[1]["version"]


def test_the_same_is_told_over_http(server: Running) -> None:
    ask(server)
    with httpx.Client(base_url=server.url, headers=bearer(ADMIN)) as client:
        body = client.get("/v1/kv/view").json()
    assert body["type"] == "kv.pages" and body["runs"] == [[0, 0, 1, 0]]


def test_a_frame_is_refused_and_the_socket_goes_on(server: Running) -> None:
    with watch(server) as socket:
        told(socket)
        socket.send("{}")
        refused = json.loads(socket.recv(PATIENCE_S))
        assert refused["type"] == "error" and "no frames" in refused["error"]["message"]
        ask(server)
        told(socket)


# -- an image is dropped ------------------------------------------------------------------------


def test_a_dropped_image_leaves_the_picture(server: Running) -> None:
    ask(server, png("a"))
    key = named(png("a"), parse(KEY).tenant).hex()
    with watch(server) as socket, httpx.Client(headers=bearer(ADMIN)) as client:
        assert key in {owner.get("key") for owner in told(socket)["owners"]}
        path = f"{server.url}/v1/kv/view/images/{key}"
        assert client.delete(path).json() == {"object": "kv.image", "key": key, "dropped": True}
        change = told(socket)
        while not change["gone"]:
            change = told(socket)
        assert change["gone"] == [1000] and change["runs"] == [[1, 0, 1, -1]]
        again = client.delete(path)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "image_not_found")


@pytest.mark.parametrize("key", ["abc", "g" * 64, "A" * 64, "%00"])
def test_what_is_no_key_of_an_image_is_refused(server: Running, key: str) -> None:
    with httpx.Client(headers=bearer(ADMIN)) as client:
        answer = client.delete(f"{server.url}/v1/kv/view/images/{key}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "key")


# -- who may look -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "wrong", KEY])
def test_no_other_key_looks_or_drops(server: Running, key: str | None) -> None:
    with pytest.raises(InvalidStatus) as caught:
        watch(server, key)
    assert caught.value.response.status_code == 401
    with httpx.Client(base_url=server.url, headers=bearer(key)) as client:
        assert client.get("/v1/kv/view").status_code == 401
        assert client.delete(f"/v1/kv/view/images/{'0' * 64}").status_code == 401
    assert server.engine.num_looks == 0


def test_a_browser_brings_its_key_as_a_sub_protocol(server: Running) -> None:
    with connect(view_url(server), subprotocols=SUBPROTOCOLS) as socket:
        assert socket.subprotocol == "realtime"
        told(socket)
    wrong: Any = ["realtime", "openai-insecure-api-key.wrong"]
    with connect(view_url(server), subprotocols=wrong) as socket:
        assert json.loads(socket.recv(PATIENCE_S))["error"]["code"] == "invalid_api_key"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(PATIENCE_S)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008


def test_without_any_key_the_own_machine_may_look(launch: Launch) -> None:
    server = launch()
    with watch(server, None) as socket:
        told(socket)
    with connect(view_url(server), additional_headers={"origin": server.url}) as socket:
        told(socket)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_without_any_key_a_foreign_page_may_not(launch: Launch, origin: str) -> None:
    server = launch()
    assert handshake_status(view_url(server), {"origin": origin}) == 403
    path = f"{server.url}/v1/kv/view/images/{'0' * 64}"
    assert httpx.delete(path, headers={"origin": origin}).status_code == 403
    assert handshake_status(view_url(server), {"host": "evil.example"}) == 403


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "x-real-ip"])
def test_without_any_key_nobody_looks_through_a_proxy(launch: Launch, header: str) -> None:
    server = launch()
    answer = httpx.get(f"{server.url}/v1/kv/view", headers={header: "127.0.0.1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")
    assert handshake_status(view_url(server), {header: "127.0.0.1"}) == 403


def test_where_requests_need_a_key_looking_needs_an_admins(launch: Launch) -> None:
    server = launch(api_keys=(KEY,))
    answer = httpx.get(f"{server.url}/v1/kv/view", headers=bearer(KEY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")


def test_an_admin_key_alone_closes_the_view(launch: Launch) -> None:
    server = launch(admin_keys=(ADMIN,))
    assert httpx.get(f"{server.url}/v1/kv/view").status_code == 401
    assert httpx.get(f"{server.url}/v1/kv/view", headers=bearer(ADMIN)).status_code == 200


def test_there_is_nothing_to_see_while_the_model_loads(launch: Launch) -> None:
    server = launch(FakeEngine(status="loading"))
    assert httpx.get(f"{server.url}/v1/kv/view").status_code == 503
    assert handshake_status(view_url(server), {}) == 503
