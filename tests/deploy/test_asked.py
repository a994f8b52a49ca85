"""What a request says of where it belongs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from mmserve.config import ServerConfig
from mmserve.deploy.asked import Asked, digest, of_form, of_json, of_object, of_path, replica_of
from mmserve.server.wire import new_id

PICTURE = b"\x89PNG picture"
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
SHA = hashlib.sha256(PICTURE).hexdigest()

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.from_regex("[a-z0-9]{1,16}", fullmatch=True), st.sampled_from(["resp", "file"]))
def test_the_ids_that_a_replica_makes_name_it(name: str, kind: str) -> None:
    assert replica_of(new_id(ServerConfig(replica=name).prefix(kind))) == name
    assert replica_of(new_id(ServerConfig().prefix(kind))) is None


def test_a_path_names_who_keeps_what_it_is_about() -> None:
    id = new_id("resp_one")
    assert of_path(f"/v1/responses/{id}/images/x/pin") == Asked(home="one")
    assert of_path("/v1/responses") == Asked()


def test_a_picture_is_known_by_its_bytes_in_every_form_of_a_message() -> None:
    chat = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": URL}}]}]}
    response = {"input": [{"content": [{"type": "input_image", "image_url": URL}]}]}
    frame = {"type": "response.create", "response": response}
    file = {"messages": [{"content": [{"type": "file", "file": {"file_data": URL}}]}]}
    for body in (chat, response, frame, file):
        assert of_object(body).digests == (SHA,)


def test_an_upload_belongs_where_its_picture_does() -> None:
    form = httpx.Request("POST", "http://x", files={"file": ("a.png", PICTURE)}, data={"a": "b"})
    headers = Headers(dict(form.headers))
    assert asyncio.run(of_form(headers, form.read())).digests == (SHA,)
    assert asyncio.run(of_form(headers, b"rubbish")) == Asked()


def test_a_picture_that_was_uploaded_speaks_for_where_it_lies() -> None:
    part = {"type": "input_image", "file_id": new_id("file_two")}
    assert of_object({"input": [{"content": [part]}]}).votes == ("two",)


def test_a_conversation_begins_as_it_began_however_long_it_grows() -> None:
    first: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    later = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    assert of_object({"messages": first}).prefix == of_object({"messages": later}).prefix
    assert of_object({"messages": first[:1]}).prefix != of_object({"messages": first}).prefix


def test_who_keeps_the_turn_before_is_named_by_it() -> None:
    id = new_id("resp_one")
    assert of_object({"input": "x", "previous_response_id": id}).home == "one"
    assert of_object({"type": "response.cancel", "response_id": id}).home == "one"


@given(json_values)
def test_whatever_is_asked_is_read_without_a_word(value: Any) -> None:
    of_json(json.dumps(value))
    of_json(json.dumps({"messages": value, "input": value, "response": value}))
    of_json(json.dumps({"input": [{"content": [{"image_url": value, "file": value}]}]}))


def test_rubbish_asks_for_nothing() -> None:
    assert of_json(b"\xff{") == of_json("[1]") == of_json("[" * 100_000) == Asked()
    assert digest("data:image/png;base64,???") == digest("data:image/png;base64,???")
