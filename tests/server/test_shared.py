"""Several servers over one data folder and database: what one keeps, the others go on from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmserve.config import ServerConfig
from mmserve.server.app import create_app
from mmserve.server.journal import CannotStoreError
from mmserve.server.shared import ORPHAN_S, SharedStore
from tests.server.conftest import Running, data_url, eventually, png, start
from tests.server.fake_engine import FakeEngine
from tests.server.test_restart import ask, show, upload

Pair = tuple[Running, Running]
BLUE = {"file_id": None, "image_url": data_url(png("blue"))}


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    """Start a server of this name over one folder."""
    stops: list[Callable[[], None]] = []

    def another(name: str, **settings: Any) -> Running:
        config = ServerConfig(port=0, data_dir=tmp_path / "data", replica=name, **settings)
        running, stop = start(config, FakeEngine())
        stops.append(stop)
        return running

    yield another
    for stop in stops:
        stop()


@pytest.fixture
def pair(begin: Callable[[str], Running]) -> Pair:
    return begin("one"), begin("two")


def get(running: Running, path: str) -> Any:
    return running.http().get(path)


def test_a_conversation_that_began_elsewhere_goes_on_with_its_images(pair: Pair) -> None:
    one, two = pair
    first = show(one, {"image_url": data_url(png("blue"))})
    second = ask(two, "and now?", previous_response_id=first["id"])
    third = ask(one, "and then?", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    one.idle(), two.idle()
    same = ask(one, "and now?", previous_response_id=first["id"])
    assert same["output"][0]["content"] == second["output"][0]["content"]
    assert get(two, f"/v1/responses/{third['id']}").json() == third


def test_ids_say_which_server_they_came_from(pair: Pair) -> None:
    one, two = pair
    assert ask(one, "hello")["id"].startswith("resp_one_")
    assert upload(two, png("red")).startswith("file_two_")


def test_what_one_has_deleted_the_other_no_longer_has(pair: Pair) -> None:
    one, two = pair
    first = ask(one, "hello")
    again = ask(two, "again", previous_response_id=first["id"])
    assert one.http().delete(f"/v1/responses/{again['id']}").status_code == 200
    assert get(two, f"/v1/responses/{again['id']}").status_code == 404
    assert two.http().delete(f"/v1/responses/{first['id']}").status_code == 200
    assert get(one, f"/v1/responses/{first['id']}").status_code == 404


def test_a_continued_turn_that_one_deletes_still_stands_before_the_others_turn(pair: Pair) -> None:
    one, two = pair
    first = ask(one, "hello")
    second = ask(two, "again", previous_response_id=first["id"])
    one.http().delete(f"/v1/responses/{first['id']}")
    assert ask(one, "more", previous_response_id=second["id"])["status"] == "completed"


def test_files_are_everywhere_and_gone_everywhere(pair: Pair) -> None:
    one, two = pair
    id = upload(one, png("red"))
    assert get(two, f"/v1/files/{id}/content").content == png("red")
    assert [file["id"] for file in get(two, "/v1/files").json()["data"]] == [id]
    assert show(two, {"file_id": id})["status"] == "completed"
    assert two.http().delete(f"/v1/files/{id}").status_code == 200
    assert get(one, f"/v1/files/{id}").status_code == 404
    assert get(one, "/v1/files").json()["data"] == []


def test_what_one_does_with_an_image_the_other_goes_by(pair: Pair) -> None:
    one, two = pair
    first = show(one, {"image_url": data_url(png("blue"))})
    ask(two, "seen", previous_response_id=first["id"])
    images = get(two, f"/v1/responses/{first['id']}/images").json()["data"]
    path = f"/v1/responses/{first['id']}/images/{images[0]['sha256']}"
    assert one.http().post(f"{path}/pin").status_code == 200
    (image,) = get(two, f"/v1/responses/{first['id']}/images").json()["data"]
    assert image["pinned"]
    assert two.http().post(f"{path}/unpin").status_code == 200
    (image,) = get(one, f"/v1/responses/{first['id']}/images").json()["data"]
    assert not image["pinned"]


def test_a_response_that_runs_elsewhere_is_no_ones_to_continue_until_it_has_ended(
    pair: Pair,
) -> None:
    one, two = pair
    one.engine.hold_at = 1
    body = {"input": "slow", "background": True}
    running = one.http().post("/v1/responses", json=body).json()
    asked = {"input": "more", "previous_response_id": running["id"]}
    assert two.http().post("/v1/responses", json=asked).status_code == 400
    one.engine.hold_at = None
    path = f"/v1/responses/{running['id']}"
    assert eventually(lambda: get(one, path).json()["status"] == "completed")
    assert get(two, path).json()["status"] == "completed"
    assert two.http().post("/v1/responses", json=asked).status_code == 200


def test_a_folder_is_one_servers_alone_or_shared_by_those_that_say_so(tmp_path: Path) -> None:
    alone = ServerConfig(data_dir=tmp_path)
    shared = ServerConfig(data_dir=tmp_path, replica="one")
    app = create_app(FakeEngine(), alone)
    with pytest.raises(CannotStoreError, match="another server"):
        create_app(FakeEngine(), shared)
    app.state.services.journal.close()
    app = create_app(FakeEngine(), shared)
    with pytest.raises(CannotStoreError, match="another server"):
        create_app(FakeEngine(), alone)
    app.state.services.journal.close()


def test_bytes_that_nobody_names_are_swept_up_and_no_others(
    begin: Callable[..., Running], tmp_path: Path
) -> None:
    one = begin("one")
    upload(one, png("kept"))
    show(one, {"image_url": data_url(png("shown"))})
    gone = upload(one, png("gone"))
    one.http().delete(f"/v1/files/{gone}")
    one.idle()
    blobs = tmp_path / "data" / "blobs"
    assert len(list(blobs.iterdir())) == 3
    old = time.time() - ORPHAN_S - 1
    siblings = begin("two").services.siblings
    assert isinstance(siblings, SharedStore)
    siblings._sweep_files()
    assert len(list(blobs.iterdir())) == 3  # young ones may be about to be named
    for path in blobs.iterdir():
        os.utime(path, (old, old))
    siblings._sweep_files()
    assert {path.read_bytes() for path in blobs.iterdir()} == {png("kept"), png("shown")}
