"""Realtime over WebSocket: order of events, items, responses, errors, and what ends a session."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from mmserve.config import ImageLimits
from mmserve.prompt import ImagePart, Message, TextPart, TokensPart
from mmserve.server import realtime_items
from mmserve.tools import HERMES
from tests.server.conftest import KEY, PATIENCE_S, Running, data_url, eventually, png
from tests.server.fake_engine import FakeEngine, FakeInfo, encode
from tests.server.realtime_client import open_realtime, text_of

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def said(running: Running) -> list[tuple[str, str]]:
    """The last prompt that the engine was given."""
    return read(running.engine.prompts[-1])


def read(prompt: list[Message]) -> list[tuple[str, str]]:
    """Roles and texts; an image is its tag."""
    messages = []
    for message in prompt:
        words = []
        for part in message.parts:
            if isinstance(part, TextPart):
                words.append(part.text)
            elif isinstance(part, TokensPart):
                words.append(bytes(part.token_ids).decode())
            elif isinstance(part, ImagePart):
                words.append(f"<{part.data[8:].decode()}>")
        messages.append((message.role, " ".join(words)))
    return messages


# The order of events


def test_one_answer_has_the_order_of_the_protocol(server: Running) -> None:
    with open_realtime(server, "?model=mm/fake") as client:
        updated = client.ask(
            "session.update", session={"type": "realtime", "instructions": "Be short."}
        )
        assert updated["type"] == "session.updated"
        assert updated["session"]["instructions"] == "Be short."
        assert updated["session"]["output_modalities"] == ["text"]
        added = client.add("one two")
        assert added["previous_item_id"] is None
        events = client.respond()
    types = [event["type"] for event in events]
    assert types[:4] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
    ]
    assert set(types[4:-5]) == {"response.output_text.delta"}
    assert types[-5:] == [
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    assert events[2]["item"]["status"] == "in_progress" and events[2]["item"]["content"] == []
    assert events[2]["previous_item_id"] == added["item"]["id"]
    assert events[3]["part"] == {"type": "text", "text": ""}
    assert len({event["event_id"] for event in events}) == len(events)
    assert not any("sequence_number" in event for event in events)
    done = events[-1]["response"]
    assert done["status"] == "completed" and done["status_details"] is None
    assert done["output"] == [events[-3]["item"]] == [events[-2]["item"]]
    assert done["output"][0]["content"] == [{"type": "output_text", "text": text_of(events)}]
    assert text_of(events) == "you said: one two"
    assert said(server) == [("system", "Be short."), ("user", "one two")]
    usage = done["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_token_details"] == {"text_tokens": 4, "audio_tokens": 0}
    assert done["session"] == {"dropped_items": [], "dropped_images": 0, "dropped_tokens": 0}


def test_an_answer_is_the_next_prompts_exact_tokens(server: Running) -> None:
    with open_realtime(server) as client:
        answer = client.say("hello")
        client.say("again")
    reply = server.engine.prompts[-1][1]
    assert (reply.role, reply.parts) == ("assistant", (TokensPart(encode(answer)),))


def test_images_are_counted_and_echoed_without_their_bytes(server: Running) -> None:
    with open_realtime(server) as client:
        added = client.add("What changed?", png("a"), png("b"))
        kinds = [part["type"] for part in added["item"]["content"]]
        assert kinds == ["input_text", "input_image", "input_image"]
        assert "image_url" not in added["item"]["content"][1]
        details = client.respond()[-1]["response"]["usage"]["input_token_details"]
        assert details["image_tokens"] == 32
        got = client.ask("conversation.item.retrieve", item_id=added["item"]["id"])
        assert got["item"]["content"][2]["image_url"] == data_url(png("b"))


def test_an_uploaded_file_is_an_image(server: Running) -> None:
    client = server.openai()
    file = client.files.create(file=("a.png", png("up")), purpose="vision")
    with open_realtime(server) as realtime:
        content = [{"type": "input_image", "file_id": file.id}]
        item = {"type": "message", "role": "user", "content": content}
        added = realtime.ask("conversation.item.create", item=item)
        assert added["item"]["content"][0]["file_id"] == file.id
        realtime.receive()
        realtime.respond()
    assert said(server)[-1] == ("user", "<up>")


# Items


def test_items_go_where_they_are_put(server: Running) -> None:
    with open_realtime(server) as client:
        first = client.add("first", id="item_1")
        assert first["item"]["id"] == "item_1"
        assert client.add("third")["previous_item_id"] == "item_1"
        assert client.add("second", previous="item_1")["previous_item_id"] == "item_1"
        assert client.add("zeroth", previous="root")["previous_item_id"] is None
        client.respond()
    assert [text for _, text in said(server)] == ["zeroth", "first", "second", "third"]


def test_a_system_item_and_a_quoted_answer_are_items_too(server: Running) -> None:
    with open_realtime(server) as client:
        client.add("Be kind.", role="system")
        content = [{"type": "output_text", "text": "As I said."}]
        item = {"type": "message", "role": "assistant", "content": content}
        added = client.ask("conversation.item.create", item=item)
        assert added["item"]["content"] == content
        client.receive()
        client.say("Well?")
    assert said(server) == [("system", "Be kind."), ("assistant", "As I said."), ("user", "Well?")]


def test_a_deleted_item_is_out_and_the_new_layout_computed_at_once(server: Running) -> None:
    with open_realtime(server) as client:
        image = client.add(png("old"))["item"]["id"]
        client.say("look")
        before = len(server.engine.prefills)
        deleted = client.ask("conversation.item.delete", item_id=image)
        assert (deleted["type"], deleted["item_id"]) == ("conversation.item.deleted", image)
        assert client.code("conversation.item.retrieve", item_id=image) == "item_not_found"
        assert eventually(lambda: len(server.engine.prefills) == before + 1)
        roles = [message.role for message in server.engine.prefills[-1]]
        assert roles == ["user", "assistant"]
        client.say("again")
    assert [text for _, text in said(server)] == ["look", "you said: look", "again"]


def test_a_text_is_cut_where_the_client_says(server: Running) -> None:
    with open_realtime(server) as client:
        client.add("one two three")
        answer = client.respond()[-1]["response"]["output"][0]["id"]
        where = {"item_id": answer, "content_index": 0, "audio_end_ms": 1500}
        cut = client.ask("conversation.item.truncate", **where, text_end=8)
        assert cut["type"] == "conversation.item.truncated"
        assert {k: cut[k] for k in where} == where and cut["text_end"] == 8
        client.say("go on")
        assert client.code("conversation.item.truncate", **where) == "invalid_value"
    assert said(server)[1] == ("assistant", "you said")


# Settings


def test_a_session_keeps_what_was_not_changed(server: Running) -> None:
    with open_realtime(server) as client:
        client.ask("session.update", session={"type": "realtime", "instructions": "A"})
        settings = {"type": "realtime", "max_output_tokens": 3, "tools": [TOOL]}
        session = client.ask("session.update", session=settings)["session"]
        assert (session["instructions"], session["max_output_tokens"]) == ("A", 3)
        assert session["tools"][0]["name"] == "look"
        bad = {"type": "realtime", "instructions": "B", "max_output_tokens": "many"}
        assert client.code("session.update", session=bad) == "invalid_value"
        again = client.ask("session.update", session={"type": "realtime"})["session"]
        assert again == session
        client.add("one two three four")
        done = client.respond()[-1]["response"]
        assert done["status"] == "incomplete"
        assert done["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
        assert done["output"][0]["status"] == "incomplete"
        own = client.respond(instructions="C", max_output_tokens="inf", metadata={"k": "v"})
        assert own[-1]["response"]["status"] == "completed"
        assert own[-1]["response"]["metadata"] == {"k": "v"}
        assert said(server)[0] == ("system", "C")
        session = client.ask(
            "session.update", session={"type": "realtime", "instructions": None, "tools": []}
        )["session"]
        assert session["instructions"] == "" and session["tools"] == []


# Calls


def test_a_call_is_an_item_and_its_output_comes_back(server: Running) -> None:
    server.engine.script = "Let me look.\n" + HERMES.call("look", '{"at": "it"}')
    with open_realtime(server) as client:
        client.add("What is it?")
        events = client.respond(tools=[TOOL])
        types = [e["type"] for e in events]
        assert types.count("response.output_item.done") == 2
        deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
        (done,) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
        assert "".join(e["delta"] for e in deltas) == done["arguments"] == '{"at": "it"}'
        said_item, call = events[-1]["response"]["output"]
        assert said_item["content"][0]["text"] == "Let me look."
        assert (call["type"], call["name"], call["call_id"]) == (
            "function_call",
            "look",
            done["call_id"],
        )
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a cup"}
        added = client.ask("conversation.item.create", item=output)
        assert added["previous_item_id"] == call["id"]
        client.receive()
        server.engine.script = "A cup."
        assert text_of(client.respond(tools=[TOOL])) == "A cup."
        client.ask("conversation.item.retrieve", item_id=call["id"])
    roles = [message.role for message in server.engine.prompts[-1]]
    assert roles == ["user", "assistant", "tool"]


# Cancel, failure, concurrency


def test_a_cancelled_answer_stays_as_far_as_it_came(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 20, 2
    with open_realtime(server) as client:
        client.add("x")
        client.send("response.create")
        client.until("response.output_text.delta")
        client.until("response.output_text.delta")  # it holds here
        assert client.code("response.create") == "conversation_already_has_active_response"
        client.send("response.cancel")
        events = client.until("response.done")
        done = events[-1]["response"]
        assert done["status"] == "cancelled"
        assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        assert done["output"][0]["status"] == "incomplete"
        item = client.ask("conversation.item.retrieve", item_id=done["output"][0]["id"])["item"]
        assert item["status"] == "incomplete" and item["content"][0]["text"].startswith("w")
        assert client.code("response.cancel") == "response_cancel_not_active"
        assert (
            client.code("response.cancel", response_id=done["id"]) == "response_cancel_not_active"
        )
        server.engine.script = server.engine.hold_at = None
        assert client.say("next") == "you said: next"
    assert server.idle()


def test_a_failed_answer_closes_its_item(server: Running) -> None:
    server.engine.script = "so far crash"
    with open_realtime(server) as client:
        client.add("x")
        events = client.respond()
        assert [e["type"] for e in events[-3:]] == [
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
        done = events[-1]["response"]
        assert done["status"] == "failed"
        assert done["status_details"]["error"]["message"] == "the engine tripped"
        assert done["output"][0]["status"] == "incomplete"
        server.engine.script = None
        assert client.say("still here") == "you said: still here"


def test_responses_out_of_band_run_in_parallel_and_leave_nothing(server: Running) -> None:
    with open_realtime(server) as client:
        seen = client.add(png("seen"))["item"]["id"]
        client.add("other")
        server.engine.hold_at = 1
        client.send("response.create")
        client.until("response.output_text.delta")
        ask = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}
        input = [{"type": "item_reference", "id": seen}, ask]
        ids = []
        for _ in range(2):
            client.send("response.create", response={"conversation": "none", "input": input})
            created = client.until("response.created")[-1]["response"]
            assert created["conversation_id"] is None
            ids.append(created["id"])
        assert said(server) == [("user", "<seen>"), ("user", "q")]
        server.engine.hold_at = None
        events: list[dict[str, Any]] = []
        while sum(e["type"] == "response.done" for e in events) < 3:
            events.append(client.receive())
        placed = [e for e in events if e["type"] == "conversation.item.done"]
        assert len(placed) == 1
        outputs = {e["response"]["id"] for e in events if e["type"] == "response.done"}
        assert outputs > set(ids)
        unknown = [{"type": "item_reference", "id": "no"}]
        code = client.code("response.create", response={"conversation": "none", "input": unknown})
        assert code == "item_not_found"


def test_input_replaces_the_conversation_and_the_answer_joins_it(server: Running) -> None:
    with open_realtime(server) as client:
        client.add("kept")
        ask = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}
        client.respond(input=[ask])
        assert said(server) == [("user", "q")]
        client.say("and now")
    assert said(server) == [("user", "kept"), ("assistant", "you said: q"), ("user", "and now")]


def test_too_many_running_responses_are_refused(launch: Callable[..., Any]) -> None:
    running = launch(lanes_per_socket=2)
    running.engine.hold_at = 0
    ask = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}
    with open_realtime(running) as client:
        for _ in range(2):
            client.send("response.create", response={"conversation": "none", "input": [ask]})
            client.until("response.created")
        answer = client.ask("response.create", response={"conversation": "none", "input": [ask]})
        while answer["type"] != "error":
            answer = client.receive()
        assert answer["error"]["code"] == "rate_limit_exceeded"


def test_a_lost_socket_aborts_everything(server: Running) -> None:
    server.engine.hold_at = 1
    with open_realtime(server) as client:
        client.add("x")
        client.send("response.create")
        client.until("response.created")
    assert server.idle()
    assert len(server.engine.aborted) == 1 and server.services.sockets == {}


def test_an_item_in_progress_is_its_responses(server: Running) -> None:
    server.engine.hold_at = 1
    with open_realtime(server) as client:
        client.add("x")
        client.send("response.create")
        item = client.until("conversation.item.added")[-1]["item"]["id"]
        client.until("response.output_text.delta")
        assert client.code("conversation.item.delete", item_id=item) == "invalid_value"
        client.add("while it speaks")
        server.engine.hold_at = None
        client.until("response.done")
        client.respond()
    assert [role for role, _ in said(server)] == ["user", "assistant", "user"]


# Truncation


def small(launch: Callable[..., Any], tokens: int) -> Running:
    limits = ImageLimits(max_images=64)
    running = launch(FakeEngine(info=FakeInfo(max_model_len=tokens, image_limits=limits)))
    assert isinstance(running, Running)
    return running


def test_auto_leaves_the_oldest_items_out_and_says_which(launch: Callable[..., Any]) -> None:
    running = small(launch, 800)  # a prompt may take 700, and keeps 560 after a cut
    with open_realtime(running) as client:
        client.add("system", role="system")
        ids = [client.add(f"{i}" * 94, png(f"{i}"))["item"]["id"] for i in range(6)]  # 116 tokens
        session = client.respond()[-1]["response"]["session"]
        assert session == {"dropped_items": ids[:2], "dropped_images": 2, "dropped_tokens": 232}
        assert said(running)[0] == ("system", "system")
        assert said(running)[1][1].startswith("2")
        again = client.respond(max_output_tokens=1)[-1]["response"]["session"]
        assert again["dropped_items"] == [], "what is out stays out, though it would fit now"
        assert client.ask("conversation.item.retrieve", item_id=ids[0])["item"]["id"] == ids[0]


def test_a_retention_ratio_cuts_so_deep_and_then_not_for_a_while(
    launch: Callable[..., Any],
) -> None:
    running = small(launch, 800)
    truncation = {"type": "retention_ratio", "retention_ratio": 0.5}
    with open_realtime(running) as client:
        settings = {"type": "realtime", "truncation": truncation, "max_output_tokens": 100}
        assert client.ask("session.update", session=settings)["session"]["truncation"] == truncation
        dropped = []
        for i in range(12):
            client.add(f"{i % 10}" * 94)
            dropped.append(len(client.respond()[-1]["response"]["session"]["dropped_items"]))
    cuts = [i for i, count in enumerate(dropped) if count]
    assert len(cuts) > 1 and all(dropped[i] >= 2 for i in cuts)
    assert all(b - a > 1 for a, b in zip(cuts, cuts[1:], strict=False)), dropped


def test_a_cut_that_the_next_turn_would_need_is_made_and_computed_before(
    launch: Callable[..., Any],
) -> None:
    running = small(launch, 800)  # 700 for a prompt; a cut is due from 612 on
    running.engine.script = "so"
    with open_realtime(running) as client:
        for i in range(6):
            client.add(f"{i}" * 94)  # 100 tokens
        first = client.respond()[-1]["response"]
        assert first["session"]["dropped_items"] == [] and not running.engine.prefills
        client.add("x" * 20)
        client.respond()
        assert eventually(lambda: running.engine.prefills) and running.idle()
        layout = read(running.engine.prefills[0])
        assert layout[0][1].startswith("1") and layout[-1] == ("assistant", "so")
        client.add("y")
        session = client.respond()[-1]["response"]["session"]
        assert len(session["dropped_items"]) == 1 and session["dropped_tokens"] == 100
        assert said(running) == [*layout, ("user", "y")]


def test_disabled_truncation_is_an_error_with_the_numbers(launch: Callable[..., Any]) -> None:
    running = small(launch, 400)
    with open_realtime(running) as client:
        client.ask("session.update", session={"type": "realtime", "truncation": "disabled"})
        for _ in range(3):
            client.add("x" * 150)
        assert client.code("response.create") == "context_length_exceeded"
        client.ask("session.update", session={"type": "realtime", "truncation": "auto"})
        assert client.respond()[-1]["response"]["status"] == "completed"
        client.add("y" * 500)
        assert client.code("response.create") == "context_length_exceeded"


# Errors


@pytest.mark.parametrize(
    ("type", "fields", "code"),
    [
        ("nonsense", {}, "invalid_event_type"),
        (7, {}, "invalid_event_type"),
        (["response.create"], {}, "invalid_event_type"),
        (None, {}, "missing_required_parameter"),
        ("input_audio_buffer.append", {"audio": "AA"}, "unsupported_modality"),
        ("output_audio_buffer.clear", {}, "unsupported_modality"),
        ("session.update", {}, "missing_required_parameter"),
        ("session.update", {"session": {}}, "missing_required_parameter"),
        ("session.update", {"session": 5}, "invalid_value"),
        ("session.update", {"session": {"type": "transcription"}}, "unsupported_parameter"),
        ("session.update", {"session": {"type": "realtime", "model": "x"}}, "invalid_value"),
        (
            "session.update",
            {"session": {"type": "realtime", "output_modalities": ["audio"]}},
            "unsupported_modality",
        ),
        ("session.update", {"session": {"type": "realtime", "truncation": 1}}, "invalid_value"),
        (
            "session.update",
            {"session": {"type": "realtime", "truncation": {"type": "retention_ratio"}}},
            "missing_required_parameter",
        ),
        (
            "session.update",
            {"session": {"type": "realtime", "prompt": {"id": "p"}}},
            "unsupported_parameter",
        ),
        ("conversation.item.create", {}, "missing_required_parameter"),
        ("conversation.item.create", {"item": "x"}, "invalid_value"),
        ("conversation.item.create", {"item": {"type": "mcp_call"}}, "unsupported_parameter"),
        (
            "conversation.item.create",
            {"item": {"type": "item_reference", "id": "a"}},
            "invalid_value",
        ),
        (
            "conversation.item.create",
            {"item": {"type": "message", "role": "user", "content": []}},
            "invalid_value",
        ),
        ("conversation.item.create", {"item": {"role": "tool"}}, "invalid_value"),
        (
            "conversation.item.create",
            {"item": {"role": "system", "content": [{"type": "input_image", "file_id": "f"}]}},
            "invalid_value",
        ),
        (
            "conversation.item.create",
            {"item": {"role": "user", "content": "x", "id": "i" * 65}},
            "invalid_value",
        ),
        (
            "conversation.item.create",
            {"item": {"role": "user", "content": "x"}, "previous_item_id": "no"},
            "invalid_previous_item_id",
        ),
        (
            "conversation.item.create",
            {"item": {"role": "user", "content": "x", "id": "here"}},
            "item_id_exists",
        ),
        ("conversation.item.retrieve", {"item_id": "no"}, "item_not_found"),
        ("conversation.item.retrieve", {}, "missing_required_parameter"),
        ("conversation.item.delete", {"item_id": "no"}, "item_not_found"),
        ("conversation.item.delete", {"item_id": 4}, "invalid_value"),
        ("conversation.item.truncate", {"item_id": "here"}, "missing_required_parameter"),
        (
            "conversation.item.truncate",
            {"item_id": "here", "content_index": 3, "audio_end_ms": 0, "text_end": 0},
            "invalid_value",
        ),
        (
            "conversation.item.truncate",
            {"item_id": "here", "content_index": 0, "audio_end_ms": 0, "text_end": 99},
            "invalid_value",
        ),
        ("response.create", {"response": {"conversation": "mine"}}, "invalid_value"),
        ("response.create", {"response": {"input": "x"}}, "invalid_value"),
        ("response.create", {"response": {"tool_choice": "required"}}, "invalid_value"),
        ("response.create", {"response": {"output_modalities": ["audio"]}}, "unsupported_modality"),
        ("response.cancel", {}, "response_cancel_not_active"),
        ("response.cancel", {"response_id": "resp_no"}, "response_cancel_not_active"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_refusal_names_its_event_and_leaves_the_session_usable(
    server: Running, type: Any, fields: dict[str, Any], code: str
) -> None:
    with open_realtime(server) as client:
        client.add("here", id="here")
        assert client.code(type, **fields) == code
        assert client.say("still") == "you said: still"
        assert len(said(server)) == 2, "a refused event changes nothing"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (data_url(png() + b"broken"), "invalid_image"),
        (data_url(b"not an image"), "unsupported_image_type"),
        (data_url(png() + b"\0" * 1_100_000), "image_too_large"),
        ("https://example.org/a.png", "image_url_not_allowed"),
        ("file_unknown", "file_not_found"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_a_bad_image_is_refused_with_its_item(server: Running, url: str, code: str) -> None:
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    with open_realtime(server) as client:
        answer = client.ask("conversation.item.create", item=item)
        assert answer["error"]["code"] == code
        assert answer["error"]["param"] == "item.content[0]"
        assert client.say("fine") == "you said: fine"


def test_a_conversation_is_bounded_in_bytes(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime_items, "MAX_BYTES", 4000)
    with open_realtime(server) as client:
        first = client.add("x" * 3000)["item"]["id"]
        item = {"role": "user", "content": "y" * 1000}
        assert client.code("conversation.item.create", item=item) == "request_too_large"
        client.ask("conversation.item.delete", item_id=first)
        client.add("y" * 1000)


def test_what_was_left_out_goes_for_good_where_there_is_no_room_for_both(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime_items, "MAX_BYTES", 5000)
    running = small(launch, 800)
    with open_realtime(running) as client:
        first = client.add("a" * 400)["item"]["id"]
        for letter in "bcdefgh":
            client.add(letter * 400)
            client.respond()
        assert client.code("conversation.item.retrieve", item_id=first) == "item_not_found"
        assert said(running)[-1][1].startswith("h")


def test_a_full_queue_is_an_error_event(server: Running) -> None:
    server.engine.queue_full = True
    with open_realtime(server) as client:
        client.add("x")
        assert client.code("response.create") == "queue_full"
        server.engine.queue_full = False
        assert client.respond()[-1]["response"]["status"] == "completed"


def test_malformed_frames_are_errors_and_ten_in_a_row_close_1008(server: Running) -> None:
    with open_realtime(server) as client:
        for frame in ("{", "[]", "nul", '"x"', "NaN", "[" * 20000, "", "1", "{}x"):
            client.ws.send(frame)
            assert client.receive()["error"]["code"] == "invalid_json"
        client.say("fine")
        for _ in range(10):
            client.ws.send("{")
        assert client.close_code() == 1008


def test_binary_and_huge_frames_close_as_the_protocol_says(launch: Callable[..., Any]) -> None:
    running = launch(max_frame_bytes=100_000)
    with open_realtime(running) as client:
        client.ws.send(b"\0")
        assert client.close_code() == 1003
    with open_realtime(running) as client:
        client.ws.send(json.dumps({"type": "response.create", "x": "x" * 200_000}))
        assert client.close_code() == 1009


JUNK: list[Any] = [None, True, -1, 2**70, 1.5, "", "x", "\ud800", [], [[]], {}, {"type": "x"}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_wrong_types_anywhere_are_errors_of_the_client(server: Running, junk: Any) -> None:
    bodies: list[dict[str, Any]] = [
        {"type": "session.update", "session": {"type": "realtime", "tools": junk}},
        {"type": "session.update", "session": {"type": "realtime", "truncation": junk}},
        {"type": "session.update", "session": {"type": "realtime", "output_modalities": junk}},
        {"type": "session.update", "session": junk},
        {"type": "conversation.item.create", "item": junk},
        {"type": "conversation.item.create", "item": {"role": "user", "content": junk}},
        {"type": "conversation.item.create", "item": {"role": junk, "content": "x"}},
        {"type": "conversation.item.create", "previous_item_id": junk, "item": {"role": "tool"}},
        {"type": "conversation.item.delete", "item_id": junk},
        {"type": "conversation.item.truncate", "item_id": "x", "content_index": junk},
        {"type": "response.create", "response": {"input": [junk], "conversation": "none"}},
        {"type": "response.create", "response": {"metadata": junk, "tool_choice": junk}},
        {"type": "response.cancel", "response_id": junk},
        {"type": junk},
    ]
    with open_realtime(server) as client:
        for i, body in enumerate(bodies):
            client.ws.send(json.dumps(body))
            mark = {"type": "nonsense", "event_id": f"mark {i}"}
            client.ws.send(json.dumps(mark))
            while (event := client.receive()).get("error", {}).get("event_id") != mark["event_id"]:
                if event["type"] == "error":
                    assert event["error"]["type"] == "invalid_request_error", (body, event)


# The socket


def test_browsers_bring_their_key_in_the_subprotocol(server: Running) -> None:
    url = server.url.replace("http", "ws", 1) + "/v1/realtime?model=mm/fake"
    protocols: Any = ["realtime", f"openai-insecure-api-key.{KEY}", "openai-beta.realtime-v1"]
    with connect(url, subprotocols=protocols) as ws:
        assert ws.subprotocol == "realtime"
        assert json.loads(ws.recv(timeout=PATIENCE_S))["type"] == "session.created"


@pytest.mark.parametrize(
    ("key", "query", "status"), [("no", "", 401), (KEY, "?model=other", 404)], ids=str
)
def test_a_refused_handshake_has_its_status(
    server: Running, key: str, query: str, status: int
) -> None:
    url = server.url.replace("http", "ws", 1) + f"/v1/realtime{query}"
    with pytest.raises(InvalidStatus) as refused:
        connect(url, additional_headers={"authorization": f"Bearer {key}"}).close()
    assert refused.value.response.status_code == status


def test_sockets_of_both_surfaces_count_together(launch: Callable[..., Running]) -> None:
    server = launch(sockets_per_key=1)
    with open_realtime(server):
        with pytest.raises(InvalidStatus) as refused, open_realtime(server):
            pass
        assert refused.value.response.status_code == 429
