"""KV files over HTTP: for admin keys alone, whole in both directions, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from mmserve.server import kv_files
from tests.server.conftest import KEY, Running

ADMIN = "admin-key"
Launch = Callable[..., Running]


@pytest.fixture
def server(launch: Launch, tmp_path: Path) -> Running:
    return launch(api_keys=(KEY,), admin_keys=(ADMIN,), data_dir=tmp_path)


def http(server: Running, key: str | None) -> httpx.Client:
    return httpx.Client(
        base_url=server.url, headers={"authorization": f"Bearer {key}"} if key else {}
    )


def left_over(folder: Path) -> list[Path]:
    return list(folder.glob(".kv-*"))


def test_what_is_taken_out_can_be_put_in_again(server: Running, tmp_path: Path) -> None:
    with http(server, ADMIN) as client:
        out = client.get("/v1/kv")
        assert out.status_code == 200 and out.content == b"all KV"
        answer = client.post("/v1/kv", content=out.content)
    assert answer.json()["text"] == {"new": 1, "known": 0, "left_out": 0}
    assert not left_over(tmp_path)


def test_a_start_clears_what_a_killed_process_left(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / ".kv-half").mkdir(parents=True)
    (tmp_path / ".kv-half" / "all.kv").write_bytes(b"what was cached")
    (tmp_path / "kv").mkdir()
    launch(data_dir=tmp_path)
    assert not left_over(tmp_path) and (tmp_path / "kv").exists()


@pytest.mark.parametrize("key", [None, KEY, "wrong"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_key_reads_or_plants(server: Running, method: str, key: str | None) -> None:
    with http(server, key) as client:
        answer = client.request(method, "/v1/kv", content=b"all KV")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_an_admin_key_opens_nothing_else(server: Running) -> None:
    with http(server, ADMIN) as client:
        assert client.get("/v1/models").status_code == 401


def test_a_server_without_an_admin_key_says_so(launch: Launch) -> None:
    with http(launch(), None) as client:
        answer = client.get("/v1/kv")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "admin_key_required"
    assert "--admin-key" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "code"), [(b"something else", "kv_file_refused"), (b"", "invalid_value")]
)
def test_what_is_no_kv_file_is_refused(
    server: Running, tmp_path: Path, sent: bytes, code: str
) -> None:
    with http(server, ADMIN) as client:
        answer = client.post("/v1/kv", content=sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert not left_over(tmp_path)


def test_more_than_the_disk_holds_is_refused(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_files, "SPARE", 1 << 62)
    with http(server, ADMIN) as client:
        answer = client.post("/v1/kv", content=b"all KV")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert not left_over(tmp_path)


def test_a_file_may_be_larger_than_other_bodies(launch: Launch) -> None:
    server = launch(admin_keys=(ADMIN,), max_body_bytes=1000)
    with http(server, ADMIN) as client:
        assert client.post("/v1/kv", content=b"all KV" + bytes(5000)).status_code == 200
