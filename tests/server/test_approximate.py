"""In blend mode every answer says, on every surface, that it is approximate; else none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Running, data_url, png
from tests.server.fake_engine import FakeEngine, FakeInfo

URL = data_url(png())
CHAT: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
INPUT: Any = [
    {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}
]


@pytest.fixture
def blending(launch: Callable[..., Running]) -> Running:
    return launch(FakeEngine(FakeInfo(vision_mode="blend", blend_tokens=32)))


def said(running: Running) -> dict[str, Any]:
    """`cache.vision_mode` of an answer on each surface, by OpenAI's own library."""
    client = running.openai()
    chat, responses = client.chat.completions, client.responses
    modes: dict[str, Any] = {}

    def note(surface: str, cache: Any) -> None:
        modes[surface] = cache.get("vision_mode")

    whole: Any = chat.create(model="mm/fake", messages=CHAT)
    note("chat", whole.usage.cache)
    chunks: Any = list(chat.create(model="mm/fake", messages=CHAT, stream=True))
    note("chat, streamed", chunks[-1].cache)
    options: Any = {"include_usage": True}
    stream = chat.create(model="mm/fake", messages=CHAT, stream=True, stream_options=options)
    chunks = list(stream)
    note("chat, streamed with usage", chunks[-1].usage.cache)
    response: Any = responses.create(model="mm/fake", input=INPUT)
    note("responses", response.usage.cache)
    completed: Any = list(responses.create(model="mm/fake", input=INPUT, stream=True))[-1]
    note("responses, streamed", completed.response.usage.cache)
    with responses.connect() as socket:
        socket.response.create(model="mm/fake", input=INPUT)
        ends = (e for e in socket if e.type == "response.completed")
        completed = next(ends)
        note("responses, socket", completed.response.usage.cache)
    return modes


def test_answers_in_blend_mode_say_so_on_every_surface(blending: Running) -> None:
    assert set(said(blending).values()) == {"blend"}


def test_exact_answers_say_nothing(server: Running) -> None:
    assert set(said(server).values()) == {None}


def test_a_model_says_its_mode(blending: Running, server: Running) -> None:
    model: Any = blending.openai().models.retrieve("mm/fake")
    assert (model.vision_mode, model.blend_tokens) == ("blend", 32)
    exact = server.http().get("/v1/models").json()["data"][0]
    assert exact["vision_mode"] == "isolated" and "blend_tokens" not in exact


def test_a_model_without_images_has_no_mode(launch: Callable[..., Running]) -> None:
    running = launch(FakeEngine(FakeInfo(image_tokens=0)))
    assert "vision_mode" not in running.http().get("/v1/models/mm/fake").json()
