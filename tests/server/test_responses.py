"""Responses over HTTP through the official SDK: state, resume, cancel, isolation."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.conftest import Running, data_url, eventually, png

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def raw_events(running: Running, method: str, path: str, **options: Any) -> list[dict[str, Any]]:
    """Every event of a stream, each checked strictly against the SDK's union."""
    events = []
    with running.http().stream(method, path, **options) as answer:
        if answer.status_code != 200:
            answer.read()
        assert answer.status_code == 200, answer.text
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert event["type"] == name
                EVENT.validate_python(event)
                events.append(event)
    return events


def deltas(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def test_plain_response_has_all_required_fields(server: Running) -> None:
    raw = server.openai().responses.with_raw_response.create(model="mm/fake", input="hi there")
    body = json.loads(raw.text)
    response = TypeAdapter(Response).validate_python(body)
    assert response.status == "completed" and response.output_text == "you said: hi there"
    assert body["usage"]["input_tokens_details"]["cache_write_tokens"] == len("<user>hi there")
    assert body["timings"]["predicted_n"] == 4
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_stream_events_come_in_order_without_gaps(server: Running) -> None:
    body = {"input": "a b c", "stream": True}
    events = raw_events(server, "POST", "/v1/responses", json=body)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    types = [e["type"] for e in events]
    assert sorted(set(types), key=types.index) == ORDER
    done = events[-1]["response"]
    assert deltas(events) == done["output"][0]["content"][0]["text"] == "you said: a b c"
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


def test_sdk_stream_helper_accumulates(server: Running) -> None:
    with server.openai().responses.stream(model="mm/fake", input="a b c") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "you said: a b c"


def test_previous_response_replays_exact_tokens_and_images(server: Running) -> None:
    client = server.openai()
    content: Any = [
        {"type": "input_text", "text": "what"},
        {"type": "input_image", "image_url": data_url(png("cat")), "detail": "auto"},
    ]
    first = client.responses.create(
        model="mm/fake", instructions="be brief", input=[{"role": "user", "content": content}]
    )
    second = client.responses.create(
        model="mm/fake", previous_response_id=first.id, input="and now"
    )
    third = client.responses.create(model="mm/fake", previous_response_id=second.id, input="so")
    old, new = server.engine.prompts[-2], server.engine.prompts[-1]
    assert [m.role for m in old] == ["user", "assistant", "user"]  # instructions are not inherited
    assert old[0].parts[1].data == png("cat")
    assert old[1].parts[0].token_ids == tuple(first.output_text.encode())
    assert new[: len(old)] == old
    assert third.previous_response_id == second.id


def test_branches_share_a_parent(server: Running) -> None:
    client = server.openai()
    root = client.responses.create(model="mm/fake", input="root")
    for text in ("left", "right"):
        client.responses.create(model="mm/fake", previous_response_id=root.id, input=text)
        assert len(server.engine.prompts[-1]) == 3
        assert server.engine.prompts[-1][2].parts[0].text == text


def test_stop_string_cuts_keep_the_text_not_the_tokens(server: Running) -> None:
    from mmserve.request import FinishReason, TokenEvent
    from mmserve.server.answer import Answer

    answer = Answer()
    answer.add(TokenEvent(text="AB", token_ids=(1, 2, 3)))
    assert answer.spliceable_tokens() == (1, 2, 3)
    answer.add(TokenEvent(finish_reason=FinishReason.STOP, stop_string="C"))
    assert answer.spliceable_tokens() is None


def test_unknown_or_foreign_parent_is_refused(launch: Any) -> None:
    running = launch(api_keys=("one", "two"))
    mine = running.openai().responses.create(model="mm/fake", input="x")
    other = running.http(headers={"authorization": "Bearer two"})
    for id in (mine.id, "resp_none"):
        answer = other.post("/v1/responses", json={"input": "y", "previous_response_id": id})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id"
        assert other.get(f"/v1/responses/{id}").status_code == 404
        assert other.delete(f"/v1/responses/{id}").status_code == 404
        assert other.post(f"/v1/responses/{id}/cancel").status_code == 404
        assert other.get(f"/v1/responses/{id}/input_items").status_code == 404


def test_cut_at_every_event_then_resume_gives_the_same_text(server: Running) -> None:
    body = {"input": "one two three 四 🐈", "stream": True}
    whole = raw_events(server, "POST", "/v1/responses", json=body)
    id = whole[0]["response"]["id"]
    for cut in range(-1, len(whole)):
        query = f"/v1/responses/{id}?stream=true&starting_after={cut}"
        rest = raw_events(server, "GET", query)
        expected = whole[cut + 1 :] or whole[-1:]
        assert rest == expected
    beyond = raw_events(server, "GET", f"/v1/responses/{id}?stream=true&starting_after=999")
    assert beyond == whole[-1:]


def test_several_tails_read_one_running_job(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 30, 10
    client = server.openai()
    started = client.responses.create(model="mm/fake", input="x", background=True)
    assert started.status == "in_progress"
    tails = [
        client.responses.retrieve(started.id, stream=True, starting_after=after) for after in (0, 5)
    ]
    assert [next(tail).sequence_number for tail in tails] == [1, 6]
    assert server.read_by(2)
    server.engine.hold_at = None
    for tail in tails:
        *_, last = tail
        assert last.type == "response.completed"
        assert last.response.output_text == ("w " * 30).rstrip()
    assert client.responses.retrieve(started.id).status == "completed"


def test_background_runs_on_without_readers(server: Running) -> None:
    server.engine.hold_at = 2
    client = server.openai()
    stream = client.responses.create(model="mm/fake", input="a b c d", background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created" and server.read_by(1)
    stream.close()
    assert server.read_by(0)
    server.engine.hold_at = None
    assert server.idle()
    response = client.responses.retrieve(first.response.id)
    assert response.status == "completed" and response.output_text == "you said: a b c d"


def test_foreground_is_aborted_when_its_client_leaves(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 20, 5
    client = server.openai()
    stream = client.responses.create(model="mm/fake", input="x", stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    assert server.idle()
    assert client.responses.retrieve(first.response.id).status == "cancelled"
    server.hang_up("/v1/responses", {"input": "x"})
    assert server.idle()
    assert len(server.engine.aborted) == 2


def test_cancel_keeps_the_partial_text_and_can_be_continued(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 20, 2
    client = server.openai()
    started = client.responses.create(model="mm/fake", input="x", background=True)
    assert eventually(lambda: client.responses.retrieve(started.id).output_text == "w w")
    cancelled = client.responses.cancel(started.id)
    assert cancelled.status == "cancelled" and cancelled.output_text == "w w"
    events = raw_events(server, "GET", f"/v1/responses/{started.id}?stream=true")
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["status"] == "cancelled"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.cancel(started.id)
    assert caught.value.code == "response_not_active"
    server.engine.script, server.engine.hold_at = None, None
    client.responses.create(model="mm/fake", input="go on", previous_response_id=started.id)
    assert server.engine.prompts[-1][1].parts[0].token_ids == tuple(cancelled.output_text.encode())


def test_delete_forgets_and_stops(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 20, 5
    client = server.openai()
    started = client.responses.create(model="mm/fake", input="x", background=True)
    client.responses.delete(started.id)
    assert server.idle()
    assert server.engine.aborted == [started.id]
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(started.id)
    assert caught.value.code == "response_not_found"


def test_input_items_are_listed_in_pages(server: Running) -> None:
    client = server.openai()
    items: Any = [{"role": "user", "content": f"m{i}"} for i in range(5)]
    image = {"type": "input_image", "image_url": data_url(png("z")), "detail": "low"}
    items.append({"type": "message", "role": "user", "content": [image]})
    response = client.responses.create(model="mm/fake", input=items)
    page = client.responses.input_items.list(response.id, limit=4, order="asc")
    assert len(page.data) == 4 and page.has_more
    everything = list(client.responses.input_items.list(response.id, limit=4))
    assert len(everything) == 6
    newest: Any = everything[0]
    assert newest.content[0].image_url is None
    listed: Any = client.responses.input_items.list(
        response.id, include=["message.input_image.image_url"]
    ).data[0]
    assert listed.content[0].image_url == data_url(png("z"))


def test_input_tokens_count_images(server: Running) -> None:
    content: Any = [{"type": "input_image", "image_url": data_url(png()), "detail": "auto"}]
    counted = server.openai().responses.input_tokens.count(
        model="mm/fake", input=[{"role": "user", "content": content}]
    )
    assert counted.input_tokens == len("<user>") + 16
    assert not server.engine.prompts


def test_length_limit_ends_as_incomplete(server: Running) -> None:
    body = {"input": "a b c", "stream": True, "max_output_tokens": 2}
    events = raw_events(server, "POST", "/v1/responses", json=body)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_engine_fault_ends_as_failed_and_cannot_be_continued(server: Running) -> None:
    server.engine.script = "a crash b"
    events = raw_events(server, "POST", "/v1/responses", json={"input": "x", "stream": True})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    id = events[0]["response"]["id"]
    body = {"input": "y", "previous_response_id": id}
    answer = server.http().post("/v1/responses", json=body)
    assert answer.status_code == 400


def test_store_false_cannot_be_retrieved_or_continued(server: Running) -> None:
    client = server.openai()
    response = client.responses.create(model="mm/fake", input="secret", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="mm/fake", input="y", previous_response_id=response.id)


def test_only_what_is_stored_may_have_its_kv_on_disk(server: Running) -> None:
    client = server.openai()
    client.responses.create(model="mm/fake", input="x")
    client.responses.create(model="mm/fake", input="x", store=False)
    message: Any = {"role": "user", "content": "x"}
    client.chat.completions.create(model="mm/fake", messages=[message])
    assert server.engine.durable[-3:] == [True, False, False]


def test_item_reference_and_returned_answers_use_exact_tokens(server: Running) -> None:
    client = server.openai()
    first = client.responses.create(model="mm/fake", input="x")
    message: Any = first.output[0]
    again: Any = [
        {"role": "user", "content": "x"},
        message.model_dump(),
        {"type": "item_reference", "id": message.id},
        {"role": "user", "content": "y"},
    ]
    client.responses.create(model="mm/fake", input=again)
    seen = server.engine.prompts[-1]
    assert seen[1].parts[0].token_ids == seen[2].parts[0].token_ids
    assert seen[1].parts[0].token_ids == tuple(first.output_text.encode())


def test_prefill_makes_no_output_and_joins_the_next_user_turn(server: Running) -> None:
    client = server.openai()
    image: Any = [{"type": "input_image", "image_url": data_url(png("p")), "detail": "auto"}]
    warm = client.responses.create(
        model="mm/fake",
        input=[{"role": "user", "content": image}],
        extra_body={"generate": False},
    )
    assert warm.status == "completed" and warm.output == []
    assert warm.usage is not None and warm.usage.output_tokens == 0
    client.responses.create(model="mm/fake", input="what", previous_response_id=warm.id)
    seen = server.engine.prompts[-1]
    assert len(seen) == 1
    assert [type(part).__name__ for part in seen[0].parts] == ["ImagePart", "TextPart"]


def test_truncation_auto_drops_the_oldest_turns(launch: Any) -> None:
    from tests.server.fake_engine import FakeEngine, FakeInfo

    running = launch(FakeEngine(info=FakeInfo(max_model_len=300), script="ok"))
    client = running.openai()
    last = None
    for turn in range(40):
        response = client.responses.create(
            model="mm/fake",
            input=f"turn {turn} " + "x" * 40,
            previous_response_id=last,
            truncation="auto",
        )
        last = response.id
    assert running.engine.prompts[-1][-1].parts[0].text.startswith("turn 39")
    assert running.engine.prompts[-1][-3].parts[0].text.startswith("turn 38")
    with pytest.raises(openai.BadRequestError) as caught:
        for _ in range(9):
            last = client.responses.create(
                model="mm/fake", input="y" * 60, previous_response_id=last
            ).id
    assert caught.value.code == "context_length_exceeded"


def test_logprobs_on_request(server: Running) -> None:
    body = {
        "input": "a b",
        "stream": True,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    events = raw_events(server, "POST", "/v1/responses", json=body)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert len(part["logprobs"]) == 4 and len(part["logprobs"][0]["top_logprobs"]) == 2


def test_two_thousand_images_stay_on_disk_only(launch: Any) -> None:
    import tracemalloc

    running = launch(max_stored_responses=5000)
    http = running.http()
    services = running.server.config.app.state.services

    def one(i: int) -> None:
        image = {"type": "input_image", "image_url": data_url(png(f"{i}") + b"\0" * 50_000)}
        body = {"input": [{"role": "user", "content": [image]}]}
        assert http.post("/v1/responses", json=body).status_code == 200
        running.engine.prompts.clear()
        running.engine.tenants.clear()
        running.engine._last.clear()

    one(0)
    tracemalloc.start()
    for i in range(1, 300):
        one(i)
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(services.blobs) == 300
    assert services.blobs.used_bytes > 300 * 50_000
    assert current < 7_500_000  # bytes; the images alone are 15 MB


def test_deleted_and_evicted_responses_free_their_images(launch: Any) -> None:
    running = launch(max_stored_responses=3)
    http = running.http()
    services = running.server.config.app.state.services
    ids = []
    for i in range(6):
        image = {"type": "input_image", "image_url": data_url(png(f"{i}"))}
        body = {"input": [{"role": "user", "content": [image]}]}
        ids.append(http.post("/v1/responses", json=body).json()["id"])
        running.engine.prompts.clear()
        running.engine.tenants.clear()
        running.engine._last.clear()
    assert len(services.blobs) == 3
    for id in ids[3:]:
        assert http.delete(f"/v1/responses/{id}").status_code == 200
    assert len(services.blobs) == 0 and services.blobs.used_bytes == 0


BAD = [
    ({}, "missing_required_parameter", "input"),
    ({"input": ""}, "invalid_value", "input"),
    ({"input": []}, "missing_required_parameter", "input"),
    ({"input": 7}, "invalid_value", "input"),
    ({"input": "x", "model": "nope"}, "model_not_found", "model"),
    ({"input": [{"role": "user", "content": ""}]}, "invalid_value", "input[0]"),
    ({"input": [{"type": "computer_call"}]}, "unsupported_parameter", "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "item_not_found", "input[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "missing_required_parameter",
        "input[0].content[0]",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_0"}]}]},
        "file_not_found",
        "input[0].content[0]",
    ),
    ({"input": "x", "max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"input": "x", "text": {"format": {"type": "yaml"}}}, "invalid_value", None),
    ({"input": "x", "tools": [{"type": "image_generation"}]}, "unsupported_parameter", None),
    ({"input": "x", "conversation": "c"}, "unsupported_parameter", "conversation"),
    (
        {"input": "x", "conversation": "c", "previous_response_id": "r"},
        "invalid_value",
        "conversation",
    ),
    ({"input": "x", "background": True, "store": False}, "invalid_value", "background"),
    ({"input": "x", "truncation": "some"}, "invalid_value", "truncation"),
    ({"input": "x", "metadata": {"a": 1}}, "invalid_value", "metadata.a"),
    ({"input": "y" * 5000}, "context_length_exceeded", None),
]


@pytest.mark.parametrize(("body", "code", "param"), BAD, ids=[str(b[0])[:60] for b in BAD])
def test_refusals_name_code_and_field(
    server: Running, body: dict[str, Any], code: str, param: str | None
) -> None:
    answer = server.http().post("/v1/responses", json=body)
    assert answer.status_code == (404 if code.endswith("_found") else 400)
    error = answer.json()["error"]
    assert error["code"] == code
    assert param is None or error["param"] == param
    streamed = server.http().post("/v1/responses", json={**body, "stream": True})
    assert streamed.status_code == answer.status_code
    assert streamed.headers["content-type"] == "application/json"


def test_bad_queries_are_refused(server: Running) -> None:
    http = server.http()
    id = http.post("/v1/responses", json={"input": "x"}).json()["id"]
    for query in ("stream=true&starting_after=x", "stream=true&starting_after=-5"):
        assert http.get(f"/v1/responses/{id}?{query}").status_code == 400
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nope"):
        assert http.get(f"/v1/responses/{id}/input_items?{query}").status_code == 400


def test_evicted_log_is_a_clear_400(launch: Any) -> None:
    running = launch(max_log_events=8)
    running.engine.script = "w " * 50
    client = running.openai()
    response = client.responses.create(model="mm/fake", input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(response.id, stream=True, starting_after=0)
    assert caught.value.code == "invalid_value"
    assert client.responses.retrieve(response.id).output_text == ("w " * 50).rstrip()
