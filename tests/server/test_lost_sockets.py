"""Conversations whose socket is lost in the middle: nothing is forgotten, nothing sent again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mmserve.config import ImageLimits
from mmserve.prompt import ImagePart
from tests.server.conftest import Running, data_url, eventually, png
from tests.server.fake_engine import FakeEngine, FakeInfo
from tests.server.responses_client import create, open_socket, receive, until_end

Launch = Callable[..., Running]
PICTURES = 30


def last_words(running: Running) -> list[str]:
    """All texts of the newest prompt, oldest first."""
    parts = [part for message in running.engine.prompts[-1] for part in message.parts]
    return [str(getattr(part, "text", "")) for part in parts if getattr(part, "text", "")]


def pictures_shown(running: Running) -> int:
    parts = [part for message in running.engine.prompts[-1] for part in message.parts]
    return sum(isinstance(part, ImagePart) for part in parts)


def id_of(events: list[dict[str, Any]]) -> str:
    id: str = events[-1]["response"]["id"]
    return id


def test_a_turn_that_loses_its_socket_is_finished_and_the_next_one_knows_all_before(
    launch: Launch,
) -> None:
    """B27."""
    running = launch()
    with open_socket(running) as ws:
        create(ws, "my name is Ada")
        first = id_of(until_end(ws))
        running.engine.hold_at = 1
        create(ws, "and my cat is Bo", previous_response_id=first)
        event = receive(ws)
        second = event["response"]["id"]
        while event["type"] != "response.output_text.delta":
            event = receive(ws)
        ws.socket.close()
    assert running.read_by(0)
    running.engine.hold_at = None
    stream = running.http().get(
        f"/v1/responses/{second}?stream=true&starting_after={event['sequence_number']}"
    )
    numbers = [
        json.loads(line[6:])["sequence_number"]
        for line in stream.text.splitlines()
        if line.startswith("data: ")
    ]
    start = event["sequence_number"] + 1
    assert numbers == list(range(start, start + len(numbers)))
    with open_socket(running) as ws:
        create(ws, "who am I?", previous_response_id=second)
        tokens = [until_end(ws)[-1]["response"]["usage"]["input_tokens"]]
        assert last_words(running)[0] == "my name is Ada"
        create(ws, "who am I?")
        tokens.append(until_end(ws)[-1]["response"]["usage"]["input_tokens"])
    assert tokens[0] > tokens[1] + len("my name is Ada") + len("and my cat is Bo")


def test_a_conversation_of_many_pictures_goes_on_by_its_name_alone(launch: Launch) -> None:
    """B61."""
    limits = ImageLimits(max_bytes=1024 * 1024, max_images=2 * PICTURES)
    running = launch(FakeEngine(info=FakeInfo(image_limits=limits)))
    parent: dict[str, Any] = {}
    with open_socket(running) as ws:
        for number in range(PICTURES):
            picture = {"type": "input_image", "image_url": data_url(png(f"{number}" * 500))}
            content = [picture, {"type": "input_text", "text": f"picture {number}"}]
            body = {"type": "response.create", "input": [{"role": "user", "content": content}]}
            ws.send(json.dumps({**body, **parent}))
            parent = {"previous_response_id": id_of(until_end(ws))}
        ws.socket.close()
    assert eventually(lambda: running.services.sockets == {})
    with open_socket(running, max_size=64 * 1024) as ws:
        question = json.dumps({"type": "response.create", "input": "go on", **parent})
        assert len(question) < 200, "only a name and a question are sent"
        ws.send(question)
        events = until_end(ws)
        assert events[-1]["type"] == "response.completed"
        assert pictures_shown(running) == PICTURES
        kept = {"previous_response_id": id_of(events)}
        huge = {"type": "input_image", "image_url": data_url(png("x" * 2 * 1024 * 1024))}
        content = [{"type": "input_text", "text": "and this"}, huge]
        refused = {"type": "response.create", "input": [{"role": "user", "content": content}]}
        ws.send(json.dumps({**refused, **kept}))
        error = until_end(ws)[-1]
        assert error["type"] == "error" and error["error"]["code"] == "image_too_large"
        create(ws, "and this", **kept)
        assert until_end(ws)[-1]["type"] == "response.completed"
        assert last_words(running)[-1] == "and this" and "go on" in last_words(running)
