"""The router before several servers: one server to its clients, who lose nothing when one dies."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.deploy.conftest import Routed
from tests.server.conftest import ADMIN_KEY, KEY, data_url, eventually, png
from tests.server.test_node import run as run_node

Begin = Callable[..., Routed]


def ask(routed: Routed, input: Any, **body: Any) -> dict[str, Any]:
    with routed.http() as client:
        answer = client.post("/v1/responses", json={"input": input, **body})
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def shown(*pictures: bytes) -> list[dict[str, Any]]:
    parts = [{"type": "input_image", "image_url": data_url(each)} for each in pictures]
    return [{"role": "user", "content": parts}]


def home(id: str) -> str:
    return id.split("_")[1]


def test_openais_library_talks_streams_and_uploads_through_it(routed: Begin) -> None:
    running = routed()
    with running.openai() as client:
        file = client.files.create(file=("a.png", png("a")), purpose="vision")
        assert client.files.content(file.id).read() == png("a")
        messages: Any = [{"role": "user", "content": "hello there"}]
        plain = client.chat.completions.create(model="mm/fake", messages=messages)
        assert plain.choices[0].message.content == "you said: hello there"
        stream = client.chat.completions.create(model="mm/fake", messages=messages, stream=True)
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        assert text == "you said: hello there"
        assert client.models.list().data[0].id == "mm/fake"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm")
def test_the_npm_sdk_chats_streams_and_uses_the_socket_through_it(routed: Begin) -> None:
    assert run_node("check.mjs", routed().url) == "ok"


def test_a_conversation_stays_where_it_began(routed: Begin) -> None:
    running = routed()
    for text in ("one", "two", "three", "four"):
        first = ask(running, text)
        second = ask(running, "more", previous_response_id=first["id"])
        assert home(second["id"]) == home(first["id"])


def test_a_picture_is_always_shown_to_the_same_replica_however_it_comes(routed: Begin) -> None:
    running = routed()
    for name in ("x", "y", "z", "u", "v"):
        first = ask(running, shown(png(name)))
        again = ask(running, shown(png(name)), instructions="Something else.")
        with running.openai() as client:
            file = client.files.create(file=("a.png", png(name)), purpose="vision")
            part = {"type": "input_image", "file_id": file.id, "detail": "auto"}
        by_file = ask(running, [{"role": "user", "content": [part]}])
        assert home(first["id"]) == home(again["id"]) == home(file.id) == home(by_file["id"])
    assert sum(1 for count in running.served().values() if count) > 1


def test_a_growing_chat_stays_where_its_first_pictures_are(routed: Begin) -> None:
    running = routed()
    pictures = [png(str(number)) for number in range(6)]
    before = running.served()
    for count in range(1, 7):
        ask(running, shown(*pictures[:count]), store=False)
    assert sorted(n - before[name] for name, n in running.served().items()) == [0, 0, 6]


def test_a_conversation_goes_on_elsewhere_once_its_replica_is_dead(routed: Begin) -> None:
    running = routed()
    first = ask(running, shown(png("a")))
    running.kill(home(first["id"]))
    second = ask(running, "and?", previous_response_id=first["id"])
    assert home(second["id"]) != home(first["id"])
    with running.http() as client:
        assert client.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]


def test_a_request_that_was_not_answered_is_asked_of_another(routed: Begin) -> None:
    running = routed()
    for each in running.replicas.values():
        each.engine.hold_at = 0
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(running, "slow")))
    thread.start()
    assert eventually(lambda: any(running.served().values()))
    (busy,) = (name for name, count in running.served().items() if count)
    for each in running.replicas.values():
        each.engine.hold_at = None if each is not running.replicas[busy] else 0
    running.kill(busy)
    thread.join(30)
    assert home(answers[0]["id"]) != busy
    running.replicas[busy].engine.hold_at = None


def test_a_stream_that_has_begun_breaks_off_and_is_not_begun_anew(routed: Begin) -> None:
    running = routed()
    for each in running.replicas.values():
        each.engine.hold_at = 1
    body = {"input": "a b c", "stream": True}
    with running.http() as client, client.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        (busy,) = (name for name, count in running.served().items() if count)
        running.kill(busy)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert sum(running.served().values()) == 1
    for each in running.replicas.values():
        each.engine.hold_at = None


def test_a_client_that_leaves_ends_the_work(routed: Begin) -> None:
    running = routed()
    for each in running.replicas.values():
        each.engine.hold_at = 1
    body = {"model": "mm/fake", "messages": [{"role": "user", "content": "a b"}], "stream": True}
    with running.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as s:
        assert next(s.iter_lines())
    assert eventually(lambda: any(each.engine.aborted for each in running.replicas.values()))


def test_refusals_are_the_replicas_own_and_a_full_queue_is_not_carried_on(routed: Begin) -> None:
    running = routed()
    with running.http() as client:
        wrong = client.post("/v1/responses", json={"input": 7})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input"
        for each in running.replicas.values():
            each.engine.queue_full = True
        full = client.post("/v1/responses", json={"input": "x"})
        assert full.status_code == 429 and "retry-after" in full.headers
        assert full.json()["error"]["code"] == "queue_full"


def test_one_that_drains_gets_nothing_new_and_still_answers_for_what_it_has(routed: Begin) -> None:
    running = routed()
    first = ask(running, "one")
    old = home(first["id"])
    running.replicas[old].services.draining = True  # the router has not heard of it yet
    assert home(ask(running, "one")["id"]) != old
    running.draining.add(old)
    running.learn()
    before = running.served()[old]
    for number in range(5):
        ask(running, f"new {number}")
    with running.http() as client:
        assert client.get(f"/v1/responses/{first['id']}").status_code == 200
    assert running.served()[old] == before


def test_a_socket_reaches_who_has_the_conversation_and_outlives_no_replica(routed: Begin) -> None:
    running = routed()
    first = ask(running, "one")
    url = running.url.replace("http", "ws", 1) + "/v1/responses"
    with connect(url) as socket:
        frame = {"type": "response.create", "input": "two", "previous_response_id": first["id"]}
        socket.send(json.dumps(frame))
        created = json.loads(socket.recv(timeout=30))
        assert home(created["response"]["id"]) == home(first["id"])
        while json.loads(socket.recv(timeout=30))["type"] != "response.completed":
            pass
        assert running.directory.sockets[home(first["id"])] == 1
        running.kill(home(first["id"]))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    with connect(url) as socket:
        socket.send(json.dumps(frame))
        created = json.loads(socket.recv(timeout=30))
        assert home(created["response"]["id"]) != home(first["id"])


def test_realtime_speaks_first_through_it(routed: Begin) -> None:
    running = routed()
    with running.openai() as client, client.realtime.connect(model="mm/fake") as socket:
        assert next(iter(socket)).type == "session.created"


def test_a_handshake_is_refused_as_a_replica_refuses_it(routed: Begin) -> None:
    running = routed(api_keys=(KEY,))
    with pytest.raises(InvalidStatus) as refused:
        connect(running.url.replace("http", "ws", 1) + "/v1/responses")
    assert refused.value.response.status_code == 401
    assert b"invalid_api_key" in (refused.value.response.body or b"")


def test_keys_are_asked_for_and_figures_are_of_all(routed: Begin) -> None:
    running = routed(api_keys=(KEY,), admin_keys=(ADMIN_KEY,))
    with running.http() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/metrics").status_code == 401
        text = client.get("/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"}).text
    for name in running.replicas:
        assert f'mmserve:websockets_open{{replica="{name}"}} 0.0' in text
    assert text.count("# TYPE mmserve:websockets_open gauge") == 1


def test_it_is_healthy_while_one_replica_is(routed: Begin) -> None:
    running = routed()
    with running.http() as client:
        assert client.get("/health").json() == {"status": "ok", "replicas": 3}
        running.absent |= {"a", "b", "c"}
        running.learn()
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/responses", json={"input": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_replica"


def test_the_page_comes_through_it(routed: Begin) -> None:
    running = routed()
    with running.http() as client:
        assert "<title>" in client.get("/").text
