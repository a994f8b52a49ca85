"""Responses over WebSocket: SDK sockets, lanes, prefill, cancel, abuse, lost connections."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.server.conftest import KEY, PATIENCE_S, Running, data_url, eventually, png
from tests.server.proxy import CuttingProxy
from tests.server.responses_client import (
    TERMINAL,
    create,
    open_socket,
    receive,
    text_of,
    until_end,
)


def test_sdk_sync_socket_answers_and_continues(server: Running) -> None:
    with server.openai().responses.connect() as connection:
        previous = None
        for text in ("one", "two"):
            connection.response.create(model="mm/fake", input=text, previous_response_id=previous)
            for event in connection:
                if event.type == "response.completed":
                    assert event.response.output_text == f"you said: {text}"
                    previous = event.response.id
                    break


def test_sdk_async_socket_resumes_after_a_cut(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 40, 10
    with CuttingProxy(server.url) as proxy:
        text, answer = asyncio.run(cut_and_resume(server, proxy))
    assert text == answer == ("w " * 40).rstrip()


async def cut_and_resume(server: Running, proxy: CuttingProxy) -> tuple[str, str]:
    """The text pieced together around a cut at event 8, and the answer to a later turn."""
    seen: list[Any] = []
    arrived, cut_done = asyncio.Event(), asyncio.Event()

    async def read(connection: Any) -> None:
        async for event in connection:
            seen.append(event)
            if event.sequence_number == 8 and not cut_done.is_set():
                arrived.set()
                await cut_done.wait()

    client = server.async_openai().with_options(base_url=f"{proxy.url}/v1")
    async with client.responses.connect(on_reconnecting=lambda _: None) as connection:
        await connection.response.create(model="mm/fake", input="x")
        reader = asyncio.create_task(read(connection))
        await arrived.wait()
        id = seen[0].response.id
        proxy.cut()
        cut_done.set()
        assert await asyncio.to_thread(eventually, lambda: proxy.num_accepted == 2)
        before, last = list(seen), seen[-1].sequence_number
        rest = await client.responses.retrieve(id, stream=True, starting_after=last)
        server.engine.hold_at = None
        before += [event async for event in rest]
        await connection.response.create(model="mm/fake", input="again", previous_response_id=id)
        assert await asyncio.to_thread(eventually, lambda: seen[-1].type == "response.completed")
        reader.cancel()
    deltas = [event.delta for event in before if event.type == "response.output_text.delta"]
    return "".join(deltas), seen[-1].response.output_text


def test_lost_socket_leaves_a_stored_response_running(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 20, 5
    with open_socket(server) as ws:
        create(ws, "x")
        id = receive(ws)["response"]["id"]
        assert server.read_by(1)
    assert server.read_by(0)
    assert server.engine.running == {id}
    server.engine.hold_at = None
    events = list(server.openai().responses.retrieve(id, stream=True, starting_after=0))
    assert events[-1].type == "response.completed"
    assert events[0].sequence_number == 1


def test_another_reader_keeps_a_response_past_its_grace(launch: Callable[..., Any]) -> None:
    """The rest of the rule has a clock of its own, in test_job."""
    grace_s = 0.2
    running = launch(grace_s=grace_s)
    running.engine.script, running.engine.hold_at = "w " * 20, 5
    with open_socket(running) as ws:
        create(ws, "x")
        id = receive(ws)["response"]["id"]
        with running.http().stream("GET", f"/v1/responses/{id}?stream=true") as tail:
            lines = tail.iter_lines()  # held: a dropped iterator closes the connection
            next(lines)
            assert running.read_by(2)
            ws.close()
            assert running.read_by(1)
            time.sleep(3 * grace_s)  # a slow machine only makes it longer
            assert running.engine.running == {id}
    assert running.idle()
    assert running.openai().responses.retrieve(id).status == "cancelled"


def test_store_false_dies_with_its_socket(server: Running) -> None:
    with open_socket(server) as ws:
        create(ws, "secret", store=False)
        id = until_end(ws)[-1]["response"]["id"]
        create(ws, "more", store=False, previous_response_id=id)
        assert until_end(ws)[-1]["type"] == "response.completed"
        assert len(server.engine.prompts[-1]) == 3
        with open_socket(server) as other:
            create(other, "steal", previous_response_id=id)
            error = receive(other)
            assert error["error"]["code"] == "previous_response_not_found"
            assert error["status"] == 400
        assert server.http().get(f"/v1/responses/{id}").status_code == 404
        server.engine.hold_at = 0
        create(ws, "x", store=False)
        receive(ws)
    assert PATIENCE_S < server.services.config.grace_s and server.idle()


def test_failed_turn_drops_only_a_local_parent(server: Running) -> None:
    with open_socket(server) as ws:
        for store in (False, True):
            server.engine.script = None
            create(ws, "x", store=store)
            parent = until_end(ws)[-1]["response"]["id"]
            server.engine.script = "crash"
            create(ws, "y", store=store, previous_response_id=parent)
            assert until_end(ws)[-1]["type"] == "response.failed"
            server.engine.script = None
            create(ws, "z", store=store, previous_response_id=parent)
            assert until_end(ws)[-1]["type"] == ("response.completed" if store else "error")


def test_lanes_run_in_parallel_and_fifo_within(server: Running) -> None:
    server.engine.hold_at = len("you said: b1".split())
    lanes: dict[str, str | None] = {}  # by response
    with open_socket(server) as ws:

        def completed() -> tuple[str | None, str]:
            """The lane and the text of the next response that ends."""
            while (event := receive(ws))["type"] != "response.completed":
                if event["type"] == "response.created":
                    lanes[event["response"]["id"]] = event.get("stream_id")
            assert lanes[event["response"]["id"]] == event.get("stream_id")
            text = event["response"]["output"][0]["content"][0]["text"]
            return event.get("stream_id"), text.removeprefix("you said: ")

        for text in ("a1 x x x", "a2 y"):
            create(ws, text, stream_id="A")
        create(ws, "d1 z z z z z z z")
        create(ws, "b1", stream_id="B")
        assert completed() == ("B", "b1")
        assert sorted(map(str, lanes.values())) == ["A", "B", "None"]  # a2 waits for a1
        server.engine.hold_at = len("you said: a1 x x x".split())
        assert completed() == ("A", "a1 x x x")
        assert completed() == ("A", "a2 y")
        server.engine.hold_at = None
        assert completed() == (None, "d1 z z z z z z z")


def test_lane_bounds_are_errors_and_nothing_accepted_is_lost(launch: Callable[..., Any]) -> None:
    running = launch(lanes_per_socket=2, queue_per_lane=2)
    running.engine.hold_at = 0
    with open_socket(running) as ws:
        create(ws, "m0", stream_id="A")
        assert eventually(lambda: running.engine.running)  # no longer among those that wait
        for i in range(1, 5):
            create(ws, f"m{i}", stream_id="A")
        create(ws, "b", stream_id="B")
        create(ws, "c", stream_id="C")
        errors: list[Any] = []
        done: list[str] = []
        while len(done) < 4:
            event = receive(ws)
            if event["type"] == "error":
                errors.append((event["stream_id"], event["error"]["code"], event["status"]))
                if len(errors) == 3:
                    running.engine.hold_at = None
            if event["type"] == "response.completed":
                done.append(event["response"]["output"][0]["content"][0]["text"])
    assert errors == [("A", "queue_full", 429)] * 2 + [("C", "rate_limit_exceeded", 429)]
    assert sorted(done) == ["you said: b", "you said: m0", "you said: m1", "you said: m2"]


@pytest.mark.parametrize(
    "how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}], ids=str
)
def test_prefill_has_three_events(server: Running, how: dict[str, Any]) -> None:
    with open_socket(server) as ws:
        content = [{"type": "input_image", "image_url": data_url(png()), "detail": "auto"}]
        ws.send(
            json.dumps(
                {
                    "type": "response.create",
                    "stream_id": "w",
                    "input": [{"role": "user", "content": content}],
                    **how,
                }
            )
        )
        events = until_end(ws)
        assert [e["type"] for e in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        assert all(e["stream_id"] == "w" for e in events)
        assert events[-1]["response"]["output"] == []
        create(ws, "what", previous_response_id=events[-1]["response"]["id"])
        assert text_of(until_end(ws)).startswith("you said: [")


def test_cancel_ends_with_incomplete_cancelled(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "w " * 20, 5
    with open_socket(server) as ws:
        create(ws, "x")
        id = receive(ws)["response"]["id"]
        ws.send(json.dumps({"type": "response.cancel", "response_id": id}))
        last = until_end(ws)[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "cancelled"
        ws.send(json.dumps({"type": "response.cancel", "response_id": id}))
        assert receive(ws)["error"]["code"] == "response_not_active"


def test_steering_fails_aloud(server: Running) -> None:
    with open_socket(server) as ws:
        steer = {"type": "response.steer", "input": "left", "previous_response_id": "resp_1"}
        ws.send(json.dumps(steer))
        event = receive(ws)
        assert event["type"] == "response.steer.failed"
        assert event["error"]["code"] == "steering_not_supported"
        assert event["steer"] == {"input": "left", "previous_response_id": "resp_1"}


def test_errors_carry_status_lane_and_leave_the_socket_usable(server: Running) -> None:
    with open_socket(server) as ws:
        bad: list[tuple[dict[str, Any], str]] = [
            ({"type": "response.create", "stream_id": "L"}, "missing_required_parameter"),
            ({"type": "response.create", "input": "x", "model": "no"}, "model_not_found"),
            ({"type": "nonsense"}, "invalid_value"),
            ({"input": "x"}, "missing_required_parameter"),
            ({"type": 7}, "invalid_value"),
            ({"type": ["response.create"]}, "invalid_value"),
            ({"type": "response.create", "input": "x", "stream_id": 5}, "invalid_value"),
            ({"type": "response.create", "input": {"a": 1}}, "invalid_value"),
            ({"type": "response.cancel"}, "missing_required_parameter"),
        ]
        for frame, code in bad:
            ws.send(json.dumps(frame))
            event = receive(ws)
            assert (event["type"], event["error"]["code"]) == ("error", code), frame
            assert event.get("stream_id") == (frame.get("stream_id") if code[0] == "m" else None)
        server.engine.queue_full = True
        create(ws, "x")
        assert receive(ws)["status"] == 429
        server.engine.queue_full = False
        create(ws, "still here", stream=False, background=True)
        assert text_of(until_end(ws)) == "you said: still here"


def close_code(ws: ClientConnection) -> int:
    try:
        while True:
            ws.recv(timeout=PATIENCE_S)
    except ConnectionClosed as closed:
        assert closed.rcvd is not None
        return closed.rcvd.code


def test_ten_malformed_frames_in_a_row_close_1008(server: Running) -> None:
    with open_socket(server) as ws:
        for _ in range(9):
            ws.send("{")
            assert receive(ws)["error"]["code"] == "invalid_json"
        create(ws, "fine")
        until_end(ws)
        for frame in ("", "[]", "nul", '"x"', "NaN", "[" * 20000, "{", "{", "{", "{"):
            ws.send(frame)
        assert close_code(ws) == 1008


def test_binary_frame_closes_1003(server: Running) -> None:
    with open_socket(server) as ws:
        ws.send(b"\x00\x01")
        assert close_code(ws) == 1003


def test_huge_frame_closes_1009(launch: Callable[..., Any]) -> None:
    running = launch(max_frame_bytes=100_000)
    with open_socket(running) as ws:
        create(ws, "x" * 200_000)
        assert close_code(ws) == 1009
    with open_socket(running) as ws:
        create(ws, "ok")
        assert until_end(ws)[-1]["type"] == "response.completed"


def test_slow_reader_loses_no_text(launch: Callable[..., Any]) -> None:
    server = launch(slow_reader_s=2 * PATIENCE_S)
    word, count = "x" * 2000 + " ", 1500  # more than the buffers between us hold
    server.engine.script = word * count
    with open_socket(server, max_queue=1, max_size=None) as ws:
        create(ws, "x")
        events = [receive(ws)]
        assert server.idle()
        while events[-1]["type"] not in TERMINAL:
            events.append(json.loads(ws.recv(timeout=PATIENCE_S)))
    assert events[-1]["type"] == "response.completed"
    assert text_of(events) == (word * count).rstrip()


def test_reader_that_never_reads_is_closed_but_its_response_lives(
    launch: Callable[..., Any],
) -> None:
    running = launch(max_log_events=100_000, slow_reader_s=0.3)
    running.engine.script = ("x" * 20_000 + " ") * 400
    with open_socket(running, max_queue=1, close_timeout=0.5) as ws:
        create(ws, "x")
        id = receive(ws)["response"]["id"]
        assert eventually(lambda: running.services.sockets == {})
    assert running.idle()
    response = running.openai().responses.retrieve(id)
    assert response.status == "completed"
    shown = running.http().get("/metrics").text
    assert 'mmserve:slow_readers_total{kind="socket"} 1.0' in shown


def test_browser_keys_ride_in_the_subprotocol_and_never_come_back(server: Running) -> None:
    protocols: Any = ["realtime", f"openai-insecure-api-key.{KEY}"]
    with connect(server.ws_url, subprotocols=protocols) as ws:
        assert ws.subprotocol == "realtime"
        create(ws, "hi")
        until_end(ws)
    wrong: Any = ["realtime", "openai-insecure-api-key.nope"]
    with connect(server.ws_url, subprotocols=wrong) as ws:
        assert receive(ws)["error"]["code"] == "invalid_api_key"
        assert close_code(ws) == 1008


def test_thirty_picture_session_survives_a_cut_with_small_frames(
    launch: Callable[..., Any],
) -> None:
    from mmserve.config import ImageLimits
    from tests.server.fake_engine import FakeEngine, FakeInfo

    limits = ImageLimits(max_images=64)
    running = launch(FakeEngine(info=FakeInfo(max_model_len=9999, image_limits=limits)))
    last = None
    with open_socket(running) as ws:
        for i in range(30):
            image = {"type": "input_image", "image_url": data_url(png(f"{i}")), "detail": "auto"}
            body = {"input": [{"role": "user", "content": [image]}], "previous_response_id": last}
            ws.send(json.dumps({"type": "response.create", **body}))
            last = until_end(ws)[-1]["response"]["id"]
        ws.socket.shutdown(socket.SHUT_RDWR)
    with open_socket(running) as ws:
        create(ws, "go on", previous_response_id=last)
        usage = until_end(ws)[-1]["response"]["usage"]
    assert usage["input_tokens_details"]["image_tokens"] == 30 * 16


def test_refused_image_leaves_the_conversation_intact(server: Running) -> None:
    with open_socket(server) as ws:
        create(ws, "first")
        last = until_end(ws)[-1]["response"]["id"]
        big = {"type": "input_image", "image_url": data_url(png() + b"\0" * 1_100_000)}
        content = [{"type": "input_text", "text": "kept"}, big]
        body = {"input": [{"role": "user", "content": content}], "previous_response_id": last}
        ws.send(json.dumps({"type": "response.create", **body}))
        error = receive(ws)["error"]
        assert error["code"] == "image_too_large"
        assert error["param"] == "input[0].content[1]"
        create(ws, "kept", previous_response_id=last)
        assert text_of(until_end(ws)) == "you said: kept"
