"""Uploads: the SDK's calls, checks, owners, budgets and how content is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types import FileObject
from pydantic import TypeAdapter

from tests.server.conftest import Running, png


def test_the_sdk_uploads_lists_reads_and_deletes(server: Running) -> None:
    client = server.openai()
    file = client.files.create(file=("cat.png", png("c")), purpose="vision")
    TypeAdapter(FileObject).validate_python(file.model_dump())
    assert (file.bytes, file.filename, file.status) == (len(png("c")), "cat.png", "processed")
    assert client.files.retrieve(file.id).id == file.id
    assert file.id in [f.id for f in client.files.list()]
    assert client.files.content(file.id).content == png("c")
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(file.id)
    assert caught.value.code == "file_not_found"


def test_equal_uploads_share_one_blob(launch: Callable[..., Any]) -> None:
    running = launch()
    client = running.openai()
    ids = [client.files.create(file=("x", png("same")), purpose="vision").id for _ in range(3)]
    blobs = running.server.config.app.state.services.blobs
    assert len(set(ids)) == 3 and len(blobs) == 1
    for id in ids:
        assert len(blobs) == 1
        client.files.delete(id)
    assert len(blobs) == 0


@pytest.mark.parametrize(
    ("data", "purpose", "code"),
    [
        (b"<html>", "vision", "unsupported_image_type"),
        (png("broken"), "vision", "invalid_image"),
        (png("broken"), "user_data", "invalid_image"),
        (b"", "vision", "invalid_value"),
        (png(), "fine-tune", "invalid_value"),
    ],
)
def test_bad_uploads_are_refused(server: Running, data: bytes, purpose: str, code: str) -> None:
    answer = server.http().post(
        "/v1/files", files={"file": ("x.png", data)}, data={"purpose": purpose}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


def test_a_form_without_file_or_no_form_is_refused(server: Running) -> None:
    http = server.http()
    answer = http.post("/v1/files", files={"purpose": (None, "vision")})
    assert answer.json()["error"]["code"] == "missing_required_parameter"
    kind = "multipart/form-data"
    answer = http.post("/v1/files", content=b"junk", headers={"content-type": kind})
    assert answer.status_code == 400 and "error" in answer.json()
    kind = "multipart/form-data; boundary=x"
    answer = http.post("/v1/files", content=b"--y\r\nnope", headers={"content-type": kind})
    assert answer.status_code == 400 and "error" in answer.json()


def test_html_is_served_as_an_attachment(server: Running) -> None:
    http = server.http()
    upload = {"file": ("a.html", b"<script>")}
    id = http.post("/v1/files", files=upload, data={"purpose": "user_data"}).json()["id"]
    answer = http.get(f"/v1/files/{id}/content")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment"
    assert answer.headers["x-content-type-options"] == "nosniff"
    part = {"type": "input_image", "file_id": id}
    body = {"input": [{"role": "user", "content": [part]}]}
    assert http.post("/v1/responses", json=body).json()["error"]["code"] == "unsupported_image_type"


def test_names_lose_their_folders(server: Running) -> None:
    for name in ("../../etc/x.png", "C:\\a\\x.png"):
        file = server.openai().files.create(file=(name, png()), purpose="vision")
        assert file.filename == "x.png"


def test_files_belong_to_their_key(launch: Callable[..., Any]) -> None:
    running = launch(api_keys=("one", "two"))
    id = running.openai().files.create(file=("x.png", png()), purpose="vision").id
    other = running.http(headers={"authorization": "Bearer two"})
    assert other.get("/v1/files").json()["data"] == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert other.request(method, f"/v1/files/{id}{path}").status_code == 404


def test_files_expire_and_the_budget_holds(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = launch(max_files_bytes=20_000, max_file_bytes=9000)
    http = running.http()

    def upload(size: int) -> Any:
        data = {"purpose": "user_data", "expires_after[anchor]": "created_at"}
        data["expires_after[seconds]"] = "3600"
        return http.post("/v1/files", files={"file": ("x", b"a" * size)}, data=data)

    assert upload(9500).status_code == 413
    assert upload(200_000).status_code == 413
    first = upload(8000)
    assert first.status_code == 200
    assert first.json()["expires_at"] == first.json()["created_at"] + 3600
    assert upload(8000).status_code == 200
    full = upload(8000)
    assert full.status_code == 413 and full.json()["error"]["code"] == "request_too_large"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert http.get(f"/v1/files/{first.json()['id']}").status_code == 404
    assert upload(8000).status_code == 200
