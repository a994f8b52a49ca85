"""OpenAI's SDK holds a Realtime conversation with the real engine, a tiny random model: what is
deleted was never there, and the other images cost nothing again."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


def add(connection: Any, *parts: tuple[str, str], previous: str | None = None) -> str:
    kinds = {"text": "input_text", "image_url": "input_image"}
    content: Any = [{"type": kinds[kind], kind: value} for kind, value in parts]
    item: Any = {"type": "message", "role": "user", "content": content}
    where = {} if previous is None else {"previous_item_id": previous}
    connection.conversation.item.create(item=item, **where)
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


@dataclass
class Editor:
    """Edits a conversation at random; the same seed makes the same edits."""

    connection: Any
    random: random.Random
    ids: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def step(self) -> None:
        edits = [self.add, self.add, self.insert, self.delete, self.cut, self.speak, self.speak]
        self.random.choice(edits)()

    def content(self) -> list[tuple[str, str]]:
        parts = [("text", f"note {self.random.randrange(100)}")]
        if self.random.random() < 0.5:
            parts.append(("image_url", picture(self.random.choice(COLOURS))))
        return parts

    def add(self) -> None:
        self.ids.append(add(self.connection, *self.content()))

    def insert(self) -> None:
        place = self.random.randrange(len(self.ids) + 1)
        previous = "root" if place == 0 else self.ids[place - 1]
        self.ids.insert(place, add(self.connection, *self.content(), previous=previous))

    def delete(self) -> None:
        if self.ids:
            id = self.ids.pop(self.random.randrange(len(self.ids)))
            self.connection.conversation.item.delete(item_id=id)
            until(self.connection, "conversation.item.deleted")

    def cut(self) -> None:
        """Of a user's text: an answer's random bytes are not the text that it is told as."""
        self.connection.conversation.item.create(
            item={
                "type": "message",
                "role": "system",
                "content": [{"type": "input_text", "text": "remember this and that"}],
            }
        )
        id = until(self.connection, "conversation.item.done").item.id
        where: Any = {"item_id": id, "content_index": 0, "audio_end_ms": 0}
        event = {"type": "conversation.item.truncate", **where}
        self.connection.send({**event, "text_end": self.random.randrange(1, 20)})
        until(self.connection, "conversation.item.truncated")
        self.ids.append(id)

    def speak(self) -> None:
        if self.ids:
            response = answer(self.connection)
            self.ids.append(response.output[0].id)
            self.said.append(text_of(response))


@pytest.mark.parametrize("seed", range(3))
def test_edited_at_random_it_answers_as_an_engine_without_a_cache(
    serve: Callable[..., Served], seed: int
) -> None:
    told = []
    for caching in (True, False):
        client, engine = serve(prefix_caching=caching)
        with client.realtime.connect(model="tiny") as connection:
            begin(connection)
            editor = Editor(connection, random.Random(seed))
            for _ in range(25):
                editor.step()
        told.append(editor.said)
        assert idle(engine)
    assert told[0] == told[1] and len(set(told[0])) > 1


def test_sockets_lost_at_any_moment_leave_the_pools_idle(serve: Callable[..., Served]) -> None:
    client, engine = serve()
    for seed in range(6):
        with client.realtime.connect(model="tiny") as connection:
            begin(connection)
            editor = Editor(connection, random.Random(seed))
            for _ in range(8):
                editor.step()
            editor.add()
            connection.response.create(response={"max_output_tokens": 500})
            until(connection, "response.created")
            if seed % 2:
                connection.response.cancel()
    assert idle(engine)


def idle(engine: AsyncEngine) -> bool:
    """Nothing runs, and no page is held but by the caches."""
    done = eventually(lambda: not engine._generations and not engine.engine.has_work)
    holdings = engine.engine.scheduler.holdings
    engine.engine.scheduler.check_invariants()
    for group, pages in enumerate(holdings.text):
        assert pages.num_free + holdings.cached_pages(group) == pages.num_pages
    assert all(index.num_referenced == 0 for index in holdings.vision)
    return done
