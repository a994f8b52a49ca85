"""A server that starts anew over its data folder: conversations go on, files are there."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmserve.config import ServerConfig
from mmserve.server.app import create_app
from mmserve.server.journal import CannotStoreError, Database
from tests.server.conftest import PATIENCE_S, Running, data_url, eventually, png, start
from tests.server.fake_engine import FakeEngine

Start = Callable[..., Running]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """Start a server over one folder; one that ran before is stopped."""
    stops: list[Callable[[], None]] = []

    def again(**settings: Any) -> Running:
        while stops:
            stops.pop()()
        settings = {"data_dir": tmp_path / "data", **settings}
        running, stop = start(ServerConfig(port=0, **settings), FakeEngine())
        stops.append(stop)
        return running

    yield again
    while stops:
        stops.pop()()


def ask(running: Running, text: str, **body: Any) -> dict[str, Any]:
    answer = running.http().post("/v1/responses", json={"input": text, **body})
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def upload(running: Running, data: bytes) -> str:
    files = {"file": ("x.png", data)}
    answer = running.http().post("/v1/files", files=files, data={"purpose": "vision"})
    id: str = answer.json()["id"]
    return id


def show(running: Running, *parts: dict[str, Any], **body: Any) -> dict[str, Any]:
    content = [{"type": "input_image", **part} for part in parts]
    return ask(running, [{"role": "user", "content": content}], **body)  # type: ignore[arg-type]


def last_prompt(running: Running) -> list[Any]:
    return [
        (m.role, [getattr(p, "data", None) or getattr(p, "token_ids", None) or p for p in m.parts])
        for m in running.engine.prompts[-1]
    ]


def blob_files(folder: Path) -> list[Path]:
    return list((folder / "data" / "blobs").iterdir())


def test_a_conversation_goes_on_with_its_pictures_and_exact_tokens(begin: Start) -> None:
    running = begin()
    file_id = upload(running, png("uploaded"))
    inline = {"image_url": data_url(png("inline"))}
    first = show(running, {"file_id": file_id}, inline, instructions="be brief")
    second = ask(running, "and now?", previous_response_id=first["id"])
    ask(running, "more", previous_response_id=second["id"])
    before = last_prompt(running)
    assert [png("uploaded"), png("inline")] == before[0][1]

    running = begin()
    again = ask(running, "more", previous_response_id=second["id"])
    assert last_prompt(running) == before
    assert again["status"] == "completed"
    assert running.http().get(f"/v1/responses/{first['id']}").json() == first
    items = running.http().get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert [part["file_id"] for part in items[0]["content"]] == [file_id, None]


def test_an_item_can_be_referred_to_after_a_restart(begin: Start) -> None:
    item = ask(begin(), "hello")["output"][0]["id"]
    running = begin()
    ask(running, [{"type": "item_reference", "id": item}, {"role": "user", "content": "hm"}])  # type: ignore[arg-type]
    assert [role for role, _ in last_prompt(running)] == ["assistant", "user"]


def test_the_events_of_an_earlier_process_are_no_longer_held(begin: Start) -> None:
    id = ask(begin(), "hello")["id"]
    answer = begin().http().get(f"/v1/responses/{id}?stream=true")
    assert answer.status_code == 400 and "no longer held" in answer.json()["error"]["message"]


def test_files_are_there_with_the_same_bytes(begin: Start, tmp_path: Path) -> None:
    running = begin()
    ids = {upload(running, png(tag)): png(tag) for tag in ("a", "b", "b")}
    listed = running.http().get("/v1/files").json()
    http = begin().http()
    assert http.get("/v1/files").json() == listed
    for id, data in ids.items():
        assert http.get(f"/v1/files/{id}/content").content == data
    assert len(blob_files(tmp_path)) == 2


def test_what_was_deleted_stays_deleted(begin: Start, tmp_path: Path) -> None:
    running = begin()
    file_id = upload(running, png("gone"))
    kept = show(running, {"image_url": data_url(png("kept"))})
    child = ask(running, "go on", previous_response_id=kept["id"])
    lone = show(running, {"image_url": data_url(png("lone"))})
    for path in (f"files/{file_id}", f"responses/{kept['id']}", f"responses/{lone['id']}"):
        assert running.http().delete(f"/v1/{path}").status_code == 200

    running = begin()
    for path in (f"files/{file_id}", f"responses/{kept['id']}", f"responses/{lone['id']}"):
        assert running.http().get(f"/v1/{path}").status_code == 404
    ask(running, "and?", previous_response_id=child["id"])
    assert last_prompt(running)[0][1] == [png("kept")]
    assert len(blob_files(tmp_path)) == 1  # the one that a child still needs

    running.http().delete(f"/v1/responses/{child['id']}")
    for id in list(running.services.responses._turns):
        running.http().delete(f"/v1/responses/{id}")
    begin()
    assert blob_files(tmp_path) == []
    with closing(sqlite3.connect(tmp_path / "data" / "mmserve.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM turns").fetchone() == (0,)


def test_what_is_not_to_be_stored_never_reaches_the_disk(begin: Start, tmp_path: Path) -> None:
    running = begin()
    id = ask(running, "a secret word", store=False)["id"]
    with running.openai().responses.connect() as socket:
        socket.response.create(model="mm/fake", input="a hidden word", store=False)
        hidden = next(e.response.id for e in socket if e.type == "response.completed")
        socket.response.create(model="mm/fake", input="public", previous_response_id=hidden)
        public = next(e.response.id for e in socket if e.type == "response.completed")
    assert running.http().get(f"/v1/responses/{public}").status_code == 200
    running = begin()
    for gone in (id, public):
        assert running.http().get(f"/v1/responses/{gone}").status_code == 404
    everything = b"".join(f.read_bytes() for f in (tmp_path / "data").rglob("*") if f.is_file())
    assert b"secret" not in everything and b"hidden word" not in everything


def test_expired_and_surplus_turns_and_files_are_dropped_at_the_start(
    begin: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = begin()
    turns = [show(running, {"image_url": data_url(png(str(i)))})["id"] for i in range(4)]
    running = begin(max_stored_responses=2)
    states = [running.http().get(f"/v1/responses/{id}").status_code for id in turns]
    assert states == [404, 404, 200, 200]
    file_id = upload(running, png("file"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    running = begin()
    assert running.http().get(f"/v1/responses/{turns[3]}").status_code == 404
    assert running.http().get(f"/v1/files/{file_id}").status_code == 404
    begin()
    assert blob_files(tmp_path) == []


def test_an_interrupted_response_has_failed(begin: Start, tmp_path: Path) -> None:
    running = begin()
    running.engine.hold_at = 1
    id = ask(running, "one two three", background=True)["id"]
    # What a killed process leaves behind: its files as they are at this moment.
    image = tmp_path / "image.db"
    with closing(sqlite3.connect(tmp_path / "data" / "mmserve.db")) as connection:
        with closing(sqlite3.connect(image)) as copy:
            connection.backup(copy)
    running = begin(data_dir=tmp_path / "other", database_url=f"sqlite:///{image}")
    response = running.http().get(f"/v1/responses/{id}").json()
    assert response["status"] == "failed" and response["output"] == []
    assert "stopped" in response["error"]["message"]
    body = {"input": "go on", "previous_response_id": id}
    assert "failed" in running.http().post("/v1/responses", json=body).json()["error"]["message"]


def test_half_written_and_unknown_blobs_are_swept_at_the_start(
    begin: Start, tmp_path: Path
) -> None:
    file_id = upload(begin(), png("whole"))
    (whole,) = blob_files(tmp_path)
    for name in (f"{'0' * 64}.1", f"{'1' * 64}.1.part", whole.name + ".part"):
        (whole.parent / name).write_bytes(b"half")
    running = begin()
    assert blob_files(tmp_path) == [whole]
    assert running.http().get(f"/v1/files/{file_id}/content").content == png("whole")


def test_one_server_a_folder(begin: Start, tmp_path: Path) -> None:
    begin()
    with pytest.raises(CannotStoreError, match="another server uses the data folder"):
        create_app(FakeEngine(), ServerConfig(data_dir=tmp_path / "data"))


def test_nothing_is_acknowledged_before_its_commit(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = begin()
    running.engine.hold_at = 1
    ids = [ask(running, "one two", background=True)["id"] for _ in range(2)]
    gate, waiting, commit = threading.Event(), threading.Event(), Database._commit

    def gated(self: Database, orders: Any) -> None:
        waiting.set()
        assert gate.wait(PATIENCE_S)
        commit(self, orders)

    monkeypatch.setattr(Database, "_commit", gated)
    running.engine.hold_at = None
    assert waiting.wait(PATIENCE_S) and eventually(lambda: not running.engine.running)
    for id in ids:
        shown = running.http().get(f"/v1/responses/{id}").json()
        assert shown["status"] == "in_progress"
        assert shown["usage"] is None and shown["completed_at"] is None
        body = {"input": "on", "previous_response_id": id}
        answer = running.http().post("/v1/responses", json=body)
        assert "has not ended" in answer.json()["error"]["message"]
    logs = [job.log for job in running.services.jobs]
    assert len(logs) == 2 and not any(log.closed for log in logs)
    upload = {"files": {"file": ("x", png())}, "data": {"purpose": "vision"}}
    with pytest.raises(httpx.ReadTimeout):
        running.http().post("/v1/files", timeout=0.3, **upload)  # type: ignore[arg-type]
    gate.set()
    assert running.idle()
    for id in ids:
        assert running.http().get(f"/v1/responses/{id}").json()["status"] == "completed"


def test_a_refusing_disk_stops_what_must_be_stored_and_nothing_else(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = begin()
    kept = ask(running, "hello")["id"]

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "_commit", full)
        http = running.http()
        refusals = [
            http.post("/v1/responses", json={"input": "hello"}),
            http.post("/v1/files", files={"file": ("x", png())}, data={"purpose": "vision"}),
            http.delete(f"/v1/responses/{kept}"),
        ]
        for answer in refusals:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "storage_unavailable"
            assert "No space left" in answer.json()["error"]["message"]
        assert http.get("/v1/files").json()["data"] == []
        assert ask(running, "hello", store=False)["status"] == "completed"
        assert http.get(f"/v1/responses/{kept}").status_code == 200
        assert running.idle()
    assert ask(running, "on", previous_response_id=kept)["status"] == "completed"


def test_an_answer_that_cannot_be_kept_has_failed(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = begin()
    running.engine.hold_at = 1
    id = ask(running, "one two", background=True)["id"]

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "_commit", full)
        running.engine.hold_at = None
        assert running.idle()
    response = running.http().get(f"/v1/responses/{id}").json()
    assert response["status"] == "failed"
    assert "cannot be stored" in response["error"]["message"]
    response = begin().http().get(f"/v1/responses/{id}").json()
    assert response["status"] == "failed"
