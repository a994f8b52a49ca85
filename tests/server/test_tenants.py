"""Tenants over HTTP: keys that come and go, what each may ask, and what none learns of another."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import RateLimitError
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mmserve.config import ServerConfig
from mmserve.prompt import ImagePart
from mmserve.server.blobs import BlobStore
from mmserve.server.key_file import KeyFileError, digest_of, parse, read, together
from mmserve.server.tenants import LOOK_S, Tenants
from tests.server.conftest import Running, data_url, eventually, png
from tests.server.fake_engine import FakeEngine

Launch = Callable[..., Running]
ANN, BEN = "sk-ann-1", "sk-ben-1"


def written(folder: Path, *lines: str) -> Path:
    """A key file, another one than before."""
    path = folder / "keys"
    path.with_suffix(".new").write_text("\n".join(lines))
    os.replace(path.with_suffix(".new"), path)
    return path


def by(server: Running, key: str) -> httpx.Client:
    return server.http(headers={"authorization": f"Bearer {key}"})


def chat(client: httpx.Client, text: str = "hello") -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}]}
    return client.post("/v1/chat/completions", json=body)


# -- how keys are written down ---------------------------------------------------------------------


def test_a_line_has_a_key_or_its_hash_and_what_its_holder_may_do(tmp_path: Path) -> None:
    hashed = f"sha256:{digest_of(BEN).hex()}"
    lines = ["# ours", f"{ANN} name=ann rpm=60 tpm=9000 # Ann's", "", f"{hashed} admin"]
    ann, ben = read(written(tmp_path, *lines))
    assert ann.digest == digest_of(ANN) and ann.owner == "@ann" and not ann.admin
    assert (ann.limits.requests, ann.limits.tokens, ann.limits.concurrency) == (60, 9000, None)
    assert ben.digest == digest_of(BEN) and ben.admin and BEN not in ben.owner


@pytest.mark.parametrize(
    "line",
    [
        "sk-SECRET sk-SECRET-2",
        "sk-SECRET rpm=0",
        "sk-SECRET rpm=-1",
        "sk-SECRET tpm=x",
        "sk-SECRET weight=nan",
        "sk-SECRET weight=0",
        "sk-SECRET name=",
        "sk-SECRET name=a/b",
        "sk-SECRET rpm=1 rpm=2",
        "sk-SECRET colour=red",
        "sha256:SECRET",
        "sha256:" + "0" * 62,
    ],
)
def test_a_wrong_line_is_named_and_never_quoted(tmp_path: Path, line: str) -> None:
    with pytest.raises(KeyFileError, match="line 2 of the key file") as refused:
        read(written(tmp_path, "sk-first", line))
    assert "SECRET" not in str(refused.value)


def test_keys_of_one_name_are_one_tenant_and_may_not_differ() -> None:
    one, two = parse(f"{ANN} name=ann"), parse(f"{BEN} name=ann")
    assert together([one, two]) == [one, two] and one.tenant == two.tenant
    with pytest.raises(KeyFileError, match="unlike"):
        together([one, parse(f"{BEN} name=ann rpm=5")])


def test_salts_are_equal_for_one_name_or_one_share_only() -> None:
    lines = ("k1", "k2", "k3 name=a", "k4 name=b", "k5 share=a", "k6 share=@a", "k7 name=c share=a")
    salts = [parse(line).tenant.salt for line in lines]
    assert salts[4] == salts[6] and len(set(salts)) == len(lines) - 1
    assert all(salts), "the salt of who needs no key is nobody's"


# -- keys that come and go -------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_changed_file_counts_from_the_next_look_on(tmp_path: Path) -> None:
    clock = Clock()
    path = written(tmp_path, f"{ANN} name=ann")
    tenants = Tenants(ServerConfig(api_key_file=path), clock)
    entry = tenants.find(ANN, admin=False)
    assert entry is not None and tenants.find(BEN, admin=False) is None
    written(tmp_path, f"{BEN} name=ann rpm=3")
    assert tenants.find(ANN, admin=False), "it is not looked at for each request"
    clock.now += LOOK_S
    assert tenants.find(ANN, admin=False) is None and not tenants.holds(entry)
    assert tenants.find(BEN, admin=False)
    assert tenants.account("@ann").meter.limits.requests == 3


def test_a_file_that_is_broken_or_gone_changes_nothing_and_an_empty_one_opens_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = written(tmp_path, ANN)
    tenants = Tenants(ServerConfig(api_key_file=path), clock)
    written(tmp_path, BEN, "sk-SECRET rpm=x")
    clock.now += LOOK_S
    assert tenants.find(ANN, admin=False) and not tenants.find(BEN, admin=False)
    path.unlink()
    clock.now += LOOK_S
    assert tenants.find(ANN, admin=False)
    assert "line 2" in caplog.text and "SECRET" not in caplog.text
    written(tmp_path, "# nobody")
    clock.now += LOOK_S
    assert tenants.needs_keys and not tenants.find(ANN, admin=False)


def test_a_server_does_not_start_with_a_file_that_lets_nobody_in(tmp_path: Path) -> None:
    for lines in ("", "# none", f"{ANN} admin"):
        with pytest.raises(KeyFileError, match="no key"):
            Tenants(ServerConfig(api_key_file=written(tmp_path, lines)))


def test_keys_are_rotated_while_the_server_runs(launch: Launch, tmp_path: Path) -> None:
    server = launch(api_key_file=written(tmp_path, f"{ANN} name=ann", f"{BEN} name=ben"))
    kept = by(server, ANN).post("/v1/responses", json={"input": "keep this"}).json()["id"]
    socket = connect(server.ws_url, additional_headers={"authorization": f"Bearer {ANN}"})
    other = connect(server.ws_url, additional_headers={"authorization": f"Bearer {BEN}"})
    written(tmp_path, "sk-ann-2 name=ann", f"{BEN} name=ben")
    assert eventually(lambda: chat(by(server, "sk-ann-2")).status_code == 200)
    assert chat(by(server, ANN)).status_code == 401
    assert by(server, "sk-ann-2").get(f"/v1/responses/{kept}").status_code == 200
    frame = json.dumps({"type": "response.create", "input": "x"})
    socket.send(frame)
    with pytest.raises(ConnectionClosed):
        socket.recv()
    assert socket.close_code == 1008, "the socket of a withdrawn key is closed"
    other.send(frame)
    assert json.loads(other.recv())["type"] == "response.created"
    other.close()


# -- limits ----------------------------------------------------------------------------------------


def test_limits_hold_on_every_surface_and_headers_tell_of_them(
    launch: Launch, tmp_path: Path
) -> None:
    server = launch(api_key_file=written(tmp_path, f"{ANN} name=ann rpm=4", f"{BEN} name=ben"))
    ann = by(server, ANN)
    first = chat(ann)
    assert first.headers["x-ratelimit-limit-requests"] == "4"
    assert first.headers["x-ratelimit-remaining-requests"] == "3"
    assert ann.post("/v1/responses", json={"input": "x"}).status_code == 200
    assert ann.post("/v1/responses/input_tokens", json={"input": "x"}).status_code == 200
    upload = {"file": ("a.png", png())}
    assert ann.post("/v1/files", files=upload, data={"purpose": "vision"}).status_code == 200
    refused = [
        chat(ann),
        ann.post("/v1/responses", json={"input": "x"}),
        ann.post("/v1/responses", json={"input": "x", "stream": True}),
        ann.post("/v1/responses/input_tokens", json={"input": "x"}),
        ann.post("/v1/files", files=upload, data={"purpose": "vision"}),
    ]
    for answer in refused:
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answer.headers["retry-after"]) <= 15
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    headers = {"authorization": f"Bearer {ANN}"}
    with connect(server.ws_url, additional_headers=headers) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "x"}))
        assert json.loads(socket.recv())["error"]["code"] == "rate_limit_exceeded"
    url = server.ws_url.replace("responses", "realtime")
    with connect(url, additional_headers=headers) as socket:
        socket.recv()
        socket.send(json.dumps({"type": "response.create", "response": {}}))
        assert json.loads(socket.recv())["error"]["code"] == "rate_limit_exceeded"
    assert ann.get("/v1/models").status_code == 200, "what is no work is not counted"
    free = chat(by(server, BEN))
    assert free.status_code == 200
    assert not any(name.startswith("x-ratelimit") for name in free.headers)


def test_tokens_of_prompts_and_answers_are_counted(launch: Launch, tmp_path: Path) -> None:
    """The fake engine says as much as it is told; a token is a byte."""
    server = launch(api_key_file=written(tmp_path, f"{ANN} tpm=60"))
    assert chat(by(server, ANN), "x" * 600).status_code == 200
    refused = chat(by(server, ANN), "hello")
    assert refused.status_code == 429
    assert 1100 < int(refused.headers["retry-after"]) < 1300


def test_so_many_answers_run_at_once(launch: Launch, tmp_path: Path) -> None:
    engine = FakeEngine(script="w " * 9, hold_at=2)
    path = written(tmp_path, f"{ANN} concurrency=2", BEN)
    server = launch(engine, api_key_file=path)
    ann = by(server, ANN)
    ids = [
        ann.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
        for _ in range(2)
    ]
    assert chat(ann).status_code == 429
    other = by(server, BEN).post("/v1/responses", json={"input": "x", "background": True})
    assert other.status_code == 200, "another tenant is not in its way"
    ann.post(f"/v1/responses/{ids[0]}/cancel")
    engine.hold_at = None
    assert server.idle()
    assert chat(ann).status_code == 200
    assert server.services.tenants.account(parse(ANN).owner).meter.running == 0


def test_openais_client_waits_as_long_as_it_is_told(launch: Launch, tmp_path: Path) -> None:
    server = launch(api_key_file=written(tmp_path, f"{ANN} rpm=1"))
    server.key = ANN
    client = server.openai()
    client.responses.create(input="x", model="mm/fake")
    with pytest.raises(RateLimitError) as refused:
        client.responses.create(input="x", model="mm/fake")
    assert refused.value.code == "rate_limit_exceeded"
    assert 50 <= int(refused.value.response.headers["retry-after"]) <= 60


# -- what nobody learns of another -----------------------------------------------------------------


def picture_input(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "see"}, *parts]}]


def test_ids_of_another_key_are_unknown_in_every_place(launch: Launch, tmp_path: Path) -> None:
    """B06: an id, whoever made it up, opens nothing that is not one's own."""
    server = launch(api_key_file=written(tmp_path, f"{ANN} name=ann", f"{BEN} name=ben share=x"))
    ann, ben = by(server, ANN), by(server, BEN)
    upload = {"file": ("x", png())}
    file = ann.post("/v1/files", files=upload, data={"purpose": "vision"}).json()["id"]
    shown = picture_input({"type": "input_image", "file_id": file})
    response = ann.post("/v1/responses", json={"input": shown}).json()
    items = ann.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
    id, item = response["id"], items[0]["id"]
    for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/responses/{id}"):
        assert ann.get(path).status_code == 200
        assert ben.get(path).status_code == 404
    for path in ("input_items", "images"):
        assert ben.get(f"/v1/responses/{id}/{path}").status_code == 404
    assert ben.post(f"/v1/responses/{id}/cancel").status_code == 404
    assert ben.delete(f"/v1/responses/{id}").status_code == 404
    assert ben.delete(f"/v1/files/{file}").status_code == 404
    assert ben.get("/v1/files").json()["data"] == []
    asked: list[tuple[dict[str, Any], str]] = [
        ({"input": shown}, "file_not_found"),
        ({"input": picture_input({"type": "input_image", "item_id": item})}, "item_not_found"),
        ({"input": [{"type": "item_reference", "id": item}]}, "item_not_found"),
        ({"input": "x", "previous_response_id": id}, "previous_response_not_found"),
    ]
    for body, code in asked:
        answer = ben.post("/v1/responses", json=body)
        assert (answer.status_code in (400, 404), answer.json()["error"]["code"]) == (True, code)
    assert ben.post(f"/v1/responses/{id}/images/{file}/pin").status_code == 404


def test_one_id_names_what_each_key_has_sent_under_it(launch: Launch, tmp_path: Path) -> None:
    """B06: the same item id from another key, with another picture."""
    server = launch(api_key_file=written(tmp_path, f"{ANN} name=ann", f"{BEN} name=ben"))
    for key, tag in ((ANN, "small"), (BEN, "large" * 99)):
        part = {"type": "input_image", "image_url": data_url(png(tag))}
        item = {"type": "message", "id": "msg_x", **picture_input(part)[0]}
        client = by(server, key)
        assert client.post("/v1/responses", json={"input": [item]}).status_code == 200
    for key, tag in ((ANN, "small"), (BEN, "large" * 99)):
        again = picture_input({"type": "input_image", "item_id": "msg_x"})
        assert by(server, key).post("/v1/responses", json={"input": again}).status_code == 200
        parts = [part for message in server.engine.prompts[-1] for part in message.parts]
        assert [p.data for p in parts if isinstance(p, ImagePart)] == [png(tag)]


def test_each_key_asks_the_engine_under_its_own_salt(launch: Launch, tmp_path: Path) -> None:
    """B51; what the engine makes of salts: tests/engine/test_tenants.py."""
    lines = (
        f"{ANN} name=ann weight=2",
        f"{BEN} name=ben",
        "sk-bea name=bea share=x",
        "sk-x share=x",
    )
    server = launch(api_key_file=written(tmp_path, *lines))
    part = {"type": "input_image", "image_url": data_url(png())}
    held = []
    for key in (ANN, BEN, "sk-bea", "sk-x"):
        client = by(server, key)
        id = client.post("/v1/responses", json={"input": picture_input(part)}).json()["id"]
        (image,) = client.get(f"/v1/responses/{id}/images").json()["data"]
        held.append(image["hits"])
    ann, ben, bea, other = server.engine.tenants
    assert len({ann.salt, ben.salt, bea.salt}) == 3 and bea.salt == other.salt
    assert len({t.name for t in server.engine.tenants}) == 4 and ann.weight == 2.0
    assert held == [0, 0, 0, 1], "only who shares sees that it was shown before"


def test_without_keys_everything_is_shared(launch: Launch) -> None:
    server = launch()
    chat(server.http())
    assert server.engine.tenants[0].salt == b""


def test_bytes_that_another_salt_holds_are_written_all_the_same() -> None:
    async def test() -> None:
        store = BlobStore()
        mine, again, others = [await store.put(b"same", s) for s in (b"a", b"a", b"b")]
        assert mine is again and others.path != mine.path
        assert others.digest == mine.digest and len(store) == 2
        store.close()

    asyncio.run(test())
