"""OpenAI's SDK holds a Realtime conversation with the real engine, a tiny random model: what is
deleted was never there, and the other images cost nothing again."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import openai
import pytest
from PIL import Image

from mmserve.config import ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from tests.engine.tiny import IMAGE_TOKENS, tiny_config, tiny_model
from tests.server.conftest import eventually, start

PAGE = 16  # tokens
COLOURS = ["red", "green", "blue", "orange"]


def picture(colour: str) -> str:
    out = io.BytesIO()
    Image.new("RGB", (20, 20), colour).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


Served = tuple[openai.OpenAI, AsyncEngine]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers of the tiny model; all are stopped at the end."""
    stops: list[Callable[[], None]] = []

    def begin(**config: Any) -> Served:
        engine = AsyncEngine(
            tiny_config(text_pages=400, vision_pages=80, **config),
            lambda config: Engine(config, tiny_model(max_model_len=3000)),
        )
        running, stop = start(ServerConfig(port=0), cast(Any, engine))
        stops.append(stop)
        assert eventually(lambda: httpx.get(f"{running.url}/health").status_code == 200)
        return running.openai(), engine

    yield begin
    for stop in stops:
        stop()


def until(connection: Any, type: str) -> Any:
    for event in connection:
        assert event.type != "error", event
        if event.type == type:
            return event


def add(connection: Any, *parts: tuple[str, str]) -> str:
    kinds = {"text": "input_text", "image_url": "input_image"}
    content: Any = [{"type": kinds[kind], kind: value} for kind, value in parts]
    item: Any = {"type": "message", "role": "user", "content": content}
    connection.conversation.item.create(item=item)
    return str(until(connection, "conversation.item.done").item.id)


def answer(connection: Any) -> Any:
    connection.response.create()
    response = until(connection, "response.done").response
    assert response.status in ("completed", "incomplete"), response.status_details
    return response


def count(engine: AsyncEngine, name: str) -> float:
    counter = getattr(engine.engine.metrics, name)
    return float(counter.collect()[0].samples[0].value)


def begin(connection: Any) -> None:
    settings: Any = {"type": "realtime", "max_output_tokens": 8, "instructions": "Look."}
    settings |= {"temperature": 1.0, "seed": 5}  # greedily the tiny model says but one thing
    connection.session.update(session=settings)
    until(connection, "session.updated")


def turn(connection: Any, number: int, colour: str | None) -> tuple[str, Any]:
    """A turn with a picture, if any; returns the id of its item and the response."""
    image = [("image_url", picture(colour))] if colour else []
    id = add(connection, *image, ("text", f"question {number}"))
    return id, answer(connection)


def text_of(response: Any) -> str:
    return str(response.output[0].content[0].text)


def test_five_turns_four_images_one_deleted_and_on(serve: Callable[..., Served]) -> None:
    client, engine = serve()
    with client.realtime.connect(model="tiny") as connection:
        begin(connection)
        items = [turn(connection, i, colour)[0] for i, colour in enumerate([*COLOURS, None])]
        assert count(engine, "vision_encoder_runs") == count(engine, "vision_kv_writes") == 4
        prefilled = count(engine, "prompt_tokens")
        connection.conversation.item.delete(item_id=items[0])
        assert until(connection, "conversation.item.deleted").item_id == items[0]
        # The new layout is computed while nobody waits.
        assert eventually(lambda: count(engine, "prompt_tokens") > prefilled)
        assert eventually(lambda: not engine._generations)
        _, response = turn(connection, 5, None)
    assert count(engine, "vision_encoder_runs") == count(engine, "vision_kv_writes") == 4
    details = response.usage.input_token_details
    assert details.image_tokens == 3 * IMAGE_TOKENS
    assert details.cached_tokens_details.image_tokens == details.image_tokens
    own = len("<|im_start|>user\nquestion 5<|im_end|>\n<|im_start|>assistant\n")
    computed = response.usage.input_tokens - details.cached_tokens
    assert computed <= own + PAGE, "its own tokens, and of the page that was not full"


def test_what_was_computed_ahead_makes_no_difference(serve: Callable[..., Served]) -> None:
    answers = []
    for caching in (True, False):
        client, _ = serve(prefix_caching=caching)
        with client.realtime.connect(model="tiny") as connection:
            begin(connection)
            first, _ = turn(connection, 0, "red")
            answers += [text_of(turn(connection, i, COLOURS[i])[1]) for i in (1, 2)]
            connection.conversation.item.delete(item_id=first)
            until(connection, "conversation.item.deleted")
            answers += [text_of(turn(connection, i, None)[1]) for i in (3, 4)]
    assert answers[:4] == answers[4:]
    assert len(set(answers[:4])) == 4
