"""The images of a stored conversation: listed, pinned, forgotten, shown again, and named again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from mmserve.config import ImageLimits, ServerConfig
from mmserve.held_image import ImageId
from mmserve.prompt import ImagePart
from tests.server.conftest import Running, data_url, eventually, png, start
from tests.server.fake_engine import IMAGE_TOKENS, FakeEngine, FakeInfo
from tests.server.responses_client import open_socket, until_end

Start = Callable[..., Running]
Json = dict[str, Any]


def engine(**info: Any) -> FakeEngine:
    return FakeEngine(FakeInfo(image_limits=ImageLimits(max_images=100), **info))


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """Start a server over one folder; one that ran before is stopped."""
    stops: list[Callable[[], None]] = []

    def again(fake: FakeEngine | None = None) -> Running:
        while stops:
            stops.pop()()
        running, stop = start(ServerConfig(port=0, data_dir=tmp_path / "data"), fake or engine())
        stops.append(stop)
        return running

    yield again
    while stops:
        stops.pop()()


def image(tag: str) -> Json:
    return {"type": "input_image", "image_url": data_url(png(tag))}


def ask(running: Running, *parts: str | Json, after: Json | None = None, **body: Any) -> Json:
    content = [{"type": "input_text", "text": p} if isinstance(p, str) else p for p in parts]
    body |= {"input": [{"role": "user", "content": content}]}
    body["previous_response_id"] = after["id"] if after else None
    answer = running.http().post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert running.idle()
    response: Json = answer.json()
    return response


def talk(running: Running, *tags: str, **body: Any) -> list[Json]:
    """A turn for each image; the turns."""
    turns: list[Json] = []
    for tag in tags:
        turns.append(ask(running, tag, image(tag), after=turns[-1] if turns else None, **body))
    return turns


def sha(tag: str) -> str:
    return hashlib.sha256(png(tag)).hexdigest()


def listed(running: Running, turn: Json) -> list[Json]:
    answer = running.http().get(f"/v1/responses/{turn['id']}/images")
    assert answer.status_code == 200, answer.text
    data: list[Json] = answer.json()["data"]
    return data


def act(running: Running, turn: Json, name: str, action: str, **body: Any) -> Any:
    path = f"/v1/responses/{turn['id']}/images/{name}/{action}"
    return running.http().post(path, json=body) if body else running.http().post(path)


def done(running: Running, turn: Json, name: str, action: str, **body: Any) -> list[Json]:
    answer = act(running, turn, name, action, **body)
    assert answer.status_code == 200, answer.text
    data: list[Json] = answer.json()["data"]
    return data


def shown(running: Running) -> list[tuple[int | None, str]]:
    """Number and state of each image of the last prompt."""
    parts = [part for message in running.engine.prompts[-1] for part in message.parts]
    return [(part.number, part.state) for part in parts if isinstance(part, ImagePart)]


# Listing


def test_a_conversation_tells_what_it_holds(begin: Start) -> None:
    running = begin()
    file = running.openai().files.create(file=("f.png", png("file")), purpose="vision")
    first, second = talk(running, "a", "b")
    third = ask(running, {"type": "input_image", "file_id": file.id}, image("a"), after=second)
    images = listed(running, third)
    assert [i["number"] for i in images] == [1, 2, 3, 4]
    assert [i["sha256"] for i in images] == [sha(tag) for tag in ("a", "b", "file", "a")]
    assert [i["file_id"] for i in images] == [None, None, file.id, None]
    firsts = [first["id"], second["id"], third["id"], third["id"]]
    assert [i["first_response_id"] for i in images] == firsts
    assert images[2]["item_id"] == images[3]["item_id"] != images[0]["item_id"]
    assert images[0] | {"hits": 3} == {
        "object": "response.image",
        "number": 1,
        "item_id": images[0]["item_id"],
        "file_id": None,
        "sha256": sha("a"),
        "first_response_id": first["id"],
        "tokens": IMAGE_TOKENS,
        "state": "active",
        "bytes": 1024,
        "hits": 3,
        "pinned": False,
        "forgotten": None,
    }
    assert len(listed(running, first)) == 1, "as the conversation was there"


def test_images_of_turns_that_were_cut_are_listed_while_they_can_be_read(begin: Start) -> None:
    running = begin()
    policy = {"window": 300, "images": 2}
    turns = talk(running, *"abcdefgh", session_policy=policy)
    images = listed(running, turns[-1])
    assert 2 <= len(images) < 8 and images[-1]["number"] == 8
    assert all(i["item_id"] for i in images), "also of items that were dropped"


# Pins


def test_a_pin_is_inherited_kept_in_the_pool_and_let_go_with_its_last_response(
    begin: Start,
) -> None:
    running = begin()
    first, second = talk(running, "a", "b")
    (pinned,) = done(running, second, sha("a"), "pin")
    assert pinned["pinned"] and pinned["number"] == 1
    key = ImageId((bytes.fromhex(sha("a")),))
    assert running.engine.pinned == {key}
    third = ask(running, "c", after=second)
    assert [i["pinned"] for i in listed(running, third)] == [True, False]
    assert not listed(running, first)[0]["pinned"], "an older turn goes by what it was"
    http = running.http()
    http.delete(f"/v1/responses/{second['id']}")
    assert running.engine.pinned == {key}
    http.delete(f"/v1/responses/{third['id']}")
    assert running.engine.pinned == set()


def test_unpinning_lets_go(begin: Start) -> None:
    running = begin()
    (turn,) = talk(running, "a")
    done(running, turn, sha("a"), "pin")
    assert not done(running, turn, sha("a"), "unpin")[0]["pinned"]
    assert running.engine.pinned == set()


def test_pins_outlive_the_process(begin: Start) -> None:
    running = begin()
    (turn,) = talk(running, "a")
    done(running, turn, sha("a"), "pin")
    running = begin(engine())
    assert eventually(lambda: running.engine.pinned == {ImageId((bytes.fromhex(sha("a")),))})
    assert listed(running, turn)[0]["pinned"]


def test_a_pin_beyond_the_budget_is_refused_and_leaves_nothing(begin: Start) -> None:
    running = begin()
    running.engine.max_pinned = 2
    turn = ask(running, *map(image, "abc"))
    done(running, turn, sha("a"), "pin")
    (item,) = {i["item_id"] for i in listed(running, turn)}
    refused = act(running, turn, item, "pin")  # all three
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "pin_budget_exceeded"
    assert len(running.engine.pinned) == 1
    assert [i["pinned"] for i in listed(running, turn)] == [True, False, False]


def test_a_pin_of_a_response_that_is_deleted_meanwhile_is_let_go(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = begin()
    (turn,) = talk(running, "a")
    pin, pinning, deleted = running.engine.pin_image, threading.Event(), threading.Event()

    async def slowly(image: ImageId) -> None:
        pinning.set()
        await asyncio.to_thread(deleted.wait)
        await pin(image)

    monkeypatch.setattr(running.engine, "pin_image", slowly)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(act, running, turn, sha("a"), "pin")
        assert pinning.wait(60)
        running.http().delete(f"/v1/responses/{turn['id']}")
        deleted.set()
        assert answer.result().status_code == 404
    assert running.engine.pinned == set()
    monkeypatch.undo()
    (again,) = talk(running, "a")
    done(running, again, sha("a"), "pin")
    done(running, again, sha("a"), "unpin")
    assert running.engine.pinned == set()


# Forgetting


def test_a_forgotten_image_keeps_its_number_and_the_new_layout_is_computed_at_once(
    begin: Start,
) -> None:
    running = begin()
    turns = talk(running, "a", "b", "c")
    (forgotten,) = done(running, turns[-1], sha("b"), "forget")
    assert forgotten["forgotten"] == "recompute"
    assert eventually(lambda: len(running.engine.prefills) == 1)
    assert running.idle()
    assert shown(running) == [(1, "shown"), (2, "gone"), (3, "shown")]
    after = ask(running, "d", image("d"), after=turns[-1])
    assert shown(running) == [(1, "shown"), (2, "gone"), (3, "shown"), (4, "shown")]
    assert [i["forgotten"] for i in listed(running, after)] == [None, "recompute", None, None]
    ask(running, "e", after=turns[1])
    assert shown(running) == [(1, "shown"), (2, "shown")], "another branch knows nothing of it"
    done(running, after, sha("b"), "restore")
    ask(running, "f", after=after)
    assert {state for _, state in shown(running)} == {"shown"}


def test_a_marked_image_is_said_to_make_answers_approximate(begin: Start) -> None:
    running = begin()
    turns = talk(running, "a", "b")
    done(running, turns[-1], sha("a"), "forget", mode="mark")
    after = ask(running, "c", after=turns[-1])
    assert shown(running) == [(1, "marked"), (2, "shown")]
    assert after["session"]["approximate"] and "marked" in after["session"]["why"]


def test_forgetting_outlives_the_process(begin: Start) -> None:
    running = begin()
    turns = talk(running, "a", "b")
    done(running, turns[-1], sha("a"), "forget")
    running = begin(engine())
    ask(running, "c", after=turns[-1])
    assert shown(running) == [(1, "gone"), (2, "shown")]


def test_a_forgotten_image_that_is_sent_again_is_shown_again(begin: Start) -> None:
    running = begin()
    turns = talk(running, "a", "b")
    done(running, turns[-1], sha("a"), "forget")
    ask(running, "again", image("a"), after=turns[-1])
    assert shown(running) == [(1, "shown"), (2, "shown"), (3, "shown")]


def test_pinning_shows_a_forgotten_image_and_forgetting_unpins(begin: Start) -> None:
    running = begin()
    (turn,) = talk(running, "a")
    done(running, turn, sha("a"), "pin")
    (gone,) = done(running, turn, sha("a"), "forget")
    assert (gone["pinned"], gone["forgotten"]) == (False, "recompute")
    assert running.engine.pinned == set()
    (back,) = done(running, turn, sha("a"), "pin")
    assert (back["pinned"], back["forgotten"]) == (True, None)


def test_all_images_of_an_item_or_a_file_are_meant(begin: Start) -> None:
    running = begin()
    file = running.openai().files.create(file=("f.png", png("file")), purpose="vision")
    turn = ask(running, image("a"), {"type": "input_image", "file_id": file.id})
    item = listed(running, turn)[0]["item_id"]
    assert len(done(running, turn, item, "forget")) == 2
    (restored,) = done(running, turn, file.id, "restore")
    assert restored["sha256"] == sha("file")
    assert [i["forgotten"] for i in listed(running, turn)] == ["recompute", None]


# Refusals


def test_refusals_name_what_is_wrong(begin: Start) -> None:
    running = begin()
    (turn,) = talk(running, "a")
    cases = [
        (act(running, turn, "0" * 64, "pin"), 404, "image_not_found", "image"),
        (
            act(running, {"id": "resp_no"}, sha("a"), "pin"),
            404,
            "response_not_found",
            "response_id",
        ),
        (act(running, turn, sha("a"), "forget", mode="burn"), 400, "invalid_value", "mode"),
        (act(running, turn, sha("a"), "forget", mode=5), 400, "invalid_value", "mode"),
        (act(running, turn, sha("a"), "paint"), 404, "not_found", None),
    ]
    for answer, status, code, param in cases:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


def test_marking_takes_a_model_whose_images_see_only_themselves(begin: Start) -> None:
    running = begin(engine(vision_mode="prefix"))
    (turn,) = talk(running, "a")
    refused = act(running, turn, sha("a"), "forget", mode="mark")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    done(running, turn, sha("a"), "forget")


def test_a_running_response_is_not_changed(begin: Start) -> None:
    running = begin()
    (turn,) = talk(running, "a")
    running.engine.hold_at = 0
    body = {"input": "x", "previous_response_id": turn["id"], "background": True}
    active = running.http().post("/v1/responses", json=body).json()
    assert act(running, active, sha("a"), "forget").status_code == 400
    running.engine.hold_at = None
    assert running.idle()
    done(running, active, sha("a"), "forget")


# Asking again of an earlier image


def test_an_earlier_image_is_named_by_its_item(begin: Start) -> None:
    running = begin()
    turn = ask(running, image("a"), image("b"))
    item = listed(running, turn)[0]["item_id"]
    again = {"type": "input_image", "item_id": item, "index": 1}
    other = ask(running, "what was it?", again)  # in a conversation of its own
    (found,) = listed(running, other)
    assert (found["sha256"], found["number"]) == (sha("b"), 1)
    assert found["item_id"] != item


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"item_id": "msg_no"}, "item_not_found"),
        ({"item_id": "HERE"}, "invalid_value"),
        ({"item_id": "HERE", "index": 2}, "invalid_value"),
        ({"item_id": "HERE", "index": "0"}, "invalid_value"),
        ({"item_id": 7}, "invalid_value"),
    ],
    ids=str,
)
def test_an_item_that_does_not_say_which_image_is_refused(
    begin: Start, part: Json, code: str
) -> None:
    running = begin()
    turn = ask(running, image("a"), image("b"))
    if part["item_id"] == "HERE":
        part = part | {"item_id": listed(running, turn)[0]["item_id"]}
    content = [{"type": "input_image", **part}]
    body = {"input": [{"role": "user", "content": content}]}
    answer = running.http().post("/v1/responses", json=body)
    assert answer.json()["error"]["code"] == code
    param = answer.json()["error"]["param"]
    assert param.startswith("input[0].content[0]")


def test_images_are_their_owners(launch: Callable[..., Running]) -> None:
    running = launch(api_keys=("sk-one", "sk-two"))
    turn = ask(running, image("a"))
    (mine,) = listed(running, turn)
    other = {"headers": {"authorization": "Bearer sk-two"}}
    path = f"/v1/responses/{turn['id']}/images"
    assert running.http(**other).get(path).status_code == 404
    assert running.http(**other).post(f"{path}/{mine['sha256']}/forget").status_code == 404
    again = {"type": "input_image", "item_id": mine["item_id"]}
    body = {"input": [{"role": "user", "content": [again]}]}
    assert running.http().post("/v1/responses", json=body).status_code == 200
    stolen = running.http(**other).post("/v1/responses", json=body)
    assert stolen.json()["error"]["code"] == "item_not_found"


def test_an_image_that_was_not_to_be_stored_is_named_on_its_socket_only(
    server: Running,
) -> None:
    def create(ws: ClientConnection, part: Json, **body: Any) -> Json:
        body |= {"input": [{"type": "message", "id": "msg_1", "role": "user", "content": [part]}]}
        ws.send(json.dumps({"type": "response.create", **body}))
        return until_end(ws)[-1]

    again = {"type": "input_image", "item_id": "msg_1"}
    with open_socket(server) as ws:
        create(ws, image("secret"), store=False)
        with open_socket(server) as other:
            assert create(other, again, store=False)["error"]["code"] == "item_not_found"
        assert create(ws, again)["error"]["code"] == "item_not_found", "it would be stored"
        shown = create(ws, again, store=False)["response"]["usage"]["input_tokens_details"]
    assert shown["image_tokens"] == IMAGE_TOKENS
